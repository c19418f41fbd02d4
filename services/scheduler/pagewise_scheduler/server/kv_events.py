"""KV events: the blocks that executors store and evict, in vLLM's format. Routers learn from them who caches a prefix.

A batch is an array of a time, events, and the rank of the executor. An event is a map with its name under ``type``, as
vLLM has sent it since 0.24, or an array of its name and its fields, as vLLM did before. Routers know a block by the
last eight bytes of its hash, as a number, and connect the number with the tokens in the event.

Of disks and stores, the events have the blocks that an executor has written or found there. A store deletes blocks
without a word: such a block is removed when an executor does not find it any more.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from pagewise_shared.block_hash import BlockHash, client_salt, is_adapter_salt, without_rope
from pagewise_shared.config import KVEventsConfig
from pagewise_shared.protocol import DEVICE, DISK, HASH_TIERS, HOST, REDIS, GroupKind, unpack_int32s
from pagewise_shared.segments import TOKEN_ID

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, cache_salt_of, hash_of
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.kv_event_publisher import KVEventPublisher

_MEDIA = {DEVICE: "GPU", HOST: "CPU", DISK: "DISK", REDIS: "EXTERNAL"}
"""The names of tiers in the events of vLLM, and as Dynamo's router reads them."""
_SPEC_KINDS: dict[GroupKind, str] = {"full": "full_attention", "latent": "mla_attention"}
_ALL_CLIENTS = "all/"
_GROUP = 0


class BlockStored(Struct, omit_defaults=True, tag=True):
    """Blocks that a medium has from now on. They follow one another, and the first follows ``parent_block_hash``.

    ``extra_keys``: for each block, the values beside tokens that its hash depends on: for first blocks, a cache salt.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, omit_defaults=True, tag=True):
    """Blocks that a medium does not have any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(Struct, tag=True):
    """No executor has any block."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class ExecutorEvents:
    """Collects the events of one executor: a ``BlockWatcher``.

    ``rank``: the executor's number in batches. ``stored``: by medium, the blocks that subscribers believe to be there.
    Blocks that follow one another are put into one event.
    """

    def __init__(self, rank: int, block_size: int, kind: GroupKind) -> None:
        self.rank = rank
        self.stored: dict[str, set[int]] = {}
        self._block_size, self._kind = block_size, _SPEC_KINDS[kind]
        self._pending: list[Event] = []

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def entered(self, node: CachedBlock, tier: int) -> None:
        """Note that a tier has the block."""
        medium, parent = _MEDIA.get(tier), node.parent
        if medium is None or parent is None:
            return
        block, tokens = _number(hash_of(node)), [token & TOKEN_ID for token in unpack_int32s(node.tokens)]
        stored = self.stored.setdefault(medium, set())
        if tier in HASH_TIERS and block in stored:  # it was found there again
            return
        stored.add(block)
        before, first = _number(hash_of(parent)), not parent.depth
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockStored) and last.medium == medium and last.block_hashes[-1] == before and not first:
            last.block_hashes.append(block)
            last.token_ids += tokens
            if last.extra_keys is not None:
                last.extra_keys.append(None)
            return
        salt = _salt(cache_salt_of(parent)) if first else None
        self._pending.append(
            BlockStored(
                [block], None if first else before, tokens, self._block_size, None, medium, _adapter(node),
                None if salt is None else [(salt,)], _GROUP, self._kind,
            )
        )  # fmt: skip

    def left(self, node: CachedBlock, tier: int) -> None:
        """Note that a tier does not have the block any more."""
        if (medium := _MEDIA.get(tier)) is None:
            return
        self._remove(_number(hash_of(node)), medium)

    def gone(self, hashes: Iterable[BlockHash], tier: int) -> None:
        """Note that a disk or a store does not have these blocks any more."""
        medium = _MEDIA[tier]
        for block in map(_number, hashes if medium in self.stored else ()):
            if block in self.stored[medium]:
                self._remove(block, medium)

    def _remove(self, block: int, medium: str) -> None:
        self.stored[medium].discard(block)
        last = self._pending[-1] if self._pending else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(block)
        else:
            self._pending.append(BlockRemoved([block], medium, _GROUP))

    def used(self, nodes: Sequence[CachedBlock]) -> None:
        """Note nothing: vLLM's format has no event for a use."""

    def all_gone(self) -> None:
        """Note that no tier has any block."""
        self._pending += [
            BlockRemoved(list(blocks), medium, _GROUP) for medium, blocks in self.stored.items() if blocks
        ]
        self.stored.clear()


class KVEvents:
    """The events of all executors, in one stream of batches.

    An executor's rank is the lowest number that no other executor has. The stream begins with ``AllBlocksCleared``, so
    that a subscriber forgets the blocks of an earlier scheduler.
    """

    def __init__(self, config: KVEventsConfig, metrics: Metrics) -> None:
        """Bind the sockets.

        Raises:
            zmq.ZMQError: an endpoint cannot be bound.
        """
        self._as_maps = config.encoding == "map"
        self._executors: dict[int, ExecutorEvents] = {}
        self._publisher = KVEventPublisher(config, metrics.kv_events_dropped.inc)
        self._publish([AllBlocksCleared()], 0)

    def join(self, block_size: int, kind: GroupKind) -> ExecutorEvents:
        """Return the watcher of an executor that joins. ``kind``: the kind of layers of its prefix tree."""
        rank = next(rank for rank in range(len(self._executors) + 1) if rank not in self._executors)
        events = self._executors[rank] = ExecutorEvents(rank, block_size, kind)
        return events

    def leave(self, events: ExecutorEvents) -> None:
        """Publish the last events of an executor, whose rank is free then."""
        self._flush(events)
        del self._executors[events.rank]

    def flush(self) -> None:
        """Publish a batch for each executor that has events."""
        for events in self._executors.values():
            self._flush(events)

    def _flush(self, events: ExecutorEvents) -> None:
        if taken := events.take():
            self._publish(taken, events.rank)

    def _publish(self, events: list[Event], rank: int) -> None:
        self._publisher.publish((time.time(), events if self._as_maps else [*map(_as_array, events)], rank))

    def close(self) -> None:
        """Stop publishing."""
        self._publisher.close()


def _as_array(event: Event) -> tuple[Any, ...]:
    return (type(event).__name__, *msgspec.structs.astuple(event))


def _number(block: BlockHash) -> int:
    return int.from_bytes(block[-8:], "big")


def _salt(cache_salt: str | None) -> str | None:
    """The request's cache salt, with the name of the API key or group if that has a cache of its own."""
    salt = client_salt(cache_salt)
    return salt.removeprefix(_ALL_CLIENTS) if salt is not None else None


def _adapter(node: CachedBlock) -> str | None:
    """The name of a block's adapter, or the adapter's hash for a block from before a restart of the scheduler."""
    if node.cached_by is not None:
        return node.cached_by.adapter or None
    salt = without_rope(cache_salt_of(node))
    return salt.partition("/")[0] if salt is not None and is_adapter_salt(salt) else None
