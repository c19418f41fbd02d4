"""Joins the reports of all ranks of an executor for the scheduler, and checks the properties that must be equal.

Every rank copies its own part of a block. Copies between tiers, with peers and with storage take different times on
each rank, and may fail on one rank alone. The scheduler knows blocks of the executor, not of ranks. So a list of copies
is confirmed when every rank has done its part: a block is bad if it is bad on any rank, and the list has failed if it
has failed on any rank. Until then the scheduler pins all blocks of the list, so no block is given to another sequence
while a rank still copies it, and all ranks hold the same blocks. Loads of adapters are confirmed in the same way: each
rank has a part of an adapter in the same slot.
"""

import logging
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import msgspec
from msgspec.structs import replace
from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import (
    AdapterLoaded,
    Copied,
    Found,
    Hello,
    Inventory,
    NamedBlocks,
    StoredDropped,
    pack_int32s,
    unpack_int32s,
)

from pagewise_executor.ranks.messages import Ready

log = logging.getLogger(__name__)

Answer = Copied | Found | StoredDropped | AdapterLoaded
"""The reports of which every rank sends one."""

_Key = tuple[object, ...]


class Agreement:
    """Waits until each of ``size`` ranks has sent the same report, and then calls ``report`` with one that joins them.
    May be called on any thread."""

    def __init__(self, size: int, report: Callable[[Answer], None]) -> None:
        self._report = report
        self._lock = threading.Lock()
        self._waiting: dict[_Key, list[deque[Answer]]] = defaultdict(lambda: [deque() for _ in range(size)])

    def add(self, rank: int, message: Answer) -> None:
        """Take the report of a rank, and report the joined result if this was the last rank."""
        key = _key(message)
        with self._lock:
            said = self._waiting[key]
            said[rank].append(message)
            if not all(said):
                return
            messages = [each.popleft() for each in said]
            if not any(said):
                del self._waiting[key]
        self._report(_joined(messages))  # outside the lock: it may call any function

    def reset(self, epoch: int) -> None:
        """Forget the reports of all epochs but ``epoch``: they are void, and not every rank sends its own."""
        with self._lock:
            for key in [key for key in self._waiting if key[1] != epoch]:
                del self._waiting[key]


def _key(message: Answer) -> _Key:
    if isinstance(message, Found | StoredDropped | AdapterLoaded):
        return type(message), message.epoch, message.number
    return Copied, message.epoch, message.step, message.source, message.target, message.peer, message.group


def _joined(messages: Sequence[Any]) -> Answer:
    """Join reports of one type on one subject, one from each rank."""
    first: Answer = messages[0]
    if isinstance(first, Found):
        # A prefix is found as far as all ranks have found it. With groups of layers each rank answers with the last
        # place where it has the windows. The least of these is a place for the rank that named it; if another rank has
        # no windows there, its loads fail, and the sequence computes the prefix.
        return replace(first, num_blocks=min(each.num_blocks for each in messages))
    if isinstance(first, StoredDropped):  # each rank has deleted its parts of the same blocks
        error = next(filter(None, (each.error for each in messages)), "")
        return replace(first, num_blocks=max(each.num_blocks for each in messages), error=error)
    elapsed_us, errors = max(each.elapsed_us for each in messages), [each.error for each in messages]
    if isinstance(first, AdapterLoaded):
        # The adapter is loaded if it is on all ranks. It is gone from the host as soon as one rank has evicted it.
        evicted = tuple(dict.fromkeys(chain.from_iterable(each.evicted for each in messages)))
        from_host, error = all(each.from_host for each in messages), next(filter(None, errors), "")
        return replace(first, elapsed_us=elapsed_us, from_host=from_host, evicted=evicted, error=error)
    bad = set(chain.from_iterable(unpack_int32s(each.bad) for each in messages))
    failure = next((error for error in errors if error is not None), None)
    return replace(first, elapsed_us=elapsed_us, bad=pack_int32s(sorted(bad)), error=failure)


def computes(info: Hello) -> dict[str, str]:
    """Return the properties that must be the same on all ranks, by their names in error messages.

    The scheduler gets weights and block formats from rank 0 alone, and lets executors exchange blocks by them.
    Ranks on GPUs of two kinds may use different kernels and formats, and round differently.
    """
    return {
        "weights": info.model_fingerprint,
        "kernels": info.kernels,
        "data type": info.dtype,
        "bytes of a block": str(info.bytes_per_block),
        "groups of layers": f"{len(info.groups)}, in pages of {info.page_bytes} bytes",
    }


_OF_ONE_NODE = {
    # The weights themselves are compared once they are loaded, so the model may be in another folder on each host.
    "model", "trust_remote_code", "threads", "node_rank", "master_addr", "master_port", "scheduler", "executor_id",
    "keys", "key_name", "plaintext", "block_listen", "advertise", "host_memory_dir", "drain_timeout", "log_level",
    "log_format",
}  # fmt: skip
"""Options that may differ between the nodes of an executor."""
_FOLDERS = ("disk_cache",)
"""Options that either all nodes have, with values that may differ, or none."""


def settings_of(config: ExecutorConfig) -> dict[str, str]:
    """Return the options that must be the same on all nodes of an executor, with their values as text, by name."""
    found = {name: value for name, value in msgspec.structs.asdict(config).items() if name not in _OF_ONE_NODE}
    return {name: str(value is not None if name in _FOLDERS else value) for name, value in found.items()}


def difference(node: int, own: dict[str, str], other: dict[str, str]) -> str:
    """Return a text that names the options in which ``node`` differs from node 0; empty if there are none.

    ``own``: the settings of node 0. ``other``: the settings of ``node``.
    """
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    return ", ".join(
        f"--{name.replace('_', '-')} is {other.get(name)} on node {node} and {own.get(name)} on node 0"
        for name in names
    )


def common_device(own: Hello, others: Sequence[Ready]) -> str:
    """Return a name for the devices of all ranks together. ``own``: of rank 0. ``others``: of the other ranks in order.

    Raises:
        ModelError: the ranks would not compute the same.
    """
    for rank, other in enumerate(others, 1):
        for what, value in computes(own).items():
            if (theirs := other.computes.get(what)) != value:
                raise ModelError(
                    f"--tensor-parallel {1 + len(others)}: ranks 0 ({own.device}) and {rank} ({other.device}) do not "
                    f"compute the same ({what}: {value} and {theirs}): take devices of one kind, or options that both "
                    "support, such as --kernels"
                )
    devices = list(dict.fromkeys([own.device, *(other.device for other in others)]))
    if len(devices) > 1:
        log.warning("the ranks have different devices, and all are as slow as the slowest: %s", ", ".join(devices))
    return f"{', '.join(devices)}, {1 + len(others)} ranks"


def common_blocks(inventories: Sequence[Inventory | None], *, renumber: bool = False) -> Inventory | None:
    """Return the inventory of the blocks that hold the same hash on every rank, in the same tier and group of layers.

    ``inventories``: one of each rank; None if a rank has no hashed blocks. ``renumber``: the ranks have numbered their
    blocks each for itself, so the blocks get new ids; otherwise a block has one id on all ranks. Returns None if there
    are no such blocks.
    """
    common: dict[tuple[int, int], dict[Any, BlockHash]] | None = None
    for inventory in inventories:
        tiers = {
            (named.tier, named.group): _hashes(named, renumber)
            for named in (inventory.tiers if inventory is not None else ())
        }
        if common is None:
            common = tiers
            continue
        for where, known in common.items():
            others = tiers.get(where, {})
            common[where] = {block: name for block, name in known.items() if others.get(block) == name}
    found = [
        NamedBlocks(tier, pack_int32s(range(len(known)) if renumber else known), b"".join(known.values()), group)
        for (tier, group), known in (common or {}).items()
        if known
    ]
    return Inventory(tuple(found)) if found else None


def _hashes(named: NamedBlocks, renumber: bool) -> dict[Any, BlockHash]:
    """Return the hashes by block, or each by itself if the blocks are to get other ids."""
    names = [BlockHash(named.hashes[start : start + HASH_BYTES]) for start in range(0, len(named.hashes), HASH_BYTES)]
    return dict(zip(names if renumber else unpack_int32s(named.blocks), names, strict=True))
