"""The order in which snapshots are evicted. Snapshots of states are few and large, so each has its own value."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagewise_scheduler.core.memory.eviction import Evictable, EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.tiers.arena import Arena

if TYPE_CHECKING:
    from pagewise_scheduler.core.tiers.snapshots import Snapshot

_LEAST_BETWEEN_LOOKS, _SHARE_BETWEEN_LOOKS = 8, 8
"""Changes after which all snapshots are valued again: so many, and one in so many of the snapshots."""


class SnapshotValues:
    """Orders snapshots by a policy for blocks: a snapshot saves the blocks since the one before it, as it was
    used itself: its blocks were used by all that went on from later snapshots, too."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy

    def group(self, snapshot: "Snapshot") -> int:
        """Its prediction, or its class."""
        return (snapshot.prediction or snapshot.kind) if self._policy.learns else 0

    def order(self, snapshot: "Snapshot") -> float:
        """The tick of its last use."""
        return snapshot.last_used

    def value(self, snapshot: "Snapshot") -> float:
        """The value of the blocks that it saves."""
        saved = snapshot.node.depth - snapshot.since if self._policy.learns else 1
        return self._policy.value(snapshot.node, snapshot) * saved


@dataclass(slots=True)
class Inherited:
    """The class and the last use of a lost snapshot, which the snapshot before it has beside its own until a sequence
    begins with it: sequences that would have begun with the lost snapshot begin there."""

    kind: int
    last_used: int
    prediction: int = 0


class StateQueue:
    """The snapshots of one group of states in one tier, by the value of each page that goes with them.

    Values change with time and with the other snapshots of a path. One that has risen is noticed when its turn comes,
    one that has fallen when all are valued again. ``at``: the tier's snapshots; ``above``: those of the tier above.
    """

    def __init__(
        self,
        policy: EvictionPolicy,
        at: Mapping[CachedBlock, "Snapshot"],
        above: Mapping[CachedBlock, "Snapshot"],
        arena: Arena,
        pages_per_block: int,
    ) -> None:
        self._policy, self._at, self._arena, self._pages_per_block = policy, at, arena, pages_per_block
        self.above = above
        self._heap: list[tuple[float, int, Snapshot]] = []
        self._tie = 0
        self._until_look = _LEAST_BETWEEN_LOOKS

    def value(self, snapshot: "Snapshot") -> float:
        """The seconds that each page saves, per unit of time: those of computing from the snapshot before it on.

        If nothing is behind it, the blocks since then are of use with it alone, and their pages go with it. One that
        the tier above has, too, saves nothing.
        """
        node = snapshot.node
        if not self._policy.learns:
            return self._policy.value(node, snapshot)
        if node in self.above:
            return 0.0
        self._find_before(snapshot)
        saved, pages = node.depth - snapshot.since, self._pages_per_block
        if not node.children:
            pages += self._arena.members[0].pages_per_block * saved
        value = self._policy.value(node, snapshot)
        if snapshot.inherited is not None:
            value = max(value, self._policy.value(node, snapshot.inherited))
        return value * saved / pages

    def _find_before(self, snapshot: "Snapshot") -> None:
        """Look again for the snapshot before one, if another was added or that one has gone."""
        before = snapshot.before
        if snapshot.looked != self._tie or (before is not None and before not in self._at):
            before = next((one for one in ancestors(snapshot.node.parent) if one in self._at), None)
            snapshot.before, snapshot.looked = before, self._tie
            snapshot.since = before.depth if before is not None else 0

    def bequeath(self, snapshot: "Snapshot") -> None:
        """A snapshot is lost: sequences that would begin with it begin with the snapshot before it from now on.

        The earlier snapshot keeps its own class and last use beside the lost snapshot's, because the value of either
        class may be learned only later: if no prompt has the tokens of answers, the class of a lost snapshot at the end
        of an answer must not replace the class of the snapshot near the end of the prompt.
        """
        self._find_before(snapshot)
        if not self._policy.learns or snapshot.before is None:
            return
        heir = self._at[snapshot.before]
        lives: list[Evictable] = [snapshot]
        lives += [one for one in (snapshot.inherited, heir.inherited) if one is not None]
        most = max(lives, key=lambda one: self._policy.value(heir.node, one))
        heir.inherited = Inherited(most.kind, most.last_used, most.prediction)
        self.push(heir)

    def push(self, snapshot: "Snapshot", rank: int = 0) -> None:
        """A snapshot was added, or used. Its ``rank`` does not matter."""
        self._tie += 1
        snapshot.entry = self._tie
        heapq.heappush(self._heap, (self.value(snapshot), self._tie, snapshot))
        self._changed()

    def pop(self) -> "Snapshot | None":
        """Take the snapshot that goes first; None: there is none."""
        if (snapshot := self.peek()) is not None:
            heapq.heappop(self._heap)
            self._changed()
        return snapshot

    def peek(self) -> "Snapshot | None":
        """The snapshot that goes first, left where it is."""
        while self._heap:
            known, tie, snapshot = self._heap[0]
            if not self._is_live(tie, snapshot):
                heapq.heappop(self._heap)
            elif (value := self.value(snapshot)) > known:
                heapq.heapreplace(self._heap, (value, tie, snapshot))
            else:
                return snapshot
        return None

    def _changed(self) -> None:
        self._until_look -= 1
        if not self._until_look:
            live = [(tie, one) for _, tie, one in self._heap if self._is_live(tie, one)]
            self._heap = [(self.value(one), tie, one) for tie, one in live]
            heapq.heapify(self._heap)
            self._until_look = _LEAST_BETWEEN_LOOKS + len(live) // _SHARE_BETWEEN_LOOKS

    @staticmethod
    def _is_live(tie: int, snapshot: "Snapshot") -> bool:
        return bool(snapshot.points) and snapshot.entry == tie

    def shrink(self, num_evictable: int) -> None:
        """Do nothing: stale entries go when all snapshots are valued."""
