"""Budgets of memory of API keys, and the message with the budgets of a disk cache."""

from pagewise_shared.protocol.base import Message, Piece


class MemorySize(Piece, frozen=True):
    """An amount of a tier's memory: ``bytes``, or a ``share`` of it, 0 to 1. One of them is 0."""

    bytes: int = 0
    share: float = 0.0


class MemoryBudget(Piece, frozen=True):
    """The budget of cached KV in one tier of each executor, or in a disk cache, of an API key or of a group that shares
    its cache.

    Fields:
        tier: number of a tier with ids, or of the disk cache.
        min: while the key uses at most this size, none of its blocks is evicted. low: while the key uses at most this
            size, blocks of other keys are evicted first. high: while the key uses more than this size, its blocks are
            evicted first; None: no bound.
    """

    tier: int
    min: MemorySize = MemorySize()
    low: MemorySize = MemorySize()
    high: MemorySize | None = None


class StoredBudget(Piece, frozen=True):
    """The budget of one owner of cached KV in a tier without ids. ``tag``: the ``salt_tag`` of the owner's name."""

    tag: bytes
    budget: MemoryBudget


class SetStoredBudgets(Message, frozen=True):
    """The budgets of all owners in one of ``HASH_TIERS`` from now on: the executor evicts by them."""

    epoch: int
    tier: int
    budgets: tuple[StoredBudget, ...] = ()
