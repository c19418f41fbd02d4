"""The prefix tree of one executor: what is shared by how many, what that saves, and what is evicted next and why."""

import heapq
from itertools import count, islice

from msgspec import Struct
from pagewise_shared.protocol import tier_name, unpack_int32s
from pagewise_shared.segments import TOKEN_ID

from pagewise_scheduler.core.memory.eviction import CostAware, EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler

MOST_RUNS, MOST_EVICTIONS = 64, 10
_MOST_CHILDREN = 64
"""Of the runs that follow one run, those that came last are looked at."""
_MOST_TOKENS = 64


class PrefixRun(Struct, omit_defaults=True):
    """A run of the tree: blocks that follow one another without a fork, the first at ``depth``.

    Fields:
        parent: index of the run before it, -1: it begins a prompt.
        tiers: how many of its blocks lie in each tier. references: sequences that hold its first block now.
        saved_blocks: blocks that sharing it saves now. forks: runs that follow.
        price: the worth of its last block to eviction, as in ``NextEviction``; absent: it cannot go now.
        next_evicted: its place among the next evictions, from 1 on.
        token_ids: its first tokens, if they may be shown.
    """

    id: int
    parent: int
    depth: int
    num_blocks: int
    tiers: dict[str, int]
    references: int
    saved_blocks: int
    forks: int
    price: float | None = None
    next_evicted: int | None = None
    token_ids: list[int] | None = None


class NextEviction(Struct):
    """A block that gives way when the next blocks are needed. ``price``: its worth to the policy; the
    block with the lowest one goes first. ``why``: the same in words."""

    block: int
    depth: int
    price: float
    why: str


class ExecutorPrefixes(Struct):
    """The prefix tree of an executor. ``truncated``: there are more runs, or blocks in them, than were looked at."""

    executor_id: str
    runs: list[PrefixRun]
    tree_blocks: int
    saved_blocks: int
    saved_bytes: int
    next_evictions: list[NextEviction]
    truncated: bool


class PrefixesFrame(Struct):
    """The trees of all executors that were asked for."""

    executors: list[ExecutorPrefixes]


class _Walk:
    """Walks a tree along its most used runs, and looks at a bounded number of blocks."""

    def __init__(self, scheduler: Scheduler, most_blocks: int, *, tokens: bool) -> None:
        self._pool = scheduler.kv.pool
        self._lower = [tier.number for tier in scheduler.kv.pool.lower]
        self._tokens = tokens
        self._left = most_blocks
        self._numbers = count()
        self._heap: list[tuple[int, int, int, CachedBlock]] = []
        self.tails: dict[CachedBlock, PrefixRun] = {}
        self.truncated = False

    def runs(self) -> list[PrefixRun]:
        found: list[PrefixRun] = []
        for root in self._pool.tree.roots[:_MOST_CHILDREN]:
            self._push(root, -1)
        while self._heap and len(found) < MOST_RUNS and self._left > 0:
            _, _, parent, node = heapq.heappop(self._heap)
            run, last = self._run(node, len(found), parent)
            found.append(run)
            self.tails[last] = run
            self._push(last, run.id)
        self.truncated |= bool(self._heap)
        return found

    def _push(self, node: CachedBlock, parent: int) -> None:
        self.truncated |= len(node.children) > _MOST_CHILDREN
        for child in islice(reversed(node.children.values()), _MOST_CHILDREN):
            heapq.heappush(self._heap, (-self._references(child), next(self._numbers), parent, child))

    def _references(self, node: CachedBlock) -> int:
        return self._pool.references(node.block) if node.block >= 0 else 0

    def _run(self, node: CachedBlock, number: int, parent: int) -> tuple[PrefixRun, CachedBlock]:
        run = PrefixRun(number, parent, node.depth, 0, {}, self._references(node), 0, 0)
        if self._tokens:
            run.token_ids = token_ids(node)[:_MOST_TOKENS]
        # Thousands of blocks are looked at for one console, so this loop does little for each.
        references, lower = self._pool.references, dict.fromkeys(self._lower, 0)
        num_blocks = on_device = saved = 0
        while True:
            num_blocks += 1
            if (block := node.block) >= 0:
                on_device += 1
                if (held := references(block)) > 1:
                    saved += held - 1
            for tier in lower:
                lower[tier] += node.block_id(tier) >= 0
            if len(node.children) != 1 or num_blocks >= self._left:
                break
            (node,) = node.children.values()
        self._left -= num_blocks
        run.num_blocks, run.saved_blocks = num_blocks, saved
        self.truncated |= self._left <= 0
        here = {self._pool.number: on_device} | lower
        run.tiers = {tier_name(tier): blocks for tier, blocks in here.items() if blocks}
        run.forks = len(node.children)
        return run, node


def executor_prefixes(
    executor_id: str, scheduler: Scheduler, bytes_per_block: int, most_blocks: int, *, tokens: bool
) -> ExecutorPrefixes:
    """The most used runs of the tree of an executor. ``most_blocks``: how many may be looked at."""
    pool = scheduler.kv.pool
    walk = _Walk(scheduler, most_blocks, tokens=tokens)
    runs = walk.runs()
    evictions = pool.next_evictions(MOST_EVICTIONS)
    for place, node in enumerate(evictions, 1):
        if (run := walk.tails.get(node)) is not None:
            run.next_evicted = place
    for node, run in walk.tails.items():
        if node.block >= 0 and not node.num_on_device and not pool.references(node.block):
            run.price = pool.policy.value(node)
    saved = saved_blocks(scheduler)
    return ExecutorPrefixes(
        executor_id,
        runs,
        pool.tree.num_blocks,
        saved,
        saved * bytes_per_block,
        [NextEviction(node.block, node.depth, pool.policy.value(node), why(pool.policy, node)) for node in evictions],
        walk.truncated,
    )


def saved_blocks(scheduler: Scheduler) -> int:
    """How many blocks more the sequences of an executor would hold if they shared none.

    That is the number of references of block tables beyond one for each block.
    """
    held = sum(len(sequence.table.blocks) for request in scheduler.requests for sequence in request.sequences)
    return max(0, held - scheduler.kv.pool.num_in_use)


def why(policy: EvictionPolicy, node: CachedBlock) -> str:
    """The reason for the worth of a block that may be evicted."""
    if isinstance(policy, CostAware):
        saved = 1e6 * policy.value(node)
        return (
            f"it is used again with a probability of {policy.probability(node):.0%}, and keeping it saves {saved:.3g} "
            "microseconds of recovery for each block that comes in: less than keeping another one"
        )
    return "it has not been used for the longest time"


def token_ids(node: CachedBlock) -> list[int]:
    """The tokens of a block, without the marks of segments."""
    return [token & TOKEN_ID for token in unpack_int32s(node.tokens)]
