"""Whether the copies of a tier are exact or smaller, by the time of both directions and of the conversion."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from pagewise_executor.collectives import ALONE
from pagewise_executor.tiers import copy_choice
from pagewise_executor.tiers.copy_choice import choose_for_storage, for_memory
from pagewise_executor.tiers.hashed import NO_SALTS, HashedTier
from pagewise_executor.tiers.small_copies import SmallCopies
from pagewise_executor.tiers.tier import CopiedBlocks, Rows
from pagewise_kernels.cpu.small_blocks import SmallBlocks
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.protocol import DISK, HOST

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.runners import build_runner
from tests.model_builders import model_fixture

DIM, VECTORS = 64, 12
model_path = model_fixture("llama", seed=5, head_dim=32)


@pytest.fixture(autouse=True)
def _compiled() -> None:
    need_cpu_kernels()


class Clock:
    """A clock that only links and conversions move. ``byte``, ``block``: their seconds."""

    def __init__(self, byte: float, block: float) -> None:
        self.now, self.byte, self.block = 0.0, byte, block


class TimedBlocks(SmallBlocks):
    def __init__(self, clock: Clock) -> None:
        super().__init__(VECTORS * DIM * 4, DIM, torch.float32, 8)
        self.clock = clock

    def shrink(self, rows: Rows, small: Rows) -> npt.NDArray[np.float32]:
        self.clock.now += len(rows) * self.clock.block
        return super().shrink(rows, small)

    def widen(self, small: Rows, rows: Rows) -> None:
        self.clock.now += len(rows) * self.clock.block
        super().widen(small, rows)


class Link(HashedTier):
    """Keeps blocks in a dict, behind a link. ``keeps``: whether it keeps them."""

    def __init__(self, clock: Clock, small: SmallCopies, *, keeps: bool = True) -> None:
        super().__init__("link", small.exact_bytes, "link", small)
        self.clock, self.keeps = clock, keeps
        self.held: dict[BlockHash, Rows] = {}

    def contains(self, names: Sequence[BlockName]) -> list[bool]:
        return [name.hash in self.held for name in names]

    def store(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes] = NO_SALTS) -> list[bool]:
        for name, row in zip(names, rows, strict=True):
            stored = self.stored(name, row)
            self.clock.now += len(stored) * self.clock.byte
            if self.keeps:
                self.held[name.hash] = stored.copy()
        return [True] * len(names)

    def load(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        self.clock.now += sum(len(self.held[name.hash]) for name in names if name.hash in self.held) * self.clock.byte
        found = zip(names, rows, strict=True)
        return [name.hash in self.held and self.restore(self.held[name.hash], row) for name, row in found]

    def delete(self, names: Iterable[BlockName]) -> int:
        return 0

    def delete_salt(self, tag: bytes) -> int:
        return 0


@pytest.mark.parametrize(("byte", "block", "dtype"), [(1e-6, 1e-3, "int8"), (1e-8, 1e-3, ""), (1e-8, 1e-6, "int8")])
@pytest.mark.parametrize("bound", [0.2, 1e-6])
def test_copies_are_smaller_where_the_bytes_take_longer_than_the_conversion(
    byte: float, block: float, dtype: str, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 3,072 bytes has 816 in eight bits. The bound is not of the numbers with which times are measured."""
    clock = Clock(byte, block)
    monkeypatch.setattr(copy_choice, "perf_counter", lambda: clock.now)
    small = SmallCopies(TimedBlocks(clock), "int8", bound, chooses=True)
    tier = Link(clock, small)
    choose_for_storage(tier, ALONE)
    assert (tier.dtype, tier.block_bytes) == (dtype, small.num_bytes if dtype else 0)
    assert tier.copied == CopiedBlocks(), "measurements do not count"
    chosen = for_memory(small, torch.device("cpu"), 1 / byte, ALONE)
    assert (chosen is small) == bool(dtype)
    assert for_memory(small, torch.device("cuda"), 1 / byte, ALONE) is None, "a GPU needs exact copies in host memory"


def test_copies_are_exact_where_no_times_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0, 0.0)
    monkeypatch.setattr(copy_choice, "perf_counter", lambda: clock.now)
    tier = Link(clock, SmallCopies(TimedBlocks(clock), "int8", 0.2, chooses=True), keeps=False)
    choose_for_storage(tier, ALONE)
    assert tier.dtype == ""


def test_an_executor_says_what_it_has_chosen_and_how_often(model_path: Path, tmp_path: Path) -> None:
    """A slow link to host memory has smaller copies. What the disk has depends on the disk."""
    runner = build_runner(
        model_path, kernels="cpu", tier_dtype="auto:int8", host_memory="256KiB", host_bandwidth="1MiB",
        disk_cache=str(tmp_path), num_blocks=24,
    )  # fmt: skip
    dtypes = {tier.number: tier.dtype for tier in runner.info.tiers}
    assert dtypes[HOST] == "int8"
    assert dtypes[DISK] in ("", "int8")
    run_requests(runner, [request(list(range(start, start + 60)), 4, f"r{start}") for start in range(5, 45, 5)])
    counted = runner.counted
    assert counted.copied_small > 0
    assert counted.copied_above_bound == 0
    runner.close()
