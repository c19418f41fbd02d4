"""KV events over ZeroMQ, as a router reads them: decoded by structs of vLLM's layout, in both of its encodings."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.core.memory.prefix_tree import block_keys, hash_of
from pagewise_scheduler.server.kv_event_publisher import KVEventPublisher
from pagewise_scheduler.server.kv_events import BlockRemoved, BlockStored, ExecutorEvents
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.config import ExecutorConfig, KVEventsConfig, SchedulerConfig, parse_config
from pagewise_shared.protocol import DEVICE, DISK, HOST, REDIS, StoredGone, TierInfo, pack_int32s

from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.driving import executor_for, run
from tests.scheduler.server.stack import Stack, executor, running, until


class _Stored(msgspec.Struct, tag="BlockStored"):
    """The fields without a default are required by vLLM's own struct."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    data_parallel_rank: int | None = None


def _positional(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same struct as vLLM encoded it before 0.24."""
    fields = [
        (field.name, field.type, *([field.default] if field.default is not msgspec.NODEFAULT else []))
        for field in msgspec.structs.fields(struct)
    ]
    return msgspec.defstruct(struct.__name__, fields, array_like=True, tag=struct.__struct_config__.tag)


_OldStored, _OldRemoved, _OldCleared = _positional(_Stored), _positional(_Removed), _positional(_Cleared)


class _ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[_OldStored | _OldRemoved | _OldCleared]  # type: ignore[valid-type]
    data_parallel_rank: int | None = None


class Subscriber:
    """A router's view: the tokens of each prefix that an executor has, by rank, medium and hash."""

    def __init__(self, socket: "zmq.Socket[bytes]", batch: type[msgspec.Struct] = _MapBatch) -> None:
        self.socket, self._decode = socket, msgspec.msgpack.Decoder(batch).decode
        self.prefixes: dict[tuple[int, str, int], tuple[int, ...]] = {}
        self.next = 0
        self.stored: list[Any] = []

    def read(self) -> None:
        """Apply all batches that have come."""
        with suppress(zmq.Again):
            while True:
                topic, number, payload = self.socket.recv_multipart(zmq.NOBLOCK)
                assert topic == b"kv@pod@model"
                if int.from_bytes(number, "big") >= self.next:  # else it was sent again already
                    self.apply(number, payload)

    def apply(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        batch: Any = self._decode(payload)
        for event in batch.events:
            match type(event).__struct_config__.tag:
                case "AllBlocksCleared":
                    self.prefixes.clear()
                case "BlockRemoved":
                    for block in event.block_hashes:
                        del self.prefixes[batch.data_parallel_rank, event.medium, block]
                case _:
                    self._store(batch.data_parallel_rank, event)

    def _store(self, rank: int, event: Any) -> None:
        self.stored.append(event)
        size, parent = event.block_size, event.parent_block_hash
        assert len(event.token_ids) == size * len(event.block_hashes)
        before: tuple[int, ...] = ()
        if parent is not None:  # an executor has the ancestors of its device's blocks there
            before = self.prefixes.get((rank, event.medium, parent)) or self.prefixes[rank, "GPU", parent]
        for index, block in enumerate(event.block_hashes):
            before += tuple(event.token_ids[index * size : (index + 1) * size])
            self.prefixes[rank, event.medium, block] = before


def held(stack: Stack) -> dict[tuple[int, str, int], tuple[int, ...]]:
    """The same of the schedulers' own prefix trees, of executors by their order."""
    found = {}
    for rank, handle in enumerate(stack.executors):
        for cache_salt_root in handle.scheduler.kv.pool.tree.roots:
            below: list[tuple[Any, tuple[int, ...]]] = [(cache_salt_root, ())]
            for node, before in below:  # grows while it is walked
                tokens = before + tuple(memoryview(node.tokens).cast("i"))
                below += [(child, tokens) for child in node.children.values()]
                for tier, medium in ((DEVICE, "GPU"), (HOST, "CPU")):
                    if node.parent is not None and node.block_id(tier) >= 0:
                        found[rank, medium, int.from_bytes(hash_of(node)[-8:], "big")] = tokens
    return found


def _config(tmp_path: Path, **more: Any) -> str:
    given = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/events", "topic": "kv@pod@model"}
    return json.dumps({**given, **more})


@pytest.mark.parametrize(("encoding", "batch"), [("map", _MapBatch), ("array", _ArrayBatch)])
async def test_a_subscriber_knows_the_blocks_of_all_executors(
    tmp_path: Path, encoding: str, batch: type[msgspec.Struct]
) -> None:
    options = {"replay_endpoint": f"ipc://{tmp_path}/replay", "encoding": encoding}
    chance = random.Random(encoding)
    context = zmq.Context()
    try:
        async with running(tmp_path, kv_events_config=_config(tmp_path, **options), routing="round-robin") as stack:
            runners = [SimulatedRunner(ExecutorConfig(num_blocks=24, block_size=4), tiers={HOST: 16}) for _ in range(2)]
            async with executor(tmp_path, "a", runner=runners[0]), executor(tmp_path, "b", runner=runners[1]):
                await stack.ready(2)
                subscriber = await _subscribed(context, tmp_path, stack, batch)
                for _ in range(20):
                    prompt = [1, 2, 3, 4] * chance.randint(0, 3) + [chance.randint(1, 9) for _ in range(30)]
                    await stack.generate(prompt, chance.randint(1, 6))
                await until(lambda: _agrees(subscriber, stack))
                assert {rank for rank, _, _ in subscriber.prefixes} == {0, 1}
                assert any(len(event.block_hashes) > 1 for event in subscriber.stored), "blocks in a row are one event"
            await until(lambda: _agrees(subscriber, stack) and not subscriber.prefixes)
    finally:
        context.destroy(linger=0)


async def _subscribed(
    context: "zmq.Context[zmq.Socket[bytes]]", path: Path, stack: Stack, batch: type[msgspec.Struct]
) -> Subscriber:
    """A subscriber that has connected late, and has asked for all earlier batches, as one that finds a gap does."""
    socket = context.socket(zmq.SUB)
    socket.subscribe("kv@")
    socket.connect(f"ipc://{path}/events")
    for first in range(1, 1000):
        await stack.generate([first] * 30, 1)
        if socket.poll(1):
            break
    subscriber = Subscriber(socket, batch)
    with context.socket(zmq.DEALER) as asking:
        asking.connect(f"ipc://{path}/replay")
        asking.send_multipart([b"", (0).to_bytes(8, "big")])
        while True:
            await until(lambda: asking.poll(0))
            _, number, payload = asking.recv_multipart()
            if number == b"\xff" * 8:
                assert payload == b""
                return subscriber
            subscriber.apply(number, payload)


def _agrees(subscriber: Subscriber, stack: Stack) -> bool:
    subscriber.read()
    return subscriber.prefixes == held(stack)


def test_events_say_whose_blocks_they_are() -> None:
    scheduler = create_scheduler(num_blocks=16, num_host_blocks=16)
    events, served_by = ExecutorEvents(0, 4, "full"), executor_for(scheduler)
    scheduler.kv.watchers.append(events)
    told = []
    for salt in ("all/mine", "key:alice", None):
        request = create_request(prompt=9, max_tokens=1)
        request.params = msgspec.structs.replace(request.params, cache_salt=salt)
        scheduler.add(request)
        run(scheduler, served_by)
        (stored,) = events.take()
        assert isinstance(stored, BlockStored)
        told.append(stored.extra_keys)
        assert (len(stored.block_hashes), stored.medium, stored.group_idx) == (2, "GPU", 0)
        assert (stored.kv_cache_spec_kind, stored.lora_name) == ("full_attention", None)
    assert told == [[("mine",), None], [("key:alice",), None], None]
    evict(scheduler, 16)
    taken = [event for event in events.take() if isinstance(event, BlockStored | BlockRemoved)]
    assert {event.medium for event in taken} == {"GPU", "CPU"}
    assert {medium: len(blocks) for medium, blocks in events.stored.items()} == {"GPU": 0, "CPU": 6}
    scheduler.kv.forget()
    (removed,) = events.take()
    assert isinstance(removed, BlockRemoved)
    assert (len(removed.block_hashes), removed.medium) == (6, "CPU")


@pytest.mark.parametrize(("tier", "medium"), [(DISK, "DISK"), (REDIS, "EXTERNAL")])
def test_blocks_in_storage_are_announced_until_they_are_gone(tier: int, medium: str) -> None:
    scheduler = create_scheduler(hashed={tier: "shared"})
    events, served_by = ExecutorEvents(0, 4, "full"), executor_for(scheduler)
    scheduler.kv.hashed[tier].watcher = events

    def taken(*gone: BlockHash, found: int | None = None) -> list[tuple[str, int]]:
        events.gone(gone, tier)
        if not gone:
            scheduler.add(request := create_request(prompt=[*range(18)], max_tokens=1))
            if found is not None:
                request.stored["shared"] = found
                scheduler.features.write_back.entered(request)
            run(scheduler, served_by)
        new = [event for event in events.take() if isinstance(event, BlockStored | BlockRemoved)]
        assert all(event.medium == medium for event in new)
        return [(type(event).__name__, len(event.block_hashes)) for event in new]

    assert taken() == [("BlockStored", 4)]
    assert taken() == []
    stored = list(served_by.storage)
    assert taken(*stored[2:], *stored[3:]) == [("BlockRemoved", 2)]
    assert taken(*stored[2:]) == []
    assert taken(found=1) == [("BlockRemoved", 1), ("BlockStored", 3)], "the others were not found, and written again"
    assert not scheduler.fail(2)
    served_by.reset(2)
    events.all_gone()  # as one of the watchers of the device
    assert taken() == [("BlockRemoved", 4), ("BlockStored", 4)], "blocks are announced after a reset, too"


async def test_a_disk_that_evicts_is_told_for_all_that_share_it(tmp_path: Path) -> None:
    runners = [SimulatedRunner(ExecutorConfig(num_blocks=24, block_size=4), tiers={DISK: 0}) for _ in range(2)]
    for runner in runners:
        runner.info = msgspec.structs.replace(runner.info, tiers=(TierInfo(DISK, 0, identity="shared"),))
    context = zmq.Context()
    try:
        config = _config(tmp_path, replay_endpoint=f"ipc://{tmp_path}/replay")
        async with (
            running(tmp_path, kv_events_config=config, routing="round-robin", recovery="swap") as stack,
            executor(tmp_path, "a", runner=runners[0]),
            executor(tmp_path, "b", runner=runners[1]),
        ):
            await stack.ready(2)
            subscriber = await _subscribed(context, tmp_path, stack, _MapBatch)
            for _ in range(2):
                await stack.generate([1, 2, 3] * 5, 1)

            def on_disk() -> dict[tuple[int, ...], set[int]]:
                subscriber.read()
                found: dict[tuple[int, ...], set[int]] = {}
                for (rank, medium, _), tokens in subscriber.prefixes.items():
                    if medium == "DISK":
                        found.setdefault(tokens, set()).add(rank)
                return found

            prefix = (1, 2, 3) * 4
            await until(lambda: on_disk().get(prefix) == {0, 1})
            (handle,) = (one for one in stack.executors if one.executor_id == "a")
            tree = handle.scheduler.kv.pool.tree
            (*_, node) = tree.walk(tree.root_of(None), block_keys(pack_int32s(prefix), 4))
            runners[0]._report(StoredGone(handle.scheduler.epoch, DISK, hash_of(node)))
            await until(lambda: prefix not in on_disk())
            assert on_disk()[prefix[:8]] == {0, 1}
    finally:
        context.destroy(linger=0)


def test_batches_beyond_the_queue_are_lost_with_their_numbers(tmp_path: Path) -> None:
    dropped: list[int] = []
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", max_queue_size=1)
    publisher = KVEventPublisher(config, lambda: dropped.append(1))
    for _ in range(20_000):
        publisher.publish((0.0, [], 0))
        if dropped:
            break
    publisher.close()
    assert dropped


def test_a_subscriber_that_reads_slowly_gets_all_batches_again(tmp_path: Path) -> None:
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    publisher, most, end = KVEventPublisher(config, lambda: None), 1500, b"\xff" * 8

    def numbers(socket: "zmq.Socket[bytes]") -> list[bytes]:
        found = [b""]
        while found[-1] != end:
            assert socket.poll(30_000), "a frame is lost"
            found.append(socket.recv_multipart()[1])
        return found[1:]

    with zmq.Context() as context, context.socket(zmq.DEALER) as slow, context.socket(zmq.DEALER) as quick:
        slow.set_hwm(10)
        for socket in (slow, quick):
            socket.connect(config.replay_endpoint or "")
        for _ in range(most):
            publisher.publish((0.0, ["x" * 4000], 0))
        quick.send_multipart([b"", (most - 1).to_bytes(8, "big")])
        while len(numbers(quick)) == 1:  # the last one is not published yet
            quick.send_multipart([b"", (most - 1).to_bytes(8, "big")])
        slow.send_multipart([b"", bytes(8)])
        assert slow.poll(30_000)
        quick.send_multipart([b"", (most - 1).to_bytes(8, "big")])
        numbers(quick)  # everything has been sent to the slow one by now
        assert len(numbers(slow)) == most + 1
    publisher.close()


@pytest.mark.parametrize("text", ["yes", "[]", '{"enable_kv_cache_events": 1}', '{"endpoints": "x"}', '{"hwm": 0}'])
def test_a_wrong_configuration_is_an_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_config(SchedulerConfig, ["--kv-events-config", text], prog="p", description="d")
    assert "--kv-events-config" in capsys.readouterr().err
