"""The interface between the executor service and the runner that computes its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewise_shared.protocol import (
    NO_ADAPTERS,
    AdapterCapacity,
    AdapterLoaded,
    CancelCopies,
    CompileGrammar,
    Copied,
    Found,
    GrammarCompiled,
    Inventory,
    LoadAdapter,
    LookUp,
    MeasuredCosts,
    Message,
    StepPlan,
    StepResult,
    TierInfo,
    Welcome,
)

BesideSteps = CancelCopies | LookUp | LoadAdapter | CompileGrammar
"""What a scheduler asks for that waits for no step, and that no step waits for."""
Report = Callable[[Copied | Found | AdapterLoaded | GrammarCompiled], None]
"""Takes what a runner tells beside the results of its steps; called on any thread."""


class Counted(Message, frozen=True):
    """What a runner has counted since it was made.

    Fields:
        num_refused: connections of executors that wanted blocks, which were refused.
        num_storage_errors: reads and writes of tiers that have failed.
        num_grammar_waits: steps that have waited for a grammar to be compiled.
    """

    num_refused: int = 0
    num_storage_errors: int = 0
    num_grammar_waits: int = 0


@dataclass(slots=True, frozen=True)
class RunnerInfo:
    """What a runner offers to the scheduler; see ``Hello`` for the meaning of the fields."""

    model_fingerprint: str
    vocab_size: int
    max_model_len: int
    block_size: int
    num_blocks: int
    bytes_per_block: int
    device: str
    dtype: str
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    tiers: tuple[TierInfo, ...] = ()
    costs: MeasuredCosts | None = None
    block_endpoint: str = ""
    block_format: str = ""
    kernels: str = ""
    fallback: bool = False
    no_segments: str = ""
    no_grammars: str = ""
    adapters: AdapterCapacity = NO_ADAPTERS
    max_grammars: int = 0
    short_rope_len: int = 0


class PendingStep(Protocol):
    """A step that has been issued."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` will not have to wait."""

    def result(self) -> StepResult:
        """Return the step's result; this waits for the device."""


class Runner(Protocol):
    """Computes steps. Except where noted, all calls come from the thread that made the runner."""

    info: RunnerInfo

    def report_to(self, report: Report) -> None:
        """Call ``report``, on any thread, with what comes of copies and of what was handled beside the steps."""

    def handle(self, message: BesideSteps) -> None:
        """Do what is asked for beside the steps; called from any thread. It does not wait, and the outcome is
        reported."""

    @property
    def counted(self) -> Counted:
        """The totals of its counters; read from any thread."""

    def inventory(self) -> Inventory | None:
        """Return which hashed blocks are in the tiers. All sequences are removed from the batch first."""

    def close(self) -> None:
        """Release what the runner holds. Nothing is called afterwards."""

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batch and make room for ``welcome.max_num_seqs`` sequences."""

    def execute(self, plan: StepPlan) -> PendingStep:
        """Issue a step; on a GPU it may still be running when this returns.

        Raises:
            InvalidPlanError: the plan contradicts what the runner holds.
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
