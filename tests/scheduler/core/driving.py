"""Drives a scheduler and an executor that checks every read and write, and computes the expected results."""

from collections import deque
from itertools import chain, takewhile

from pagewise_scheduler.core.features.beams import BeamSearch
from pagewise_scheduler.core.memory.prefix_tree import NOWHERE, CachedBlock, hash_chain
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.pool import CACHED, FREE, IN_USE
from pagewise_shared.protocol import StepPlan, StepResult, decode_from_scheduler, encode

from tests.scheduler.core.checking_executor import CheckingExecutor, next_candidates, next_token


def expected_tokens(request: Request) -> list[int]:
    tokens = list(request.prompt_token_ids)
    for _ in range(request.max_tokens):
        tokens.append(next_token(tuple(tokens)))
        produced = len(tokens) - len(request.prompt_token_ids)
        if tokens[-1] in request.params.sampling.stop_token_ids and produced > request.params.sampling.min_tokens:
            break
    return tokens[len(request.prompt_token_ids) :]


def expected_beams(request: Request) -> list[list[int]]:
    """The result of the request's search without interruptions."""
    assert request.params.beam is not None
    search = BeamSearch(request.params.beam, frozenset(request.params.sampling.stop_token_ids), request.max_tokens)
    wanted = request.params.beam.num_candidates(len(request.params.sampling.stop_token_ids))
    prompt = tuple(request.prompt_token_ids)
    living: list[list[int]] = [[]]
    while True:
        going_on = search.advance(living, [next_candidates((*prompt, *tokens), wanted) for tokens in living])
        if going_on is None:
            return [ended.tokens for ended in search.ended[: request.params.n]]
        living = [[*living[one.parent], one.token] for one in going_on]


def executor_for(scheduler: Scheduler) -> CheckingExecutor:
    tiers = {number: tier.num_blocks for number, tier in scheduler.kv.tiers.items()}
    shape = scheduler.kv.shape if isinstance(scheduler.kv, GroupedKVCacheManager) else None
    host = scheduler.kv.host if isinstance(scheduler.kv, GroupedKVCacheManager) else None
    executor = CheckingExecutor(tiers, scheduler.kv.block_size, shape, host.arena.num_pages if host is not None else 0)
    executor.short_rope_len = scheduler.short_rope_len
    executor.in_flight = lambda: {step.step for step in scheduler.steps_in_flight}
    return executor


def num_stored(scheduler: Scheduler, executor: CheckingExecutor, request: Request) -> int:
    """How many blocks of the request lie in the storage of the executor, from the beginning on, up to a place where the
    windows lie there too."""
    tokens = request.sequences[0].token_bytes() if request.sequences else request.prompt_token_ids.tobytes()
    root = scheduler.kv.pool.tree.root_hash(request.params.cache_salt)
    names = hash_chain(root, tokens, 4 * scheduler.kv.block_size)
    count = len(list(takewhile(lambda name: name in executor.storage, names)))

    def has_windows(end: int) -> bool:
        needed = ((one.number, one.first_needed(end * one.block_size)) for one in scheduler.kv.windows)
        return all((name, group) in executor.stored_windows for group, first in needed for name in names[first:end])

    return next((end for end in range(count, 0, -1) if has_windows(end)), 0)


def run(scheduler: Scheduler, executor: CheckingExecutor, *, depth: int = 2, limit: int = 10_000) -> int:
    """Drive to the end with ``depth`` steps in flight; returns the number of steps."""
    results: deque[StepResult] = deque()
    for steps in range(limit):
        while scheduler.num_in_flight < depth and (plan := scheduler.schedule(now=0.0)) is not None:
            decoded = decode_from_scheduler(encode(plan))
            assert isinstance(decoded, StepPlan)
            results.append(executor.execute(decoded))
        copied = executor.finish_copies()
        for message in copied:
            scheduler.copied(message)
        if copied and not results:
            continue
        if not results:
            assert scheduler.num_running == scheduler.num_waiting == 0
            return steps
        scheduler.update(results.popleft())
    raise AssertionError(f"not done after {limit} steps")


def num_loading(scheduler: Scheduler) -> int:
    """Blocks of layers that see all tokens which are on their way to the device."""
    under_way = chain.from_iterable(scheduler.recoveries.transfers._under_way.values())
    return sum(one.load.num_blocks for one in under_way if one.load is not None and not one.copies.group)


def assert_all_free(scheduler: Scheduler) -> None:
    assert scheduler.kv.num_retiring == 0
    assert scheduler.kv.pool.num_in_use == scheduler.kv.num_in_use == 0
    assert all(group.num_used == group.num_cached for group in scheduler.kv.windows)
    assert scheduler.requests == []


def check_states(pool: BlockPool) -> None:
    """Every block is free, cached or in use; known content is connected, and no block depends on an evictable one."""
    everything = every_node(pool)
    assert len(everything) == pool.tree.num_blocks
    for tier in (pool, *pool.lower):
        assert tier.num_free + tier.num_cached + tier.num_in_use == tier.num_blocks
        states = [tier.states.count(state) for state in (FREE, CACHED, IN_USE)]
        assert states == [tier.num_free, tier.num_cached, tier.num_in_use]
        for block in range(tier.num_blocks):
            assert (tier.states[block] == IN_USE) == (tier.references(block) > 0)
            assert tier.states[block] != FREE or tier.node(block) is None
        here = [node for node in everything if node.block_id(tier.number) >= 0]
        assert all(tier.node(node.block_id(tier.number)) is node for node in here)
        assert len(here) == sum(tier.node(block) is not None for block in range(tier.num_blocks))
        unused = [node for node in here if not tier.references(node.block_id(tier.number))]
        assert len(unused) == tier.num_cached - len(tier.recoverable)
        if tier is not pool:
            assert len(here) == tier.num_used - len(tier.recoverable)
    nowhere = [node for node in everything if node.nearest_tier == NOWHERE]
    assert all(any(below.nearest_tier != NOWHERE for below in nodes_below(node)) for node in nowhere)
    for node in everything:
        parent, block = node.parent, node.block
        assert parent is not None
        assert parent.children[node.tokens] is node
        if parent.depth and block >= 0:
            assert pool.node(parent.block) is parent
            assert pool.references(parent.block) >= min(1, pool.references(block))


def nodes_below(node: CachedBlock) -> list[CachedBlock]:
    return [found for child in node.children.values() for found in (child, *nodes_below(child))]


def every_node(pool: BlockPool) -> list[CachedBlock]:
    return [node for root in pool.tree.roots for node in nodes_below(root)]
