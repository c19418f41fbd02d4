"""An executor made of dicts that keeps, for every KV slot, which prefix was written there, and checks every read.

It follows ``docs/wire-protocol.md`` literally and breaks loudly on a plan that would corrupt memory.
"""

from collections import Counter
from dataclasses import dataclass

from pagewise_shared.protocol import StepPlan, StepResult, pack_int32s, unpack_int32s


def next_token(tokens: tuple[int, ...], vocab_size: int = 1000) -> int:
    """The model: a pure function of all tokens so far."""
    return hash(tokens) % vocab_size


@dataclass
class Row:
    tokens: list[int]
    computed: int
    blocks: list[int]


class CheckingExecutor:
    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.reset()

    def reset(self) -> None:
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.rows: dict[int, Row] = {}
        self.decoding: dict[int, None] = {}
        self.last_step = 0

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        for row in plan.left:
            del self.rows[row]
            self.decoding.pop(row, None)
        copies = unpack_int32s(plan.copies).tolist()
        read = {
            (target, offset): self.slots.get((source, offset))
            for source, target in zip(copies[::2], copies[1::2], strict=True)
            for offset in range(self.block_size)
        }
        for slot, content in read.items():
            self.slots.pop(slot, None)
            if content is not None:
                self.slots[slot] = content
        for new in plan.joined:
            assert new.row not in self.rows
            self.rows[new.row] = Row(
                unpack_int32s(new.tokens).tolist(),
                new.num_computed_tokens,
                unpack_int32s(new.blocks).tolist(),
            )
        changes = unpack_int32s(plan.tables).tolist()
        for row, index, block in zip(changes[::3], changes[1::3], changes[2::3], strict=True):
            assert 0 <= block < self.num_blocks
            assert 0 <= index <= len(self.rows[row].blocks)
            self.rows[row].blocks[index : index + 1] = [block]
        for row_held in self.rows.values():
            assert len(row_held.blocks) == len(set(row_held.blocks)), "a block is in a table twice"
        self.holders = Counter(block for row in self.rows.values() for block in row.blocks)
        sampled = [self._compute(self.rows[row], 1) for row in self.decoding]
        for row, size in plan.chunks:
            assert size > 0
            assert row not in self.decoding
            self._compute(self.rows[row], size, append=False)
            if self.rows[row].computed == len(self.rows[row].tokens):
                self.decoding[row] = None
                self.rows[row].tokens.append(next_token(tuple(self.rows[row].tokens)))
                sampled.append(self.rows[row].tokens[-1])
        return StepResult(epoch=plan.epoch, step=plan.step, tokens=pack_int32s(sampled))

    def _compute(self, row: Row, size: int, append: bool = True) -> int:
        assert row.computed + size <= len(row.tokens)
        for position in range(row.computed, row.computed + size):
            block = row.blocks[position // self.block_size]  # IndexError: nobody gave it the block
            assert self.holders[block] == 1, "a shared block is written"
            self.slots[block, position % self.block_size] = tuple(row.tokens[: position + 1])
        row.computed += size
        for position in range(row.computed):
            held = self.slots[row.blocks[position // self.block_size], position % self.block_size]
            assert held == tuple(row.tokens[: position + 1]), "somebody else wrote into this block"
        if append:
            row.tokens.append(next_token(tuple(row.tokens)))
        return row.tokens[-1]
