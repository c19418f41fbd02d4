"""``pagewise-executor --simulate``, of which one step fails: the first in which a prompt of a given length joins.

python -m tests.e2e.failing_executor NUM_TOKENS MODEL [OPTIONS]
"""

import sys

from pagewise_executor.main import main
from pagewise_executor.runner import FinishedStep
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.protocol import StepPlan

_num_tokens = int(sys.argv.pop(1))
_execute = SimulatedRunner.execute
_failed = False


def _fail_once(self: SimulatedRunner, plan: StepPlan) -> FinishedStep:
    global _failed
    if not _failed and any(joined.num_prompt_tokens == _num_tokens for joined in plan.joined):
        _failed = True
        raise RuntimeError("the device is on fire")
    return _execute(self, plan)


if __name__ == "__main__":
    SimulatedRunner.execute = _fail_once  # type: ignore[method-assign]
    sys.exit(main())
