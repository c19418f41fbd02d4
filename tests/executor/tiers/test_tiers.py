"""The effect of a plan's lists of copies on the tiers below the device, one list after the other."""

import queue
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.plan_checks import InvalidPlanError, checked_copies
from pagewise_executor.tiers.block_copier import BlockCopier
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.host_memory import HostMemory, NamedMemory
from pagewise_executor.tiers.tier import Tier
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.protocol import DEVICE, HOST, TIER_NAMES, BlockCopies, Copied, StepPlan, pack_int32s

NUM_BLOCKS = 300
FURTHER = len(TIER_NAMES)
ON = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


class FurtherTier(Tier):
    """A tier below the host that keeps the blocks that it takes over, and their names."""

    num_blocks = 4

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[tuple[BlockHash | None, int]] = []

    def begin(self, job: CopyJob, upper: Tier) -> None:
        sources = job.pairs[:, 0]
        rows = np.empty((len(sources), 4 * 2 * 8 * 2), np.uint8)
        assert all(upper.read(sources, rows))
        self.taken += [(name, int(row[0])) for name, row in zip(upper.names_of(sources), rows, strict=True)]
        self.report(job.confirmed(0.0))


class NamedHashes(BlockHashes):
    """Each block of the device has a hash with its number."""

    def of(self, blocks: Iterable[int]) -> list[BlockHash | None]:
        return [name_of(block) for block in blocks]


def name_of(block: int) -> BlockHash:
    return BlockHash(block.to_bytes(32, "big"))


class Tiers:
    """A device whose blocks hold their own numbers, a host, and a tier below it."""

    def __init__(self, device: str = "cpu", bandwidth: float | None = None, *, verify: bool = False) -> None:
        self.pool = KVPool([(2, 8)], NUM_BLOCKS, 4, torch.uint8, torch.device(device))
        memory = HostMemory(8, self.pool.bytes_per_block, device == "cuda")
        self.host = HostTier(self.pool, memory, bandwidth=bandwidth, verify=verify)
        self.further = FurtherTier()
        self.copier = BlockCopier(DeviceTier(self.pool, NamedHashes(NUM_BLOCKS, 4)))
        self.copier.tiers |= {HOST: self.host, FURTHER: self.further}
        self.copied: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.copier.report_to(self.copied.put)
        self.step = 0
        with torch.inference_mode():
            for tensor in (*self.pool.keys, *self.pool.values):
                tensor[:] = (torch.arange(NUM_BLOCKS) % 251).view(-1, 1, 1, 1)

    def first_bytes(self, tier: int, blocks: list[int]) -> list[int]:
        """The first byte of each of these blocks."""
        rows = np.empty((len(blocks), self.pool.bytes_per_block), np.uint8)
        assert all(self.copier.tiers[tier].read(np.array(blocks, np.int32), rows))
        return rows[:, 0].tolist()

    def copy(self, *lists: tuple[int, int, list[tuple[int, int]]]) -> list[Copied]:
        """Begin the lists of one plan, and wait until all of them are confirmed."""
        self.step += 1
        jobs = [CopyJob(0, self.step, source, target, np.array(pairs, np.int32)) for source, target, pairs in lists]
        with torch.inference_mode():
            self.copier.begin(0, self.step, jobs)
        return [self.copied.get(timeout=30) for _ in jobs]


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("device", ON)
def test_of_several_blocks_that_go_to_one_the_last_stays_with_its_name(device: str, verify: bool) -> None:
    """Blocks that the host frees within a step are taken again: one list then names its block more than once."""
    tiers = Tiers(device, verify=verify)
    tiers.copy((DEVICE, HOST, [(block, block % 3) for block in range(NUM_BLOCKS)]))
    assert tiers.host.names() == {block: name_of(NUM_BLOCKS - 3 + block) for block in range(3)}
    assert tiers.first_bytes(HOST, [0, 1, 2]) == [46, 47, 48]
    (loaded,) = tiers.copy((HOST, DEVICE, [(0, 10), (2, 11)]))
    assert loaded.bad == b""
    assert tiers.first_bytes(DEVICE, [10, 11]) == [46, 48]


@pytest.mark.parametrize("bandwidth", [None, 20_000.0])
def test_a_block_of_the_host_goes_further_down_as_it_is_when_the_list_begins(bandwidth: float | None) -> None:
    """Block 5 of the host is on its way there, moves to the next tier, and is written again, all in one plan."""
    tiers = Tiers(bandwidth=bandwidth)
    tiers.copy(
        (DEVICE, HOST, [(1, 4), (2, 5)]),
        (HOST, FURTHER, [(5, 0), (4, 1)]),
        (DEVICE, HOST, [(3, 5)]),
        (HOST, FURTHER, [(5, 2)]),
    )
    assert tiers.further.taken == [(name_of(2), 2), (name_of(1), 1), (name_of(3), 3)]
    assert tiers.host.names() == {4: name_of(1), 5: name_of(3)}


@pytest.mark.parametrize(("source", "target"), [(FURTHER, HOST), (HOST, HOST), (FURTHER, FURTHER), (DEVICE, 9)])
def test_blocks_go_down_or_to_the_device(source: int, target: int) -> None:
    sizes = {DEVICE: 4, HOST: 4, FURTHER: 4}
    for upper, lower in ((DEVICE, HOST), (DEVICE, FURTHER), (HOST, FURTHER)):
        for one, other in ((upper, lower), (lower, DEVICE)):
            plan = StepPlan(1, 1, copies=(BlockCopies(one, other, pack_int32s([0, 1])),))
            assert [(job.source, job.target) for job in checked_copies(plan, [sizes])] == [(one, other)]
    with pytest.raises(InvalidPlanError):
        checked_copies(StepPlan(1, 1, copies=(BlockCopies(source, target, pack_int32s([0, 1])),)), [sizes])


CUT_SHORT = """
import os, signal, sys
from pathlib import Path
import numpy as np, torch
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.tiers.host_memory import NamedMemory
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.tier import Tier
from pagewise_shared.protocol import DEVICE, HOST

pool = KVPool([(1, 8)], 4, 4, torch.float32, torch.device("cpu"))
contents = [np.full(pool.bytes_per_block, content, np.uint8) for content in (11, 22)]
pool.scatter(np.array([0, 1], np.int32), np.stack(contents))
memory = NamedMemory(Path(sys.argv[1]), "content", 2, pool.bytes_per_block, False)
keep = memory.keep

def keep_and_die(*arguments):
    keep(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)

memory.keep = keep_and_die
pairs = np.array([[0, 0], [1, 0]], np.int32)
upper = Tier()
upper.names_of = lambda blocks: [b"a" * 32, b"b" * 32]
HostTier(pool, memory).begin(CopyJob(0, 1, DEVICE, HOST, pairs), upper)
signal.pause()
"""


def test_a_process_that_is_killed_leaves_no_block_under_the_name_of_another(tmp_path: Path) -> None:
    """One list names host block 0 twice: its first content was evicted again in the same plan."""
    done = subprocess.run([sys.executable, "-c", CUT_SHORT, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pool = KVPool([(1, 8)], 4, 4, torch.float32, torch.device("cpu"))
    memory = NamedMemory(tmp_path, "content", 2, pool.bytes_per_block, False)
    try:
        content = {b"a" * 32: 11, b"b" * 32: 22}
        assert memory.names(), "nothing was kept: that was not tried"
        assert all(content[name] == int(memory.slot(slot)[0]) for slot, name in memory.names().items())
    finally:
        memory.close()
