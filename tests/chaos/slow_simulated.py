"""``pagewise-executor --simulate`` whose steps take STEP_MS milliseconds: streams last long enough to be moved."""

import os
import sys

from pagewise_executor import main
from pagewise_executor.simulated import SimulatedRunner

if __name__ == "__main__":
    step = float(os.environ.get("STEP_MS", "20")) / 1000
    main.build_runner = lambda config, keys=None: SimulatedRunner(config, step)
    sys.exit(main.main())
