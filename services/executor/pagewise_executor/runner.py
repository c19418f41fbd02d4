"""What the executor service needs of whatever computes the steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewise_shared.protocol import CancelCopies, Copied, Inventory, MeasuredCosts, StepPlan, StepResult, Welcome


@dataclass(slots=True, frozen=True)
class RunnerInfo:
    """What a runner has to offer; the Hello is made of it (see ``Hello`` for the fields)."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    device: str
    dtype: str
    num_host_blocks: int = 0
    costs: MeasuredCosts | None = None
    block_endpoint: str = ""
    block_format: str = ""


class PendingStep(Protocol):
    """A step that has been issued."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` will not have to wait."""
        ...

    def result(self) -> StepResult:
        """The step's result; waits for the device."""
        ...


class Runner(Protocol):
    """Computes steps. All calls come from the thread that made it."""

    info: RunnerInfo

    def report_copies(self, report: Callable[[Copied], None]) -> None:
        """Tell ``report`` of all copies to and from elsewhere that have been made, on any thread."""
        ...

    @property
    def num_refused(self) -> int:
        """Connections of others that wanted its blocks and were refused, so far; read from any thread."""
        ...

    def cancel_copies(self, cancelled: CancelCopies) -> None:
        """What a step copies from a peer is not wanted any more; comes from any thread."""
        ...

    def inventory(self) -> Inventory | None:
        """What lies in the pools that a scheduler may use; the rows that run are given up for it."""
        ...

    def close(self) -> None:
        """Nothing will be asked of it any more."""
        ...

    def reset(self, welcome: Welcome) -> None:
        """Empty all rows and make room for ``welcome.max_num_seqs`` of them."""
        ...

    def execute(self, plan: StepPlan) -> PendingStep:
        """Issue a step; on a GPU it may still be running when this returns.

        Raises:
            InvalidPlanError: the plan contradicts what the runner holds.
        """
        ...


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """A step whose result is there already."""

    finished: StepResult

    @property
    def ready(self) -> bool:
        """Always."""
        return True

    def result(self) -> StepResult:
        """The result."""
        return self.finished
