"""The runner that invents tokens."""

from pagewise_executor.main import build_runner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import StepPlan, Welcome


def test_a_simulated_step_takes_as_long_as_it_is_told_to() -> None:
    runner = build_runner(ExecutorConfig(simulate=True, simulate_step=0.02))
    runner.reset(Welcome(1, 4, 64))
    assert runner.execute(StepPlan(1, 1)).result().elapsed_us >= 20_000
