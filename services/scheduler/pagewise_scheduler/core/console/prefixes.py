"""The prefix tree of one executor: the sequences that share each prefix, the blocks saved, and the next evictions."""

import heapq
from itertools import count, islice

from pagewise_shared.protocol import tier_name, unpack_int32s
from pagewise_shared.reports import ExecutorPrefixes, NextEviction, PrefixRun
from pagewise_shared.segments import TOKEN_ID

from pagewise_scheduler.core.group_report import SnapshotFinder
from pagewise_scheduler.core.memory.eviction import CostAware, EvictionPolicy
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.scheduling.scheduler import Scheduler

MOST_RUNS, MOST_EVICTIONS = 64, 10
_MOST_CHILDREN = 64
"""Of the runs that follow one run, the last ones are looked at."""
_MOST_TOKENS = 64


class TreeWalk:
    """Walks a prefix tree along its most used runs, and looks at a bounded number of runs and blocks.

    ``truncated``: there are more. ``tails``: the run that ends with each block.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        most_runs: int,
        most_blocks: int,
        *,
        most_children: int = _MOST_CHILDREN,
        tokens: bool = False,
    ) -> None:
        self._pool = scheduler.kv.pool
        self._most_runs, self._most_children = most_runs, most_children
        self._lower = [tier.number for tier in scheduler.kv.pool.lower]
        self._snapshots = SnapshotFinder(scheduler.kv)
        self._tokens = tokens
        self._left = most_blocks
        self._numbers = count()
        self._heap: list[tuple[int, int, int, CachedBlock]] = []
        self.tails: dict[CachedBlock, PrefixRun] = {}
        self.truncated = False

    def runs(self) -> list[PrefixRun]:
        """Return the runs, each behind its parent."""
        found: list[PrefixRun] = []
        for root in self._pool.tree.roots[: self._most_children]:
            self._push(root, -1)
        while self._heap and len(found) < self._most_runs and self._left > 0:
            _, _, parent, node = heapq.heappop(self._heap)
            run, last = self._run(node, len(found), parent)
            found.append(run)
            self.tails[last] = run
            self._push(last, run.id)
        self.truncated |= bool(self._heap)
        return found

    def _push(self, node: CachedBlock, parent: int) -> None:
        self.truncated |= len(node.children) > self._most_children
        for child in islice(reversed(node.children.values()), self._most_children):
            heapq.heappush(self._heap, (-self._references(child), next(self._numbers), parent, child))

    def _references(self, node: CachedBlock) -> int:
        return self._pool.references(node.block) if node.block >= 0 else 0

    def _run(self, node: CachedBlock, number: int, parent: int) -> tuple[PrefixRun, CachedBlock]:
        run = PrefixRun(number, parent, node.depth, 0, {}, self._references(node), 0, 0)
        if self._tokens:
            run.token_ids = token_ids(node)[:_MOST_TOKENS]
        # Thousands of blocks are looked at for one console, so this loop does little for each.
        references, lower = self._pool.references, dict.fromkeys(self._lower, 0)
        snapshots = self._snapshots.at if self._snapshots.pools else None
        num_blocks = on_device = saved = 0
        while True:
            num_blocks += 1
            if (block := node.block) >= 0:
                on_device += 1
                if (held := references(block)) > 1:
                    saved += held - 1
            for tier in lower:
                lower[tier] += node.block_id(tier) >= 0
            if snapshots is not None:
                run.snapshots += snapshots(node)
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
    """Return the most used runs of the tree of an executor. ``most_blocks``: how many are looked at."""
    pool = scheduler.kv.pool
    walk = TreeWalk(scheduler, MOST_RUNS, most_blocks, tokens=tokens)
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
        [
            NextEviction(one.block, one.depth, pool.policy.value(one), probability(pool.policy, one))
            for one in evictions
        ],
        walk.truncated,
    )


def saved_blocks(scheduler: Scheduler) -> int:
    """Return how many blocks more the sequences of an executor would hold if they shared none.

    That is the number of references of block tables beyond one for each block.
    """
    held = sum(len(sequence.table.blocks) for request in scheduler.requests for sequence in request.sequences)
    return max(0, held - scheduler.kv.pool.num_in_use)


def probability(policy: EvictionPolicy, node: CachedBlock) -> float | None:
    """Return the probability that a block is used again, None if the policy does not estimate it."""
    return policy.probability(node) if isinstance(policy, CostAware) else None


def token_ids(node: CachedBlock) -> list[int]:
    """Return the tokens of a block, without the marks of segments."""
    return [token & TOKEN_ID for token in unpack_int32s(node.tokens)]
