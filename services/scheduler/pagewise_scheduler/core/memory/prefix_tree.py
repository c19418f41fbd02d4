"""The prefix tree, which maps contents to blocks: full blocks, one level per block of tokens.

The way from the root to a node spells the tokens of a prefix, so a node identifies the same content as its chained
block hash (parent, tokens, extra keys), exactly: a look-up compares tokens. That is cheaper than hashing, and the tree
knows a block's descendants, which eviction asks for. Hashes name blocks outside of it; they are computed on demand.
Each cache salt (a tenant, an adapter) has a root of its own; the model is the same for the whole tree.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice

from pagewise_shared.block_hash import BlockHash, BlockName, block_hash, is_private, root_hash, without_rope
from pagewise_shared.protocol import DEVICE

from pagewise_scheduler.core.memory.eviction_history import LossLog, RequestRef, root_key

NOWHERE = -1
"""The id of a block in a tier that does not have it, and the tier of a block that no tier has."""

PRIVATE = 1
"""The bit of ``CachedBlock.flags`` of blocks whose cache salt belongs to some clients only."""
OWNER_SHIFT = 64
"""The bits of ``CachedBlock.flags`` from here on are the number of the block's owner, if owners have budgets.

They have none if a model has several groups of layers, which use these bits otherwise (see ``HashedTier``).
"""
_OWNER = -1 << OWNER_SHIFT

_BYTES_PER_TOKEN = 4
_SIBLINGS_TRIED = 16
_UNKNOWN = BlockHash(b"")


class CachedBlock:
    """A full block whose content is known: ``tokens`` (int32 bytes) after its ancestors' tokens.

    One or several tiers have it; no tier has a root. If the device has it, it has its ancestors too.

    Fields:
        block: its id on the device. copies: its ids in the tiers below, by their numbers; a tuple, because most blocks
            have none and share one. ``NOWHERE``: the tier does not have it. num_tiers: tiers that have it.
        depth: blocks from the root, which has 0. num_on_device: children that the device has. last_used: tick of its
        last release on the device. hash: its block hash, empty until ``hash_of`` is asked for it. kind: an eviction
        policy's class of it, 0: none. flags: bits of the tiers without ids (see ``HashedTier``), ``PRIVATE``, and the
        number of its owner. cached_by: the request that computed it, if that is known. history_key: its key in
        ``eviction_history``, 0 until it is asked for. prediction: of its next use (see ``predicted_uses``), 0: none.
        session: the number of the session whose turns alone have used it, ``SHARED``: others have too, 0: nothing is
        known.
    """

    __slots__ = (
        "block",
        "cached_by",
        "children",
        "copies",
        "depth",
        "flags",
        "hash",
        "history_key",
        "kind",
        "last_used",
        "num_on_device",
        "num_tiers",
        "parent",
        "prediction",
        "session",
        "tokens",
    )  # fmt: skip

    def __init__(self, parent: "CachedBlock | None", tokens: bytes, no_copies: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.children: dict[bytes, CachedBlock] = {}
        self.block = NOWHERE
        self.copies = no_copies
        self.num_tiers = self.num_on_device = self.last_used = self.kind = self.history_key = 0
        self.prediction = self.session = 0
        self.depth: int = 0
        self.flags: int = 0
        if parent is not None:
            self.depth, self.flags = parent.depth + 1, parent.flags & PRIVATE
        self.cached_by: RequestRef | None = None
        self.hash = _UNKNOWN

    @property
    def nearest_tier(self) -> int:
        """The number of the nearest tier that has it; ``NOWHERE``: no tier does."""
        if self.block >= 0:
            return DEVICE
        for tier, copy in enumerate(self.copies):
            if copy >= 0:
                return tier
        return NOWHERE

    def block_id(self, tier: int) -> int:
        """Its id in a tier; ``NOWHERE``: the tier does not have it."""
        if tier == DEVICE:
            return self.block
        return self.copies[tier] if tier < len(self.copies) else NOWHERE


class _Root(CachedBlock):
    """Where the prefixes of one cache salt begin."""

    __slots__ = ("cache_salt",)

    def __init__(self, cache_salt: str | None, model_fingerprint: str, no_copies: tuple[int, ...]) -> None:
        super().__init__(None, b"", no_copies)
        self.cache_salt = cache_salt
        self.hash = root_hash(model_fingerprint, cache_salt)
        self.history_key = root_key(cache_salt)
        self.flags = PRIVATE if is_private(without_rope(cache_salt)) else 0


def name_of(node: CachedBlock) -> BlockName:
    """The name of a block where there are no ids."""
    assert node.parent is not None
    return BlockName(hash_of(node), hash_of(node.parent))


def hash_of(node: CachedBlock) -> BlockHash:
    """The block hash of a node. Computes the missing hashes of its ancestors too."""
    path: list[CachedBlock] = []
    current: CachedBlock | None = node
    while current is not None and not current.hash:  # not recursive: a chain may be longer than the interpreter's stack
        path.append(current)
        current = current.parent
    assert current is not None, "a root has its hash from the beginning"
    known = current.hash
    for below in reversed(path):
        known = below.hash = block_hash(known, below.tokens)
    return known


@lru_cache(maxsize=32)
def hash_chain(root: BlockHash, tokens: bytes, size: int) -> tuple[BlockHash, ...]:
    """Block hashes of the full blocks of ``size`` bytes: asked for by many executors, one after the other."""
    hashes: list[BlockHash] = []
    for start in range(0, len(tokens) - size + 1, size):
        hashes.append(block_hash(hashes[-1] if hashes else root, tokens[start : start + size]))
    return tuple(hashes)


def ancestors(node: CachedBlock | None) -> Iterator[CachedBlock]:
    """A block and its ancestors, the nearest first; without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent


def left_behind(before: CachedBlock, last: CachedBlock) -> Iterator[CachedBlock]:
    """The blocks up to ``before`` that are not among the blocks up to ``last``, the last one first."""
    while before is not last and before.parent is not None:
        if before.depth < last.depth and last.parent is not None:
            last = last.parent
        else:
            yield before
            before = before.parent


def block_keys(tokens: bytes, block_size: int, num_tokens: int | None = None) -> Iterator[bytes]:
    """The tokens (int32 bytes) of each full block among the first ``num_tokens`` (None: all), cut as they are asked
    for."""
    size = block_size * _BYTES_PER_TOKEN
    end = len(tokens) if num_tokens is None else num_tokens * _BYTES_PER_TOKEN
    return (tokens[start : start + size] for start in range(0, end - size + 1, size))


def cache_salt_of(node: CachedBlock) -> str | None:
    """The cache salt of the root of a block."""
    while node.parent is not None:
        node = node.parent
    return node.cache_salt if isinstance(node, _Root) else None


class PrefixTree:
    """Finds the longest cached prefix of a prompt. Looking up and adding a block take constant time each.

    ``num_tiers``: one more than the highest number of a tier. ``no_copies``: ``CachedBlock.copies`` of a block
    without a copy in any tier below the device. ``eviction_history``: the log of blocks that leave their last tier.
    ``owner_of``: returns the number of the owner of a cache salt; None: no owner has a budget.
    """

    def __init__(
        self, block_size: int, model_fingerprint: str = "", num_tiers: int = 1, eviction_history: LossLog | None = None
    ) -> None:
        self.eviction_history = eviction_history or LossLog()
        self.model_fingerprint = model_fingerprint
        self._key_bytes = block_size * _BYTES_PER_TOKEN
        self.no_copies = (NOWHERE,) * num_tiers
        self.owner_of: Callable[[str | None], int] | None = None
        self._roots: dict[str | None, _Root] = {}
        self.num_blocks = 0

    def root(self, cache_salt: str | None) -> CachedBlock:
        """The root of a cache salt, made if it is not there."""
        found = self._roots.get(cache_salt)
        if found is None:
            found = self._roots[cache_salt] = _Root(cache_salt, self.model_fingerprint, self.no_copies)
            if self.owner_of is not None:
                found.flags |= self.owner_of(cache_salt) << OWNER_SHIFT
        return found

    def root_of(self, cache_salt: str | None) -> CachedBlock | None:
        """The root of a cache salt; None if it has no cached block."""
        return self._roots.get(cache_salt)

    def root_hash(self, cache_salt: str | None) -> BlockHash:
        """Where the block hashes of a cache salt begin."""
        known = self._roots.get(cache_salt)
        return root_hash(self.model_fingerprint, cache_salt) if known is None else known.hash

    def unlink(self) -> None:
        """Take all nodes apart, when the tree is not used any more.

        Parents and children hold each other, so they would stay until a garbage collection, which is rare here.
        """
        nodes: list[CachedBlock] = list(self._roots.values())
        self._roots.clear()
        self.num_blocks = 0
        while nodes:
            node = nodes.pop()
            nodes += node.children.values()
            node.children.clear()
            node.parent = None

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self._key_bytes // _BYTES_PER_TOKEN

    def newest_salts(self) -> Iterator[str | None]:
        """The cache salts with cached blocks, the newest first."""
        return reversed(self._roots)

    @property
    def roots(self) -> list[CachedBlock]:
        """The roots of all cache salts with cached blocks."""
        return list(self._roots.values())

    def detached(
        self, cache_salt: str | None, path: list[CachedBlock], keys: Iterable[bytes], owner: RequestRef
    ) -> list[CachedBlock]:
        """Nodes that spell ``keys`` behind ``path``, and that the tree does not have. ``owner``: has asked for them."""
        known = self._roots.get(cache_salt) or _Root(cache_salt, self.model_fingerprint, self.no_copies)
        node, made = path[-1] if path else known, list[CachedBlock]()
        for key in keys:
            node = CachedBlock(node, key, self.no_copies)
            node.cached_by = owner
            made.append(node)
        return made

    @staticmethod
    def walk(node: CachedBlock | None, keys: Iterable[bytes]) -> list[CachedBlock]:
        """The blocks that spell ``keys`` below ``node``, in order, as far as the tree has them; None has none.

        ``keys``: the tokens of one block each (see ``block_keys``); they are asked for one by one, and none after the
        first that is not there.
        """
        path: list[CachedBlock] = []
        if node is None:
            return path
        for key in keys:
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def extend(self, node: CachedBlock, keys: Iterable[bytes]) -> list[CachedBlock]:
        """The blocks that spell ``keys`` below ``node``; missing ones are added."""
        path: list[CachedBlock] = []
        for key in keys:
            node = node.children.get(key) or self.add(node, key)
            path.append(node)
        return path

    def leaves(self) -> Iterator[tuple[str | None, CachedBlock]]:
        """Every block that none follows, and the cache salt that it belongs to."""
        for cache_salt, root in self._roots.items():
            below = list(root.children.values())
            for node in below:  # grows while it is walked
                below += node.children.values()
                if not node.children:
                    yield cache_salt, node

    @staticmethod
    def still_there(path: list[CachedBlock]) -> None:
        """Cut a path that ``walk`` returned once back to the blocks that are still cached."""
        while path and not path[-1].num_tiers:
            path.pop()

    def find_partial(self, node: CachedBlock, tokens: bytes) -> tuple[CachedBlock, int] | None:
        """The child of ``node`` on the device that shares the most of ``tokens`` (less than a block), and how many.

        Only the newest few children are looked at: a root may have thousands.
        """
        wanted, first = array("i", tokens[: self._key_bytes]), tokens[:_BYTES_PER_TOKEN]
        best, most = None, 0
        for child in islice(reversed(node.children.values()), _SIBLINGS_TRIED):
            if child.block < 0 or not child.tokens.startswith(first):
                continue
            shared = 0
            for mine, theirs in zip(wanted, array("i", child.tokens), strict=False):
                if mine != theirs:
                    break
                shared += 1
            if shared > most:
                best, most = child, shared
        return (best, most) if best is not None else None

    def add(self, parent: CachedBlock, tokens: bytes) -> CachedBlock:
        """A new node for ``tokens`` of one block after ``parent``; there must be none yet."""
        self.num_blocks += 1
        node = parent.children[tokens] = CachedBlock(parent, tokens, self.no_copies)
        if self.owner_of is not None:  # such an operation on a long int would take as long as the rest of this
            node.flags |= parent.flags & _OWNER
        return node

    def prune(self, node: CachedBlock) -> CachedBlock:
        """Remove ``node`` and the ancestors that lead to it alone, while no tier has them; returns the first that
        stays.

        A node without a tier that has children stays: they are of use once it is computed.
        """
        while not node.children and not node.num_tiers and node.parent is not None:
            self.remove(node)
            node = node.parent
        return node

    def remove(self, node: CachedBlock) -> None:
        """Take out a node without children; the root of a cache salt that holds nothing any more is forgotten."""
        assert not node.children
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        self.num_blocks -= 1
        if isinstance(parent, _Root) and not parent.children:
            self._roots.pop(parent.cache_salt, None)
