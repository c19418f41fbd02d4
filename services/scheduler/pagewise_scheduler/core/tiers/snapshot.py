"""One snapshot, its place among the other snapshots of its path, and its value."""

from math import log2

from pagewise_scheduler.core.memory.eviction import EvictionPolicy
from pagewise_scheduler.core.memory.eviction_roles import NUM_ROLES, Place, role
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

_BUCKETS = 64
"""Spans of what snapshots save for each page, in each of which it grows by the square root of two."""


class Snapshot:
    """A window at the end of the prefix of ``node``: ``blocks``, of which ``first`` is the number of the first one.

    ``points``: the nodes behind which a sequence can begin with it, ``node`` first; none: it was dropped. ``kind``,
    ``last_used``: as of ``CachedBlock``. ``counted``: the tick up to which it is counted how long its role was kept.
    ``before``: the snapshot before it on the way from the root, as far as known. Sequences begin with that behind
    ``since`` blocks, from which on everything would be computed again without this one. ``looked``: the snapshots that
    the pool had added when it was looked for. ``num_behind``: snapshots that it is before. ``num_uses``: sequences that
    have begun with it. ``is_new``: the sequence that took it on the device, or began with it there, has not ended;
    until then its class is not known, and it waits for no use. ``tail``: blocks from it to the end of the prompt that
    took it.
    """

    __slots__ = (
        "before",
        "blocks",
        "counted",
        "first",
        "is_new",
        "kind",
        "last_used",
        "looked",
        "node",
        "num_behind",
        "num_uses",
        "place",
        "points",
        "since",
        "tail",
    )

    def __init__(self, points: list[CachedBlock], first: int, blocks: list[int], place: Place = Place.PROMPT) -> None:
        self.node, self.points, self.first, self.blocks, self.place = points[0], points, first, blocks, place
        self.kind = self.node.kind
        self.tail = self.since = self.last_used = self.counted = self.num_behind = self.num_uses = 0
        self.before: Snapshot | None = None
        self.looked = -1
        self.is_new = True

    @property
    def role(self) -> int:
        """Its number in ``RoleHistory``."""
        return role(self.place, self.num_uses, followed=self.num_behind > 0)

    def living_before(self) -> "Snapshot | None":
        """The nearest of the snapshots that were before it, of which some may have been dropped."""
        before = self.before
        while before is not None and not before.points:
            before = before.before
        return before


class SnapshotValues:
    """Orders snapshots by a policy for blocks: a snapshot saves the blocks since the one before it, as often as
    sequences begin at it.

    Its own uses count, because its blocks are used by all that go on from later snapshots, too. The blocks since the
    one before it are of use with it alone if no snapshot is behind it: then their pages count beside its own.
    ``pages_per_block``: of the snapshot's blocks, and of the blocks of full layers.
    """

    def __init__(self, policy: EvictionPolicy, pages_per_block: tuple[int, int]) -> None:
        self._policy = policy
        self._own, self._full = pages_per_block

    def saved(self, snapshot: Snapshot) -> float:
        """The blocks that a use of a snapshot saves, for each page that goes with it."""
        blocks = snapshot.node.depth - snapshot.since
        pages = self._own * max(1, len(snapshot.blocks))
        return blocks / (pages if snapshot.num_behind else pages + self._full * blocks)

    def group(self, snapshot: Snapshot) -> int:
        """Snapshots of one class and role that save about as much."""
        if not self._policy.learns:
            return 0
        bucket = int(2 * log2(self.saved(snapshot))) + _BUCKETS // 2
        return (snapshot.kind * NUM_ROLES + snapshot.role) * _BUCKETS + min(max(bucket, 0), _BUCKETS - 1)

    def order(self, snapshot: Snapshot) -> float:
        """The tick of its last use."""
        return snapshot.last_used

    def value(self, snapshot: Snapshot) -> float:
        """The value of each of its pages, or its last use if the policy does not learn."""
        value = self._policy.value(snapshot.node, snapshot)
        if self._policy.learns:
            value *= self._policy.roles.share(snapshot.role) * self.saved(snapshot)
        return value
