"""Plans of prompts, windows and copies for an executor with two groups of layers."""

from pathlib import Path

import msgspec
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.server.executor_checks import checked_inventory
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import (
    BlockCopies,
    Copied,
    GroupedStepPlan,
    NewSequence,
    StepResult,
    Welcome,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from tests.executor.played_runner import PlayedRunner
from tests.executor.runners import BLOCK_SIZE, build_runner, peers_at

GREEDY = SamplingParams(temperature=0.0, logprobs=0)


def _sampled(result: StepResult) -> list[float]:
    """The token that a step has sampled, and its log-probability."""
    return [result.logprobs[0].token_id, result.logprobs[0].logprob]


class Played(PlayedRunner):
    """A runner with two groups of layers. ``first``: the token, and its log-probability, behind the last prompt."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.epoch, self.step = 0, 0
        self.first: list[float] = []

    def offered(self) -> list[dict[int, dict[BlockHash, int]]]:
        """The inventory, by group and tier, as the scheduler checks it."""
        return checked_inventory(msgspec.structs.replace(self.runner.info, inventory=self.runner.inventory()))

    def execute(self, **fields: object) -> StepResult:
        self.step += 1
        plan = GroupedStepPlan(self.epoch, self.step, **fields)  # type: ignore[arg-type]
        return self.runner.execute(plan).result()

    def rejoin(self, *, keep: bool, epoch: int | None = None) -> None:
        """A Welcome with a new epoch."""
        self.epoch, self.step = epoch or self.epoch + 1, 0
        self.runner.reset(Welcome(self.epoch, 4, 64, keeps_blocks=keep))

    def begin(
        self, tokens: list[int], blocks: list[int], window: tuple[int, list[int]], num_computed: int = 0, row: int = 0
    ) -> NewSequence:
        """A sequence that joins with these blocks of the two groups."""
        first, held = window
        return NewSequence(
            row, pack_int32s(tokens), len(tokens), num_computed, pack_int32s(blocks), GREEDY, self.root,
            windows=((first, pack_int32s(held)),),
        )  # fmt: skip

    def compute(self, tokens: list[int], *, leave: bool = True) -> tuple[list[int], list[int]]:
        """Compute a prompt in two chunks; returns its full blocks of both groups.

        When the second chunk comes, the window has passed most blocks of the first. ``leave``: the row leaves then.
        """
        end = 1 + -(-len(tokens) // BLOCK_SIZE)
        blocks, windows = list(range(1, end)), list(range(end, 1, -1))
        half = len(tokens) // 2
        self.execute(joined=(self.begin(tokens, blocks, (0, windows)),), chunks=((0, half),))
        self.first = _sampled(self.execute(chunks=((0, len(tokens) - half),)))
        if leave:
            self.execute(left=(0,))
        full = len(tokens) // BLOCK_SIZE
        return blocks[:full], windows[:full]

    def resume(self, tokens: list[int], blocks: list[int], window: tuple[int, list[int]], free: int) -> list[float]:
        """Return the token behind a prompt and its log-probability, from full blocks and a window (first, blocks).

        ``free``: an id that no block of the two groups has.
        """
        num_computed = len(blocks) * BLOCK_SIZE
        new = self.begin(tokens, [*blocks, free], (window[0], [*window[1], free]), num_computed)
        result = self.execute(joined=(new,), chunks=((0, len(tokens) - num_computed),))
        self.execute(left=(0,))
        return _sampled(result)

    def copy(self, *copies: BlockCopies, **fields: object) -> list[Copied]:
        self.execute(copies=copies, **fields)
        asked = [one for one in copies if one.source != one.target or one.peer is not None]
        return [self.copied.get(timeout=20) for _ in asked]


def play(path: Path, epoch: int, **options: object) -> Played:
    """A runner that has joined."""
    played = Played(build_runner(path, exchange=peers_at(), **options))  # type: ignore[arg-type]
    played.rejoin(keep=False, epoch=epoch)
    return played
