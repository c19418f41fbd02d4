"""The interface between the executor service and the runner that computes its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewise_shared.protocol import (
    AdapterLoaded,
    CancelCopies,
    CompileGrammar,
    Copied,
    DropStored,
    Found,
    GrammarCompiled,
    Hello,
    Inventory,
    LoadAdapter,
    LookUp,
    Message,
    SetStoredBudgets,
    StepPlan,
    StepResult,
    StoredDropped,
    StoredGone,
    Welcome,
)

BesideSteps = CancelCopies | LookUp | DropStored | SetStoredBudgets | LoadAdapter | CompileGrammar
"""Messages of the scheduler that wait for no step, and that no step waits for."""
Report = Callable[[Copied | Found | StoredDropped | StoredGone | AdapterLoaded | GrammarCompiled], None]
"""Takes a runner's messages beside the results of steps; called on any thread."""


class Counted(Message, frozen=True):
    """The counters of a runner since it was made.

    Fields:
        num_refused: refused connections of executors that wanted blocks.
        num_storage_errors: failed reads and writes of tiers.
        num_grammar_waits: steps that have waited for the compilation of a grammar.
        copied_small, copied_exact, copied_above_bound: blocks that were copied to tiers below the device, by format
            (``CopiedBlocks``).
    """

    num_refused: int = 0
    num_storage_errors: int = 0
    num_grammar_waits: int = 0
    copied_small: int = 0
    copied_exact: int = 0
    copied_above_bound: int = 0


class PendingStep(Protocol):
    """A step that has been issued."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` will not have to wait."""

    def result(self) -> StepResult:
        """Return the step's result; this waits for the device."""


class Runner(Protocol):
    """Computes steps. Except where noted, all calls come from the thread that made the runner.

    ``info``: the ``Hello`` that describes this runner to the scheduler. The service fills in the name of the executor,
    its role and the inventory.
    """

    info: Hello

    def report_to(self, report: Report) -> None:
        """Call ``report``, on any thread, with the outcomes of copies and of the messages that ``handle`` takes."""

    def handle(self, message: BesideSteps) -> None:
        """Begin to handle a message, and report the outcome later; called from any thread."""

    @property
    def counted(self) -> Counted:
        """The totals of its counters; read from any thread."""

    def inventory(self) -> Inventory | None:
        """Return which hashed blocks are in the tiers. All sequences are removed from the batch first."""

    def agree(self, inventory: Inventory | None) -> None:
        """Offer these blocks instead of all in the inventory, because all ranks of this executor hold them. Their ids
        are new: only runners with several groups of layers, which give ids to the blocks that they offer, get this."""

    def close(self) -> None:
        """Release the runner's resources. No other call follows."""

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batch and make room for ``welcome.max_num_seqs`` sequences."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Issue a step; on a GPU it may still be running when this returns.

        Raises:
            InvalidPlanError: the plan contradicts the runner's state.
        """


@dataclass(slots=True, frozen=True)
class FinishedStep:
    """A step whose result is known already."""

    finished: StepResult

    @property
    def ready(self) -> bool:
        """Return True."""
        return True

    def result(self) -> StepResult:
        """Return the result."""
        return self.finished
