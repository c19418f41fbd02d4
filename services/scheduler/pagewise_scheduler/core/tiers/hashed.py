"""Storage that outlives executors, and that several of them share: what is loaded from it, and what is written to it.

A scheduler keeps no list of what is stored: others write there too, and storage forgets by itself. When a request
comes, an executor is asked how much of its prompt is stored (``LookUp``). What was found is noted in the request, and
is one more source from which its KV can be recovered. A block that is gone when it is loaded is computed.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pagewise_shared.block_hash import BlockHash, BlockName, is_private, pack_names
from pagewise_shared.protocol import DEVICE, BlockCopies, pack_int32s, tier_name

from pagewise_scheduler.core.memory.counters import MemoryCounters
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, hash_chain, hash_of
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.copy_costs import CopyCosts, Link, TierCosts
from pagewise_scheduler.core.tiers.peer import BlockPlace

MAX_WRITING = 256
"""Blocks that may be on their way to one storage."""
_MOST_WAITING = 1 << 16
_WRITTEN_PER_STEP = 32


IsWorthWriting = Callable[[CachedBlock, "Storage", float], bool]
"""Whether a block is to be written to a storage that is so busy, 0 to 1."""


@dataclass(slots=True, eq=False)
class Storage:
    """A storage that an executor reads and writes.

    Fields:
        number: of the tier. identity: executors with the same one share it.
        costs: of copies between it and the device. salted: whether KV of requests with a cache salt may be there.
    """

    number: int
    identity: str
    costs: TierCosts
    salted: bool = True

    @classmethod
    def beginning_with(cls, number: int, identity: str, costs: CopyCosts, *, salted: bool = True) -> "Storage":
        """One whose copies cost that, until something has been copied."""
        return cls(number, identity, TierCosts.beginning_with(costs), salted)

    def takes(self, request: Request) -> bool:
        """Whether KV of a request may be there."""
        return self.salted or not is_private(request.cache_salt)


class StoredPrefix:
    """The blocks of a prompt that a storage holds, from the block ``start`` on. See ``RecoverySource``.

    They have no ids there, so the block of a place is its index in the prompt. Nothing is pinned: storage that has
    forgotten a block says so when it is loaded.
    """

    __slots__ = ("_block_bytes", "_root", "_start", "_tokens", "epoch", "identity", "link", "name", "number", "peer")

    def __init__(self, storage: Storage, root: BlockHash, tokens: bytes, block_size: int, start: int) -> None:
        """``root``: where the block hashes of the prompt begin. ``tokens``: of its blocks (int32 bytes)."""
        self.peer, self.number, self.name = "", storage.number, tier_name(storage.number)
        self.identity = storage.identity
        self.epoch = 0
        self.link: Link = storage.costs.load
        self._root, self._tokens, self._start = root, tokens, start
        self._block_bytes = 4 * block_size

    def link_from(self, tier: int) -> Link:
        """What copies from it cost."""
        return self.link

    def pin(self, nodes: Sequence[CachedBlock]) -> list[BlockPlace]:
        """The places of these blocks, the first of which is ``start``."""
        return [BlockPlace(node, self.number, index) for index, node in enumerate(nodes, self._start)]

    def release(self, places: Iterable[BlockPlace]) -> None:
        """Nothing was pinned."""

    def names(self, places: Iterable[BlockPlace]) -> list[BlockName]:
        """What the blocks of these places are called."""
        hashes = hash_chain(self._root, self._tokens, self._block_bytes)
        return [BlockName(hashes[at], hashes[at - 1] if at else self._root) for at in (one.block for one in places)]


class _Writer:
    """What goes to one storage; see ``WriteBehind``."""

    def __init__(
        self,
        storage: Storage,
        bit: int,
        counters: MemoryCounters,
        is_worth_writing: IsWorthWriting,
    ) -> None:
        """``bit``: which of ``CachedBlock.stored`` tells that a block is stored there."""
        self.storage = storage
        self.num_writing = 0
        self._bit = bit
        self._counters = counters
        self._is_worth_writing = is_worth_writing
        self._waiting: deque[list[CachedBlock]] = deque()  # the end of a prefix first: they are taken from the back
        self._num_waiting = 0
        self._writing: deque[tuple[int, list[CachedBlock]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting) and self.num_writing < MAX_WRITING

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self.num_writing > 0

    def ended(self, tip: CachedBlock | None, num_stored: int) -> None:
        """A sequence lets go of its blocks, of which ``tip`` is the last that is full. The first ``num_stored`` were
        found in the storage."""
        path: list[CachedBlock] = []
        for node in ancestors(tip):
            if node.stored & self._bit:
                break
            if node.depth <= num_stored:
                node.stored |= self._bit
            else:
                path.append(node)
        if not path:
            return
        if self._num_waiting + len(path) > _MOST_WAITING:
            self._counters.not_written += len(path)
        else:
            self._num_waiting += len(path)
            self._waiting.append(path)

    def take(self, step: int) -> BlockCopies | None:
        """The copies that the plan of ``step`` asks for, before all its others; None: there are none."""
        taken: list[CachedBlock] = []
        most = min(_WRITTEN_PER_STEP, MAX_WRITING - self.num_writing)
        while self._waiting and len(taken) < most:
            path = self._waiting[0]
            node = path.pop()
            self._num_waiting -= 1
            busy = (self.num_writing + len(taken)) / MAX_WRITING
            if node.stored & self._bit:  # by another sequence
                pass
            elif node.block >= 0 and self._is_worth_writing(node, self.storage, busy):
                node.stored |= self._bit
                taken.append(node)
            else:
                self._counters.not_written += 1 + len(path)
                self._num_waiting -= len(path)
                path.clear()
            if not path:
                self._waiting.popleft()
        if not taken:
            return None
        self.num_writing += len(taken)
        self._writing.append((step, taken))
        pairs = pack_int32s([part for index, node in enumerate(taken) for part in (node.block, index)])
        names = pack_names(BlockName(hash_of(node), hash_of(node.parent)) for node in taken if node.parent is not None)
        return BlockCopies(DEVICE, self.storage.number, pairs, names=names)

    def confirmed(self, step: int, bad: set[int]) -> None:
        while self._writing and self._writing[0][0] <= step:
            asked_in, nodes = self._writing.popleft()
            self.num_writing -= len(nodes)
            if asked_in == step:
                for index in bad:
                    if index < len(nodes):
                        nodes[index].stored &= ~self._bit  # another sequence that uses it tries again
                self._counters.written += len(nodes) - len(bad)
                self._counters.not_written += len(bad)

    def clear(self) -> None:
        self._waiting.clear()
        self._num_waiting = 0
        self._writing.clear()
        self.num_writing = 0


class WriteBehind:
    """Writes what one executor has computed to its storages, behind the requests that it was computed for.

    When a sequence ends, those of its blocks that are not stored wait here, the beginning of a prefix before its end,
    and each plan takes some of them along. If a block is not written, because it is not worth it or has been evicted
    before its turn, nothing is written of what follows it. True if something is to be written now.
    """

    def __init__(self, storages: Iterable[Storage], counters: MemoryCounters, is_worth_writing: IsWorthWriting) -> None:
        self._writers = {
            storage.number: _Writer(storage, 1 << storage.number, counters, is_worth_writing) for storage in storages
        }

    def __bool__(self) -> bool:
        return any(self._writers.values())

    @property
    def is_busy(self) -> bool:
        """Whether something waits to be written, or is on its way."""
        return any(writer.is_busy for writer in self._writers.values())

    def ended(self, request: Request, tip: CachedBlock | None) -> None:
        """A sequence of the request lets go of its blocks, of which ``tip`` is the last that is full."""
        for writer in self._writers.values():
            if writer.storage.takes(request):
                writer.ended(tip, request.stored.get(writer.storage.identity, 0))

    def take(self, step: int) -> list[BlockCopies]:
        """The copies that the plan of ``step`` asks for, before all its others."""
        return [copies for writer in self._writers.values() if writer and (copies := writer.take(step)) is not None]

    def confirmed(self, number: int, step: int, bad: set[int]) -> None:
        """The copies of a step to the storage of that number have been made, but for those of these indices."""
        if (writer := self._writers.get(number)) is not None:
            writer.confirmed(step, bad)

    def clear(self) -> None:
        """The executor is gone or reset: nothing waits, and nothing is under way any more."""
        for writer in self._writers.values():
            writer.clear()
