"""Plans for an executor with recurrent layers, with tables of attention and blocks of states."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch
import transformers
from pagewise_shared.protocol import (
    DEVICE,
    BlockCopies,
    Copied,
    GroupedStepPlan,
    NewSequence,
    StepResult,
    Welcome,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import SamplingParams, num_accepted

from tests.executor.played_runner import PlayedRunner
from tests.executor.references import reference
from tests.executor.runners import BLOCK_SIZE, build_runner
from tests.model_builders import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0)
STATES = 1
"""The group of states; group 0 has the layers with attention."""


@dataclass
class Row:
    """A sequence of the batch: its prompt and its sampled tokens, its blocks of attention, and the current block of
    states. ``snapshots``: the blocks that it has switched away from, by number of tokens."""

    tokens: list[int]
    blocks: list[int]
    states: int
    num_computed: int = 0
    sampled: list[int] = field(default_factory=list)
    snapshots: dict[int, int] = field(default_factory=dict)
    known: int = 0


class PlayedStates(PlayedRunner):
    """A runner, its rows, and unused ids of blocks of both groups."""

    def __init__(self, path: Path, host_folder: Path | None = None, epoch: int = 1, **options: object) -> None:
        super().__init__(build_runner(path, host_folder=host_folder, **options))  # type: ignore[arg-type]
        self.epoch, self.number = epoch, 0
        self.rows: dict[int, Row] = {}
        self.free, self.free_states = count(), count()
        self._joined: list[NewSequence] = []
        self._tables: list[int] = []
        self._switches: list[int] = []
        self._left: list[int] = []
        self._copies: list[BlockCopies] = []
        if host_folder is None:
            self.runner.reset(Welcome(epoch, 8, 256))

    def join(self, row: int, tokens: list[int], *, shared: Row | None = None, at: int = 0) -> Row:
        """Let a sequence join in the next step, behind the first ``at`` tokens of another one with a snapshot there.

        A block of attention that is not full is copied.
        """
        full = at // BLOCK_SIZE
        blocks = list(shared.blocks[:full]) if shared is not None else []
        if at % BLOCK_SIZE:
            assert shared is not None
            blocks.append(next(self.free))
            self._copies.append(BlockCopies(DEVICE, DEVICE, pack_int32s([shared.blocks[full], blocks[-1]])))
        new = Row(tokens, blocks, next(self.free_states), at, known=len(tokens))
        self.rows[row] = new
        self._grow(row, min(len(tokens), at + 1), quiet=True)
        held = [new.states] if shared is None else [shared.snapshots[at], new.states]
        self._joined.append(
            NewSequence(
                row, pack_int32s(tokens), len(tokens), at, pack_int32s(new.blocks), GREEDY, self.root,
                windows=((at, pack_int32s(held)),),
            )
        )  # fmt: skip
        return new

    def _grow(self, row: int, num_tokens: int, *, quiet: bool = False) -> None:
        held = self.rows[row].blocks
        while len(held) * BLOCK_SIZE < num_tokens:
            held.append(next(self.free))
            if not quiet:
                self._tables += [row, len(held) - 1, held[-1]]

    def switch(self, row: int, num_tokens: int) -> None:
        """Keep the states behind ``num_tokens`` tokens of a row, which the next step computes or has computed."""
        held = self.rows[row]
        held.snapshots[num_tokens], held.states = held.states, next(self.free_states)
        self._switches += [row, STATES, num_tokens, held.states]

    def leave(self, row: int) -> Row:
        """Let a sequence leave in the next step."""
        self._left.append(row)
        return self.rows.pop(row)

    def step(
        self, chunks: dict[int, int] | None = None, *copies: BlockCopies, drafts: Mapping[int, list[int]] = {}
    ) -> StepResult:
        """Run a step of all rows that decode, and of ``chunks``: the number of tokens of each row. ``drafts``: of rows
        that decode."""
        chunks, self.number = chunks or {}, self.number + 1
        decoding = [row for row, held in self.rows.items() if held.num_computed >= held.known]
        for row in decoding:
            self._grow(row, self.rows[row].num_computed + 1 + len(drafts.get(row, ())))
        for row, size in chunks.items():
            self._grow(row, self.rows[row].num_computed + size)
        made, self._copies = self._copies, []
        plan = GroupedStepPlan(
            self.epoch, self.number, left=tuple(self._left), joined=tuple(self._joined),
            tables=pack_int32s(self._tables), chunks=tuple(chunks.items()), states=pack_int32s(self._switches),
            copies=(*made, *copies), drafts=tuple((row, pack_int32s(draft)) for row, draft in drafts.items()),
        )  # fmt: skip
        self._joined, self._tables, self._switches, self._left = [], [], [], []
        result = self.runner.execute(plan).result()
        samples = iter(unpack_int32s(result.tokens))
        # Rows decode in the order in which their prefills have ended.
        for row in self._order([row for row in decoding if row not in drafts]):
            self._sampled(row, 1, next(samples))
        for row, draft in drafts.items():
            drawn = [next(samples) for _ in range(len(draft) + 1)]
            for token in drawn[: num_accepted(draft, drawn) + 1]:
                self._sampled(row, 1, token)
        for row, size in chunks.items():
            held = self.rows[row]
            held.num_computed += size
            if held.num_computed == len(held.tokens):
                self._sampled(row, 0, next(samples))
        return result

    def _order(self, decoding: list[int]) -> list[int]:
        order = list(self.runner._batch._decoding)
        return sorted(decoding, key=order.index)

    def _sampled(self, row: int, computed: int, token: int) -> None:
        held = self.rows[row]
        held.num_computed += computed
        held.sampled.append(token)

    def prefill(self, row: int, sizes: list[int]) -> None:
        """Compute the rest of a prompt in chunks of these sizes, again and again."""
        held, turn = self.rows[row], 0
        while held.num_computed < len(held.tokens):
            size = min(sizes[turn % len(sizes)], len(held.tokens) - held.num_computed)
            self.step({row: size})
            turn += 1

    def copy(self, *copies: BlockCopies, **fields: object) -> list[Copied]:
        """Run a step of copies between tiers, and wait for them."""
        self.number += 1
        plan = GroupedStepPlan(self.epoch, self.number, copies=copies, **fields)  # type: ignore[arg-type]
        self.runner.execute(plan).result()
        return [self.copied.get(timeout=20) for _ in copies]


class Family:
    """A model of a family, and its tokens by transformers."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._random = random.Random(3)

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return [self._random.randrange(3, VOCAB_SIZE) for _ in range(length)]

    def generated(self, prompt: list[int], length: int) -> list[int]:
        """The tokens behind a prompt, greedily."""
        return reference(self._model, [prompt], [length], "cpu")[0]


def check_drafts(
    family: Family, played: PlayedStates, drafts: Sequence[tuple[int, int]], snapshots: Sequence[int]
) -> None:
    """Let a row verify drafts among decodes, each with so many right tokens, and so many in all; keep its states at the
    ends of blocks. States are those of what is kept, also in ``snapshots``, from which other rows go on."""
    row, other = (played.join(number, family.prompt(length)) for number, length in enumerate((14, 6)))
    played.step({0: 14, 1: 6})
    expected = family.generated(row.tokens, 30)
    for right, size in drafts:
        start, known = row.num_computed, len(row.sampled)
        draft = [(token + (number >= right)) % 199 for number, token in enumerate(expected[known : known + size])]
        for end in range(start, start + 1 + size):
            if end % BLOCK_SIZE == 0 and end not in row.snapshots:
                played.switch(0, end)
        played.step(drafts={0: draft})
        assert row.num_computed == start + 1 + right
        played.step()
    assert row.sampled == expected[: len(row.sampled)]
    assert other.sampled == family.generated(other.tokens, len(other.sampled))
    assert sorted(row.snapshots) == snapshots
    text = row.tokens + row.sampled
    for number, at in enumerate(snapshots, 2):
        played.join(number, text[:at] + family.prompt(3), shared=row, at=at)
        played.step({number: 3})
        fork = played.leave(number)
        assert fork.sampled == family.generated(fork.tokens, 1), at
    played.runner.close()
