"""The interface between the executor service and the runner that computes its steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pagewise_shared.protocol import (
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
    StepPlan,
    StepResult,
    TierInfo,
    Welcome,
)

Report = Callable[[Copied | Found | AdapterLoaded | GrammarCompiled], None]
"""Takes what a runner tells beside the results of its steps; called on any thread."""


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
    max_loras: int = 0
    max_lora_rank: int = 0
    max_grammars: int = 0
    short_rope_len: int = 0


class PendingStep(Protocol):
    """A step that has been issued."""

    @property
    def ready(self) -> bool:
        """Whether ``result`` will not have to wait."""
        ...

    def result(self) -> StepResult:
        """Return the step's result; this waits for the device."""
        ...


class Runner(Protocol):
    """Computes steps. Except where noted, all calls come from the thread that made the runner."""

    info: RunnerInfo

    def report_copies(self, report: Report) -> None:
        """Call ``report``, on any thread, when copies between tiers or executors are done, something was found, an
        adapter was loaded, or a grammar compiled."""
        ...

    def load_adapter(self, message: LoadAdapter) -> None:
        """Load an adapter beside the steps; called from any thread."""
        ...

    def compile_grammar(self, message: CompileGrammar) -> None:
        """Compile a grammar beside the steps; called from any thread."""
        ...

    def look_up(self, message: LookUp) -> None:
        """Find out how much of a prefix is in a storage; called from any thread."""
        ...

    @property
    def num_storage_errors(self) -> int:
        """The number of reads and writes of storage that have failed; read from any thread."""
        ...

    @property
    def num_grammar_waits(self) -> int:
        """The number of steps that have waited for a grammar to be compiled; read from any thread."""
        ...

    @property
    def num_refused(self) -> int:
        """The number of refused connections of executors that wanted blocks; read from any thread."""
        ...

    @property
    def num_closed(self) -> int:
        """The number of connections of executors that were closed because they sent more than was read; likewise."""
        ...

    def cancel_copies(self, cancelled: CancelCopies) -> None:
        """Stop copying the blocks of a step from a peer, which nobody needs any more; called from any thread."""
        ...

    def inventory(self) -> Inventory | None:
        """Return which hashed blocks are in the tiers. All sequences are removed from the batch first."""
        ...

    def close(self) -> None:
        """Release what the runner holds. Nothing is called afterwards."""
        ...

    def reset(self, welcome: Welcome) -> None:
        """Empty the input batch and make room for ``welcome.max_num_seqs`` sequences."""
        ...

    def execute(self, plan: StepPlan) -> PendingStep:
        """Issue a step; on a GPU it may still be running when this returns.

        Raises:
            InvalidPlanError: the plan contradicts what the runner holds.
        """
        ...


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
