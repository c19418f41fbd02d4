"""Lost blocks and snapshots, with the time and the requests: they explain to a later request why it found no prefix.

Nothing of this is content. A block is named by a *key*: a hash of its tokens and of all tokens before them, down
to its cache salt, which depends on the process's random hash seed and never leaves it. So only a request that has the
same tokens under the same salt finds a key.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan, nan
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

MOST_LOST = 65_536
"""Blocks that are remembered after they were lost."""
_MOST_AT_ONCE = 8_192
"""The most blocks that are noted when an executor is lost, the beginnings of prefixes first."""

_ONE_RUN_SECONDS = 1.0
ENDED = 1 << 16
"""The prediction of blocks that are not used again. Greater numbers predict a time; kinds of blocks are less."""

LossReason = Literal["evicted", "corrupt", "executor lost", "executor reset", "cache reset", "advice"]


@dataclass(slots=True, eq=False)
class RequestRef:
    """A request as it is remembered: its id, the name of its API key and of its adapter, and when it first ran, in
    seconds of the scheduler's clock, NaN until then."""

    request_id: str
    key: str = ""
    adapter: str = ""
    started: float = nan


@dataclass(slots=True, eq=False)
class LostRun:
    """Blocks of one request that were lost together: within a second, and for one other request.

    ``time``: when the first of them was, in seconds of the scheduler's clock. ``cached_by``: the request that
    computed them, if known. ``taker``: the first of the ``num_takers`` requests for whose blocks they were evicted.
    ``policy``: class of the eviction policy, "EndedSession": no use of them was predicted; ``price``: the value that it
    gave to the first of them. ``tier``: the last tier that had them. ``retaken``: if it is a snapshot, when one was
    taken again where it had been.
    ``place``: the number of blocks that its executor had evicted from their last tiers before the run.
    """

    time: float
    reason: LossReason
    cached_by: RequestRef | None
    taker: RequestRef | None
    num_takers: int
    policy: str
    price: float
    tier: int
    executor_id: str
    num_blocks: int = 0
    retaken: float = nan
    place: int = 0


class LostBlocks:
    """The last blocks that were lost, of all executors of a fleet: at most ``most``, and at least the last half of it.

    Two dictionaries, of which the older one is dropped as a whole: that takes no time per block.
    """

    def __init__(self, most: int = MOST_LOST) -> None:
        self._generation = most // 2
        self._new: dict[int, LostRun] = {}
        self._old: dict[int, LostRun] = {}

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def add(self, key: int, run: LostRun) -> None:
        """The block with this key was lost."""
        if len(self._new) >= self._generation:
            self._old, self._new = self._new, {}
        self._new[key] = run

    def find(self, key: int) -> LostRun | None:
        """How the block with this key was lost last; None: it was not, or too long ago."""
        return self._new.get(key) or self._old.get(key)


class LossLog:
    """Notes the lost blocks of one executor, and the requests that displaced them.

    ``lost``: the log, shared by all executors. ``now``: the time of the step that is being planned. ``taker``: the
    request for which blocks are being reserved now, or the first of ``num_takers`` requests. ``reason``: why snapshots
    are dropped now.

    The last evicted blocks are a ghost list: a larger memory would still hold them. ``num_evicted``: the number of
    blocks evicted from their last tiers so far. ``num_ghosts``: the number of the last evicted blocks that one GiB more
    would hold. ``spared``: by the name of the API key, the prompt tokens that would not have been computed if these
    ghosts were cached.
    """

    def __init__(self) -> None:
        self.lost = LostBlocks()
        self.executor_id = ""
        self.now = 0.0
        self.taker: RequestRef | None = None
        self.num_takers = 1
        self.reason: LossReason = "evicted"
        self._run: LostRun | None = None
        self.num_evicted = self.num_ghosts = self._num_before = 0
        self.spared = Counter[str]()

    def reserves_for(self, owner: RequestRef | None, count: int = 1) -> None:
        """Blocks are reserved for ``count`` requests from now on, of which ``owner`` is the first."""
        if owner is not self.taker:
            self._num_before = self.num_evicted
        self.taker, self.num_takers = owner, count

    def note(self, node: "CachedBlock", reason: LossReason, tier: int, policy: object, price: float) -> None:
        """No tier has the content of ``node`` any more."""
        run, taker = self._run, self.taker
        rule = "EndedSession" if node.prediction == ENDED else type(policy).__name__
        if (
            run is None
            or self.now - run.time > _ONE_RUN_SECONDS
            or run.cached_by is not node.cached_by
            or run.taker is not taker
            or run.reason != reason
            or run.tier != tier
            or run.policy != rule
        ):
            run = self._run = LostRun(
                self.now, reason, node.cached_by, taker, self.num_takers, rule, price, tier,
                self.executor_id, place=self.num_evicted,
            )  # fmt: skip
        run.num_blocks += 1
        self.num_evicted += reason == "evicted"
        self.lost.add(key_of(node), run)

    def count_spared(self, key: str, lost: Iterable[tuple[LostRun, int]], block_size: int) -> None:
        """Count the tokens of a prompt of an API key that the ghosts would have spared.

        ``lost``: the lost blocks behind the prompt's cached prefix, as runs with their numbers of tokens. The prompt's
        request is the last ``taker``: blocks that were evicted for it were cached when it came. The end of a prefix
        is evicted before its beginning, so the first blocks of a run were lost last.
        """
        for run, tokens in lost:
            if run.reason != "evicted" or run.executor_id != self.executor_id:
                break
            evicted_since = self._num_before - run.place - run.num_blocks
            spared = min(tokens, (self.num_ghosts - evicted_since) * block_size)
            if spared <= 0:
                break
            self.spared[key] += spared

    def note_snapshot(self, node: "CachedBlock", group: int, tier: int, policy: object) -> None:
        """No tier has the snapshot of a group of layers at the end of ``node`` any more."""
        run = LostRun(
            self.now, self.reason, node.cached_by, self.taker, self.num_takers, type(policy).__name__, nan, tier,
            self.executor_id,
        )  # fmt: skip
        self.lost.add(snapshot_key(key_of(node), group), run)

    def snapshot_taken(self, node: "CachedBlock", group: int) -> None:
        """The device has a snapshot of a group of layers at the end of ``node``."""
        run = self.lost.find(snapshot_key(key_of(node), group)) if len(self.lost) else None
        if run is not None and isnan(run.retaken):
            run.retaken = self.now

    def all_gone(self, roots: Iterable["CachedBlock"], reason: LossReason) -> None:
        """Everything in the tree is lost at once."""
        self.taker, runs = None, dict[RequestRef | None, LostRun]()
        nodes = [child for root in roots for child in root.children.values()]
        for node in nodes:  # grows while it is walked: beginnings come first
            if len(nodes) < _MOST_AT_ONCE:
                nodes += node.children.values()
            if not node.num_tiers:
                continue
            run = runs.get(node.cached_by)
            if run is None:
                run = runs[node.cached_by] = LostRun(
                    self.now, reason, node.cached_by, None, 0, "", nan, node.nearest_tier, self.executor_id
                )
            run.num_blocks += 1
            self.lost.add(key_of(node), run)


def root_key(cache_salt: str | None) -> int:
    """The key at which the prefixes of a cache salt begin."""
    return hash(("root", cache_salt)) or 1


def key_after(key: int, tokens: bytes) -> int:
    """The key of the block with these tokens (int32 bytes) behind a block or root with ``key``."""
    return hash((key, tokens)) or 1


def snapshot_key(key: int, group: int) -> int:
    """The key of the snapshot of a group of layers at the end of the block with ``key``."""
    return hash(("snapshot", key, group)) or 1


def key_of(node: "CachedBlock") -> int:
    """The key of a block. Computes the missing keys of its ancestors too, as ``hash_of`` does."""
    path: list[CachedBlock] = []
    current: CachedBlock | None = node
    while current is not None and not current.history_key:
        path.append(current)
        current = current.parent
    assert current is not None, "a root has its key from the beginning"
    known = current.history_key
    for below in reversed(path):
        known = below.history_key = hash((known, below.tokens)) or 1
    return known
