"""``pagewise-executor --simulate`` whose steps take STEP_MS milliseconds: streams last long enough to be moved."""

import os
import sys

from pagewise_executor import main
from pagewise_executor.simulated import SimulatedRunner

if __name__ == "__main__":
    main.build_runner = lambda config: SimulatedRunner(config, float(os.environ.get("STEP_MS", "20")) / 1000)
    sys.exit(main.main())
