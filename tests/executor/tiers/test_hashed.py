"""The copies from and to tiers whose blocks have no ids, which run beside steps, and the plans that ask for them."""

import fcntl
import queue
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.plan_checks import InvalidPlanError, checked_copies
from pagewise_executor.profile import measure_tier
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.tiers.block_copier import BlockCopier
from pagewise_executor.tiers.block_names import chain, checksum
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.hashed import NO_SALTS
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.host_memory import HostMemory, NamedMemory
from pagewise_executor.tiers.make_tiers import make_tiers
from pagewise_executor.tiers.tier import Rows
from pagewise_shared.block_hash import BlockHash, BlockName, pack_names, root_hash, salt_tag, salt_tags
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    REDIS,
    BlockCopies,
    CancelCopies,
    Copied,
    DropStored,
    Found,
    LookUp,
    RemoteTier,
    StepPlan,
    StoredDropped,
    TierInfo,
    pack_int32s,
    unpack_int32s,
)

from tests.executor.tiers.names import prefix

NUM_BLOCKS = 40


class Executor:
    """A KV pool, and storage in a folder that others share. ``gate``: the storage reads and writes only while it is
    set."""

    def __init__(self, folder: Path) -> None:
        self.pool = KVPool([(1, 4)], NUM_BLOCKS, 4, torch.float32, torch.device("cpu"), layout="blocks")
        for block in range(NUM_BLOCKS):
            self.pool.keys[0][block] = self.pool.values[0][block] = float(block)
        self.gate = threading.Event()
        self.gate.set()
        self.disk = Slow(self.gate, folder, "x", self.pool.bytes_per_block, 2**30)
        self.copier = BlockCopier(DeviceTier(self.pool, BlockHashes(NUM_BLOCKS, 4)))
        memory = HostMemory(4, self.pool.bytes_per_block, cuda=False)
        self.copier.tiers |= {HOST: HostTier(self.pool, memory), DISK: self.disk}
        self.told: queue.SimpleQueue[Copied] = queue.SimpleQueue()
        self.found: queue.SimpleQueue[Found | StoredDropped] = queue.SimpleQueue()
        self.copier.report_to(lambda message: (self.told if isinstance(message, Copied) else self.found).put(message))

    def begin(self, step: int, copies: BlockCopies) -> None:
        plan = StepPlan(epoch=1, step=step, copies=(copies,))
        self.copier.begin(1, step, checked_copies(plan, [{DEVICE: NUM_BLOCKS, HOST: 4, DISK: 0}]))

    def write(
        self, step: int, blocks: Sequence[int], names: Sequence[BlockName], source: int = DEVICE, salt: str = ""
    ) -> None:
        pairs = pack_int32s([part for index, block in enumerate(blocks) for part in (block, index)])
        salts = ((len(names) - 1, salt_tags(salt)),) if salt else ()
        self.begin(step, BlockCopies(source, DISK, pairs, names=pack_names(names), salts=salts))

    def load(self, step: int, blocks: Sequence[int], names: Sequence[BlockName]) -> None:
        pairs = pack_int32s([part for index, block in enumerate(blocks) for part in (index, block)])
        self.begin(step, BlockCopies(DISK, DEVICE, pairs, names=pack_names(names)))

    def bad(self) -> list[int]:
        return unpack_int32s(self.told.get(timeout=10).bad).tolist()

    def holds(self, block: int) -> float:
        keys, values = self.pool.keys[0][block], self.pool.values[0][block]
        assert keys.unique().tolist() == values.unique().tolist()
        return float(keys[0, 0, 0])


class Slow(DiskTier):
    """A disk that does nothing while ``gate`` is not set. ``reads`` and ``writes`` are set when a call has come."""

    def __init__(self, gate: threading.Event, folder: Path, content: str, bytes_per_block: int, size: int) -> None:
        super().__init__(folder, content, bytes_per_block, size)
        self.gate = gate
        self.reads, self.writes = threading.Event(), threading.Event()

    def load(self, names: Sequence[BlockName], rows: Rows) -> list[bool]:
        self.reads.set()
        assert self.gate.wait(20)
        return super().load(names, rows)

    def store(self, names: Sequence[BlockName], rows: Rows, salts: Mapping[BlockHash, bytes] = NO_SALTS) -> list[bool]:
        self.writes.set()
        assert self.gate.wait(20)
        return super().store(names, rows, salts)


@pytest.fixture
def executors(tmp_path: Path) -> Iterator[list[Executor]]:
    both = [Executor(tmp_path), Executor(tmp_path)]
    yield both
    for executor in both:
        executor.gate.set()
        executor.copier.close()


def test_blocks_go_there_and_come_to_another_executor(executors: list[Executor]) -> None:
    one, other = executors
    names = prefix("a", 30)
    one.write(1, range(5, 35), names)
    assert one.bad() == []
    other.load(1, [3, 1, 2], [names[20], names[29], prefix("b", 1)[0]])
    assert other.bad() == [2], "that was not there"
    assert [other.holds(block) for block in range(5)] == [0.0, 34.0, 2.0, 25.0, 4.0]


def test_what_goes_there_is_as_it_was_when_the_step_began(executors: list[Executor]) -> None:
    one, _ = executors
    names = prefix("a", 2)
    one.gate.clear()
    one.write(1, [7, 8], names)
    one.pool.keys[0][7] = one.pool.values[0][7] = -1.0  # the step writes there
    one.gate.set()
    assert one.bad() == []
    one.load(2, [0], names[:1])
    assert one.bad() == []
    assert one.holds(0) == 7.0


def test_blocks_are_deleted_after_the_copies_of_a_step(executors: list[Executor]) -> None:
    one, other = executors
    names, kept = prefix("a", 2), prefix("b", 1)
    one.gate.clear()
    one.write(1, [7], names[:1], salt="key:a")
    one.copier.drop(DropStored(1, 5, DISK, 3, tag=salt_tag("key:a")))
    one.write(2, [8, 9], [names[1], kept[0]], salt="key:b")
    assert one.found.empty()
    one.gate.set()
    one.copier.begin(1, 3, ())
    assert one.found.get(timeout=10) == StoredDropped(1, 5, 2)
    assert other.disk.contains([*names, *kept]) == [False, False, True]
    other.copier.begin(1, 1, ())
    other.copier.drop(DropStored(1, 6, DISK, 0, names=pack_names([*names, *kept])))
    assert other.found.get(timeout=10) == StoredDropped(1, 6, 1)
    one.copier.drop(DropStored(1, 7, DISK, 4, tag=salt_tag("key:a")))
    one.copier.reset(2, keep=True)
    assert one.found.get(timeout=10) == StoredDropped(2, 7, 0), "the step will not come"


def test_a_load_that_is_cancelled_is_confirmed_at_once_and_writes_nothing_any_more(executors: list[Executor]) -> None:
    one, _ = executors
    names = prefix("a", 2)
    one.write(1, [7, 8], names)
    assert one.bad() == []
    one.gate.clear()
    one.load(2, [0, 1], names)
    one.load(3, [2], names[:1])
    one.copier.cancel(CancelCopies(1, 2, tier=DISK))
    assert one.bad() == [0, 1], "although the disk does not return"
    one.gate.set()
    assert one.bad() == []
    assert [one.holds(block) for block in (0, 1, 2)] == [0.0, 1.0, 7.0]
    assert one.told.empty()


def test_a_load_may_be_cancelled_before_its_step_comes(executors: list[Executor]) -> None:
    one, _ = executors
    names = prefix("a", 1)
    one.write(1, [7], names)
    assert one.bad() == []
    one.gate.clear()
    one.copier.cancel(CancelCopies(1, 2, tier=DISK))
    one.load(2, [0], names)
    one.load(3, [1], names)
    assert one.bad() == [0], "although the disk does not return"
    one.gate.set()
    assert one.bad() == []
    assert [one.holds(0), one.holds(1)] == [0.0, 7.0]


def test_after_a_reset_nothing_is_written_or_told(executors: list[Executor]) -> None:
    one, _ = executors
    names = prefix("a", 1)
    one.write(1, [7], names)
    assert one.bad() == []
    one.gate.clear()
    one.load(2, [0], names)
    one.copier.reset(2, keep=True)
    one.gate.set()
    one.load(3, [1], names)
    assert one.bad() == []
    assert [one.holds(0), one.holds(1)] == [0.0, 7.0]
    assert one.told.empty()


def test_reads_and_writes_that_have_begun_end_before_what_they_use(
    executors: list[Executor], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = executors
    old, new = prefix("a", 2), prefix("b", 2)
    one.write(1, [7, 8], old)
    assert one.bad() == []
    one.disk.writes.clear()
    one.gate.clear()
    one.write(2, [5], new[:1])
    one.write(3, [6], new[1:])
    one.load(4, [0], old[:1])
    assert one.disk.reads.wait(10)
    assert one.disk.writes.wait(10)
    threading.Timer(0.3, one.gate.set).start()
    one.copier.close()
    assert other.disk.contains(new) == [True, False], "the second one had not begun"
    assert one.holds(0) == 0.0, "the copies were void"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


def test_how_much_of_a_prefix_is_there(executors: list[Executor]) -> None:
    one, other = executors
    root, tokens = root_hash("model"), pack_int32s(range(50))
    names = chain(root, tokens, 4)
    one.write(1, range(9), names[:9])
    assert one.bad() == []
    one.gate.clear()
    one.load(2, [0], names[:1])
    for number, (length, there) in enumerate([(50, 9), (20, 5), (3, 0), (0, 0)]):
        one.copier.look_up(LookUp(1, number, DISK, root, tokens[: 4 * length]))
        assert one.found.get(timeout=10) == Found(1, number, there), "also while a load is slow"
    other.copier.look_up(LookUp(1, 9, DISK, root_hash("another"), tokens))
    assert other.found.get(timeout=10) == Found(1, 9, 0)


def test_storage_that_fails_in_a_way_that_nobody_thought_of(
    executors: list[Executor], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = executors

    def fail(*values: object) -> list[bool]:
        raise RuntimeError("a bug")

    for method in ("load", "store", "contains"):
        monkeypatch.setattr(one.disk, method, fail)
    names = prefix("a", 2)
    one.write(1, [0, 1], names)
    assert one.bad() == [0, 1]
    one.load(2, [5, 6], names)
    assert one.bad() == [5, 6]
    one.copier.look_up(LookUp(1, 1, DISK, root_hash("model"), pack_int32s(range(8))))
    assert one.found.get(timeout=10) == Found(1, 1, 0)
    monkeypatch.undo()
    one.write(3, [0, 1], names)
    assert one.bad() == []


@pytest.mark.parametrize(
    ("copies", "flaw"),
    [
        (BlockCopies(DEVICE, REDIS, pack_int32s([1, 0]), names=bytes(64)), "no tier 3"),
        (BlockCopies(DISK, HOST, pack_int32s([0, 1]), names=bytes(64)), "from tier 2 to tier 1"),
        (BlockCopies(DISK, DISK, pack_int32s([0, 0]), names=bytes(64)), "from tier 2 to tier 2"),
        (BlockCopies(DISK, 4, pack_int32s([0, 0]), names=bytes(64)), "from tier 2 to tier 4"),
        (BlockCopies(DEVICE, DISK, pack_int32s([1, 0]), names=bytes(63)), "63 bytes are not names of 64 bytes"),
        (BlockCopies(DEVICE, DISK, pack_int32s([1, 0]), names=bytes(128)), "2 names are given to 1 blocks"),
        (BlockCopies(DEVICE, DISK, pack_int32s([1, 1]), names=bytes(64)), "outside tier 2"),
        (BlockCopies(DEVICE, DISK, pack_int32s([1, 0])), "outside tier 2"),
        (BlockCopies(DEVICE, DISK, pack_int32s([NUM_BLOCKS, 0]), names=bytes(64)), "outside tier 0"),
        (BlockCopies(HOST, DISK, pack_int32s([4, 0]), names=bytes(64)), "outside tier 1"),
        (BlockCopies(DISK, DEVICE, pack_int32s([0, -1]), names=bytes(64)), "outside tier 0"),
        (BlockCopies(DISK, DEVICE, pack_int32s([0, 0]), RemoteTier("ipc://x", 1), bytes(64)), "a peer.s tier 2"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused(copies: BlockCopies, flaw: str) -> None:
    with pytest.raises(InvalidPlanError, match=flaw):
        checked_copies(StepPlan(epoch=1, step=1, copies=(copies,)), [{DEVICE: NUM_BLOCKS, HOST: 4, DISK: 0, 4: 0}])


def test_the_weights_tell_what_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's fingerprint takes samples of its weights, but storage outlives an operator's changes to the files."""
    pool = KVPool([(1, 4)], NUM_BLOCKS, 4, torch.float32, torch.device("cpu"), layout="blocks")
    device, runner = (
        DeviceTier(pool, BlockHashes(NUM_BLOCKS, 4)),
        SimulatedRunner(ExecutorConfig(num_blocks=NUM_BLOCKS)),
    )
    weights = tmp_path / "weights"
    config = ExecutorConfig(disk_cache=str(tmp_path / "cache"))
    identities = []
    for data in (bytes(2**20), bytes(2**20), bytes(2**19) + b"1" + bytes(2**19 - 1)):
        weights.write_bytes(data)
        tiers = make_tiers(config, pool, "model", "format", [weights])
        assert list(tiers) == [DISK]
        info = measure_tier(runner, device, tiers[DISK], TierInfo(DISK, 0, identity=tiers[DISK].identity))
        identities.append(info.identity)
        assert min(info.load_block, info.store_block) > 0, "what copies cost was measured"
        tiers[DISK].close()
    assert identities[0] == identities[1] != identities[2]
    monkeypatch.setattr("pagewise_executor.tiers.make_tiers.LAYOUT", 1)
    (other,) = make_tiers(config, pool, "model", "format", [weights]).values()
    assert other.identity not in identities, "an executor that stores blocks in another way finds none of them"
    other.close()
    assert make_tiers(ExecutorConfig(), pool, "model", "format", [weights]) == {}
    small = ExecutorConfig(disk_cache=str(tmp_path), disk_memory="1KiB")
    with pytest.raises(ConfigError, match="--disk-memory"):
        make_tiers(small, pool, "model", "format", [weights])


def test_of_a_tier_that_keeps_nothing_no_costs_are_known(executors: list[Executor]) -> None:
    one, _ = executors
    offered = TierInfo(DISK, 0, identity=one.disk.identity)
    one.disk.load = one.disk.store = lambda names, rows: [False] * len(names)  # type: ignore[method-assign]
    runner = SimulatedRunner(ExecutorConfig(num_blocks=NUM_BLOCKS))
    assert measure_tier(runner, one.copier.tiers[DEVICE], one.disk, offered) == offered


def test_blocks_keep_their_bytes(executors: list[Executor]) -> None:
    one, other = executors
    chance = np.random.default_rng(3)
    one.pool.keys[0][:] = torch.from_numpy(chance.standard_normal(one.pool.keys[0].shape, np.float32))
    names = prefix("a", 10)
    one.write(1, range(10), names)
    assert one.bad() == []
    other.load(1, range(20, 30), names)
    assert other.bad() == []
    assert torch.equal(other.pool.keys[0][20:30], one.pool.keys[0][:10])


@pytest.mark.parametrize("named", [False, True])
def test_blocks_of_the_host_go_to_the_disk_bit_for_bit(tmp_path: Path, named: bool, device: torch.device) -> None:
    pool = KVPool([(1, 4), (2, 3)], NUM_BLOCKS, 4, torch.float32, device)
    size, cuda = pool.bytes_per_block, device.type == "cuda"
    folder = Path("/dev/shm") if cuda else tmp_path  # the driver pins no file of a disk
    memory = NamedMemory(folder, tmp_path.name, 4, size, cuda) if named else HostMemory(4, size, cuda)
    copier = BlockCopier(DeviceTier(pool, BlockHashes(NUM_BLOCKS, 4)))
    host, disk = HostTier(pool, memory, bandwidth=20.0 * size), DiskTier(tmp_path / "disk", "x", size, 2**30)
    copier.tiers |= {HOST: host, DISK: disk}
    told: queue.SimpleQueue[Copied | Found] = queue.SimpleQueue()
    copier.report_to(told.put)
    copier.reset(1, keep=False)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    names = prefix("a", 3)
    lists = [
        BlockCopies(DEVICE, HOST, pack_int32s([5, 2, 6, 0])),
        BlockCopies(HOST, DISK, pack_int32s([2, 1, 3, 2, 0, 0]), names=pack_names(names)),  # nothing is in block 3
        BlockCopies(DEVICE, HOST, pack_int32s([7, 2])),
    ]
    sizes = {number: tier.num_blocks for number, tier in copier.tiers.items()}
    copier.begin(1, 1, checked_copies(StepPlan(1, 1, copies=tuple(lists)), [sizes]))
    copied = [told.get(timeout=20) for _ in lists]
    bad = {one.target: unpack_int32s(one.bad).tolist() for one in copied if isinstance(one, Copied)}
    assert bad == {HOST: [], DISK: [2]}
    load = BlockCopies(DISK, DEVICE, pack_int32s([1, 20, 0, 21, 2, 22]), names=pack_names(names))
    copier.begin(1, 2, checked_copies(StepPlan(1, 2, copies=(load,)), [sizes]))
    loaded = told.get(timeout=20)
    assert isinstance(loaded, Copied)
    assert unpack_int32s(loaded.bad).tolist() == [22]
    for tensor, old in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(tensor[[20, 21]], old[[5, 6]]), "as it was before block 2 was written again"
    copier.close()
    memory.close()


def test_a_block_of_the_host_that_is_corrupt_does_not_go_to_the_disk(tmp_path: Path) -> None:
    pool = KVPool([(1, 4)], NUM_BLOCKS, 4, torch.float32, torch.device("cpu"))
    left = NamedMemory(tmp_path, "x", 4, pool.bytes_per_block, cuda=False)
    for block in (0, 1):
        left.keep(block, None, checksum(left.slot(block)))
    left.slot(1)[0] ^= 1
    fcntl.flock(left._file, fcntl.LOCK_UN)  # as when its process is killed
    memory = NamedMemory(tmp_path, "x", 4, pool.bytes_per_block, cuda=False)
    copier = BlockCopier(DeviceTier(pool, BlockHashes(NUM_BLOCKS, 4)))
    disk = DiskTier(tmp_path / "disk", "x", pool.bytes_per_block, 2**30)
    copier.tiers |= {HOST: HostTier(pool, memory), DISK: disk}
    told: queue.SimpleQueue[Copied | Found] = queue.SimpleQueue()
    copier.report_to(told.put)
    names = prefix("a", 2)
    copier.begin(1, 1, [CopyJob(1, 1, HOST, DISK, np.array([[0, 0], [1, 1]], np.int32), names=names)])
    copied = told.get(timeout=20)
    assert isinstance(copied, Copied)
    assert unpack_int32s(copied.bad).tolist() == [1]
    assert disk.contains(names) == [True, False]
    copier.close()
    memory.close()


def test_no_step_reads_what_goes_from_the_host_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = KVPool([(1, 4)], NUM_BLOCKS, 4, torch.float32, torch.device("cpu"))
    copier = BlockCopier(DeviceTier(pool, BlockHashes(NUM_BLOCKS, 4)))
    host = HostTier(pool, HostMemory(4, pool.bytes_per_block, cuda=False))
    disk = DiskTier(tmp_path, "x", pool.bytes_per_block, 2**30)
    copier.tiers |= {HOST: host, DISK: disk}
    told: queue.SimpleQueue[Copied | Found] = queue.SimpleQueue()
    copier.report_to(told.put)
    first, second = (np.array([[block, 1]], np.int32) for block in (5, 6))
    pool.keys[0][5], pool.keys[0][6] = 5.0, 6.0
    copier.begin(0, 1, [CopyJob(0, 1, DEVICE, HOST, first)])
    assert isinstance(told.get(timeout=20), Copied)
    gate, threads, read = threading.Event(), [], host._read

    def slowly(*values: Any) -> bool:
        assert gate.wait(20)
        threads.append(threading.current_thread())
        return read(*values)

    monkeypatch.setattr(host, "_read", slowly)
    names = prefix("a", 1)
    lists = [CopyJob(0, 2, HOST, DISK, np.array([[1, 0]], np.int32), names=names), CopyJob(0, 2, DEVICE, HOST, second)]
    copier.begin(0, 2, lists)  # returns although nothing has been read
    assert told.empty()
    gate.set()
    assert [told.get(timeout=20).bad for _ in lists] == [b"", b""]  # type: ignore[union-attr]
    assert threading.current_thread() not in threads
    assert len(threads) == 1
    copier.begin(0, 3, [CopyJob(0, 3, DISK, DEVICE, np.array([[0, 9]], np.int32), names=names)])
    assert told.get(timeout=20).bad == b""  # type: ignore[union-attr]
    assert pool.keys[0][9].unique().tolist() == [5.0], "as it was before the block was written again"
    copier.close()
