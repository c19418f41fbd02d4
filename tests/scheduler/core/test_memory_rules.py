"""The memory rules under random interleavings of everything that can happen, against an executor that checks all of it.

The model is ``CheckingExecutor``: dictionaries that know which prefix every slot holds. Whatever the interleaving, each
request gets the tokens it would get alone, every block is in one state, references add up, and nothing leaks.
"""

import gc
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from pagewise_scheduler.core.memory import use_history
from pagewise_scheduler.core.memory.budgets import Budget, TierBudgets
from pagewise_scheduler.core.memory.eviction_history import LostBlocks
from pagewise_scheduler.core.memory.prefix_tree import OWNER_SHIFT, CachedBlock, cache_salt_of, hash_of
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.cache_reset import reset_cache
from pagewise_scheduler.core.tiers.memory_budgets import MemoryBudgets
from pagewise_scheduler.core.tiers.pool import CACHED
from pagewise_scheduler.server.kv_events import AllBlocksCleared, BlockStored, ExecutorEvents
from pagewise_shared.block_hash import ONE_ROPE, is_below
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import DEVICE, HOST, StepResult
from pagewise_shared.sampling import BeamParams
from pagewise_shared.segments import ALL_BEFORE, make_segments, mark_segments

from tests.core_requests import change
from tests.scheduler.core import checking_executor
from tests.scheduler.core.arenas import check_arena
from tests.scheduler.core.builders import create_request, create_scheduler, evict
from tests.scheduler.core.checking_executor import next_candidates
from tests.scheduler.core.driving import (
    assert_all_free,
    check_states,
    executor_for,
    expected_beams,
    expected_tokens,
    num_loading,
    run,
)
from tests.scheduler.core.rules import check_rules

DOCUMENTS = [[1, 2, 1, 1, 2], [2, 2], [1, 1, 1, 2, 2, 1, 2, 2, 1]]


class MemoryRules(RuleBasedStateMachine):
    """One scheduler and one executor, with everything in between left to chance."""

    speculative: SpeculativeConfig | None = None
    max_proposed = 0
    short_rope_len = ONE_ROPE
    has_segments = True

    def shape(self, num_blocks: int, budget: int) -> ArenaShape | None:
        """The groups of layers."""
        return None

    @initialize(
        block_size=st.integers(1, 5),
        num_blocks=st.integers(6, 30),
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(1, 20),
        num_host_blocks=st.sampled_from([0, 1, 5, 20, 60]),
        num_further_blocks=st.sampled_from([0, 0, 1, 7, 40]),
        max_arriving=st.sampled_from([0, 2, 1000]),
        recovery=st.sampled_from(["auto", "swap", "recompute", "both"]),
        eviction=st.sampled_from(["lru", "cost"]),
        early_loads=st.booleans(),
    )
    def start(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        num_host_blocks: int,
        num_further_blocks: int,
        max_arriving: int,
        recovery: str,
        eviction: str,
        early_loads: bool,
    ) -> None:
        shape = self.shape(num_blocks, budget)
        self.create: Callable[[], Scheduler] = lambda: create_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            num_host_blocks=num_host_blocks * (shape.num_pages // num_blocks if shape is not None else 1),
            num_further_blocks=num_further_blocks if shape is None else 0,
            recovery=recovery,  # type: ignore[arg-type]
            eviction=eviction,  # type: ignore[arg-type]
            speculative=self.speculative,
            max_proposed=self.max_proposed,
            short_rope_len=self.short_rope_len,
            shape=shape,
        )
        self.scheduler = self._watched()
        for tier in self.scheduler.kv.pool.lower:
            tier.max_arriving = max_arriving
        self.executor = executor_for(self.scheduler)
        self.executor.early_loads = early_loads
        self.results: deque[StepResult] = deque()
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.epoch = 1

    @rule(
        # Two kinds of tokens and a common beginning: prefixes are found all the time, often ending inside a block.
        head=st.sampled_from([0, 0, 3, 9]),
        tail=st.lists(st.integers(1, 2), min_size=1, max_size=14),
        max_tokens=st.integers(0, 14),
        n=st.integers(1, 3),
        priority=st.sampled_from([0, 0, 0, 1]),
        salt=st.sampled_from([None, None, "tenant"]),
        kind=st.sampled_from(["plain", "plain", "beam"]),
        wider=st.integers(0, 2),
        ends=st.booleans(),
        documents=st.lists(st.sampled_from(DOCUMENTS), max_size=3),
        gap=st.integers(0, 2),
        root=st.sampled_from([ALL_BEFORE, ALL_BEFORE, 0, 2]),
        boundary=st.sampled_from([0, 0, 1, 4]),
    )
    def admit(
        self,
        head: int,
        tail: list[int],
        max_tokens: int,
        n: int,
        priority: int,
        salt: str | None,
        kind: str,
        wider: int,
        ends: bool,
        documents: list[list[int]],
        gap: int,
        root: int,
        boundary: int,
    ) -> None:
        prompt, ranges = [*range(head)], []
        for document in documents if self.has_segments else []:
            ranges.append((len(prompt), len(prompt) + len(document)))
            prompt += [*document, *[1] * gap]
        request = create_request(prompt=[*prompt, *tail], max_tokens=max_tokens, n=n, priority=priority)
        root = min(root, ranges[0][0] if ranges else 0)
        request.segments = make_segments(len(request.prompt_token_ids), ranges, root=root, boundary=boundary)
        mark_segments(request.prompt_token_ids, request.segments)
        change(request, cache_salt=salt)
        if kind == "beam" and max_tokens:
            change(request, beam=BeamParams(n + wider, float(wider % 2)))
            stops = [token for token, _ in next_candidates(tuple(request.prompt_token_ids), 2)] if ends else []
            change(request, sampling=msgspec.structs.replace(request.params.sampling, stop_token_ids=tuple(stops)))
        if self.scheduler.fits(len(request.prompt_token_ids), max_tokens, request.segments):
            self.scheduler.add(request)
            self.requests.append(request)

    def schedule(self) -> None:
        if self.scheduler.num_in_flight < 2 and (plan := self.scheduler.schedule(0.0)) is not None:
            self.results.append(self.executor.execute(plan))

    step = rule()(schedule)
    another_step = rule()(schedule)

    def take_result(self) -> None:
        if self.results:
            self.scheduler.update(self.results.popleft())

    result = rule()(take_result)
    another_result = rule()(take_result)

    @rule(count=st.integers(1, 3))
    def copies_arrive(self, count: int) -> None:
        for message in self.executor.finish_copies(count):
            self.scheduler.copied(message)

    @precondition(lambda self: self.executor.host)
    @rule(which=st.lists(st.integers(0, 60), max_size=4))
    def spoil(self, which: list[int]) -> None:
        held = sorted(self.executor.host)
        self.executor.spoil = {held[number % len(held)] for number in which}

    @precondition(lambda self: self.scheduler.running)
    @rule(which=st.integers(0, 10))
    def preempt(self, which: int) -> None:
        running = self.scheduler.running
        self.scheduler.preempt(running[which % len(running)], "chance")

    @rule(count=st.integers(1, 30))
    def blocks_are_taken(self, count: int) -> None:
        evict(self.scheduler, count)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        victim = self.requests[which % len(self.requests)]
        if self.scheduler.abort(victim.request_id):
            self.aborted.add(victim.request_id)

    @rule(salt=st.sampled_from(["", "tenant", "nobody"]), often=st.integers(0, 2))
    def cache_is_reset(self, salt: str, often: int) -> None:
        if often:
            return
        kv = self.scheduler.kv
        used = kv.num_total - kv.num_free
        outcome = reset_cache(kv, salt)
        assert used - (kv.num_total - kv.num_free) == outcome.released[DEVICE] >= 0
        roots = [root for root in kv.pool.tree.roots if is_below(cache_salt_of(root), salt)]
        assert (outcome.num_in_use > 0) == bool(roots)
        if not roots and not salt and not self.scheduler.requests:
            assert not kv.pool.tree.num_blocks

    @precondition(lambda self: self.scheduler.num_in_flight)
    @rule(fails=st.integers(0, 3))
    def step_fails(self, fails: int) -> None:
        if fails:
            return
        self.epoch += 1
        self.aborted |= {request.request_id for request in self.scheduler.fail(self.epoch)}
        self.results.clear()
        self.executor.reset()

    @rule(restarts=st.integers(0, 4), device_is_lost=st.booleans())
    def scheduler_restarts(self, restarts: int, device_is_lost: bool) -> None:
        """Another scheduler continues with the same requests, and expects the executor's blocks from before.

        ``device_is_lost``: it is the executor that was restarted, on the same host.
        """
        if restarts:
            return
        requests = self.scheduler.release_all()
        inventory = self.executor.inventory()
        self.executor.reset(keeps_blocks=True)
        self.results.clear()
        self.scheduler, self.epoch = self._watched(), 1
        if device_is_lost:
            self.executor.blocks.clear()
            for held in self.executor.windowed:
                held.clear()
            inventory = self.executor.inventory()
            self.executor.reset(keeps_blocks=True)
        self.scheduler.kv.expect(inventory)
        for request in requests:
            self.scheduler.add(request)

    def _watched(self) -> Scheduler:
        scheduler = self.create()
        self.told: dict[str, set[int]] = {"GPU": set(), "CPU": set()}
        self.events = ExecutorEvents(0, scheduler.kv.block_size, "full")
        scheduler.kv.watchers.append(self.events)
        return scheduler

    @invariant()
    def events_tell_the_cached_blocks(self) -> None:
        for event in self.events.take():
            assert not isinstance(event, AllBlocksCleared)
            told, blocks = self.told[event.medium], set(event.block_hashes)
            assert len(blocks) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not told & blocks, "a block is told of once"
                told |= blocks
            else:
                assert blocks <= told
                told -= blocks
        for medium, tier in (("GPU", self.scheduler.kv.pool), ("CPU", self.scheduler.kv.cache_tier(HOST))):
            nodes = filter(None, map(tier.node, range(tier.num_blocks))) if tier is not None else ()
            assert self.told[medium] == {int.from_bytes(hash_of(node)[-8:], "big") for node in nodes}

    @invariant()
    def memory_adds_up(self) -> None:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        check_states(pool)
        sequences = [
            sequence
            for request in (*scheduler.requests, *scheduler.features.segments.requests)
            for sequence in request.sequences
        ]
        tables = sum(len(sequence.table.blocks) for sequence in sequences)
        references = sum(pool.references(block) for block in range(pool.num_blocks))
        held = scheduler.features.segments.num_held
        retiring = sum(len(blocks) for _, blocks in scheduler.kv._retiring)
        assert references == retiring + tables + num_loading(scheduler) + held
        # A draft of a draft model has slots behind it in which the next one is made.
        most_drafted = self.speculative.num_speculative_tokens if self.speculative else 2 * self.max_proposed
        for sequence in sequences:
            # Known tokens, tokens that steps are drawing, and drafted tokens that were not drawn.
            coming = sequence.num_tokens + scheduler.num_in_flight + most_drafted
            assert sequence.table.num_slots - coming < scheduler.kv.block_size, "more than a block is empty"

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        while self.results:
            self.scheduler.update(self.results.popleft())
        run(self.scheduler, self.executor)
        for request in self.requests:
            aborted = request.request_id in self.aborted
            assert all(sequence.finished for sequence in request.sequences)
            if request.params.beam is not None:
                if not aborted:
                    assert [sequence.output_token_ids.tolist() for sequence in request.sequences] == expected_beams(
                        request
                    )
                continue
            expected = expected_tokens(request)
            assert len(request.sequences) == request.params.n or aborted
            for sequence in request.sequences:
                produced = sequence.output_token_ids.tolist()
                assert produced == (expected[: len(produced)] if aborted else expected)
        assert_all_free(self.scheduler)


@pytest.mark.timeout(300)
def test_the_memory_rules_hold_over_10_000_operations() -> None:
    check_rules(MemoryRules, 110)


class SpeculationRules(MemoryRules):
    """The same with drafts, of a model that repeats itself. Most kinds of requests have none; they run beside them."""

    speculative = SpeculativeConfig(
        num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1, disable_by_batch_size=3
    )


@pytest.mark.timeout(300)
def test_the_memory_rules_hold_with_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", True)
    check_rules(SpeculationRules, 110)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_memory_rules_hold_with_drafts_over_200_000_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", True)
    check_rules(SpeculationRules, 2200)


class ModelDraftRules(MemoryRules):
    """The same with a draft model of the executor, which is often right. With it there are no segments."""

    max_proposed, has_segments = 3, False


@pytest.mark.timeout(300)
def test_the_memory_rules_hold_with_a_draft_model() -> None:
    check_rules(ModelDraftRules, 30)


class LongRopeRules(MemoryRules):
    """The same with sequences that outgrow the short factors of LongRoPE; there are no segments then."""

    short_rope_len, has_segments = 12, False


class LongRopeSpeculationRules(LongRopeRules):
    speculative = SpeculationRules.speculative


@pytest.mark.parametrize("drafts", [False, True])
def test_the_memory_rules_hold_with_long_rope(drafts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", drafts)
    check_rules(LongRopeSpeculationRules if drafts else LongRopeRules, 40)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_memory_rules_hold_over_200_000_operations() -> None:
    check_rules(MemoryRules, 2200)


@pytest.mark.parametrize("segments", [False, pytest.param(True, marks=pytest.mark.long)])
def test_serving_for_ever_takes_no_more_memory(segments: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """New prompts, thousands of them: a scheduler forgets all facts about each of them again."""
    # The histories of lost blocks and of uses are bounded. These are full soon.
    monkeypatch.setattr(use_history, "_LEAST_REMEMBERED", 512)
    scheduler = create_scheduler(eviction="cost", num_host_blocks=32)
    scheduler.kv.eviction_history.lost = LostBlocks(most=16)
    executor = executor_for(scheduler)

    def serve(count: int) -> int:
        for _ in range(count // 50):
            for _ in range(50):
                request = create_request(prompt=6, max_tokens=2)
                request.segments = make_segments(6, [(1, 4)] if segments else [])
                mark_segments(request.prompt_token_ids, request.segments)
                scheduler.add(request)
            run(scheduler, executor)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = serve(2500)
        # Uses that are forgotten go in turns, one in 2000 requests.
        assert serve(2000) - before < 33_000
    finally:
        tracemalloc.stop()


class WindowRules(MemoryRules):
    """The memory rules with groups of windowed layers, and of states."""

    has_segments = False

    def shape(self, num_blocks: int, budget: int) -> ArenaShape:
        rng = random.Random(f"{num_blocks} {budget}")
        windows = tuple(
            WindowShape(2, rng.choice((1, 5)), state=True)
            if rng.random() < 0.5
            else WindowShape(rng.randrange(1, 9), rng.choice((1, 2, 5)), rng.random() < 0.3)
            for _ in range(rng.choice((1, 2)))
        )
        pages = rng.choice((1, 2, 5))
        return ArenaShape(
            num_blocks * (pages + sum(one.pages_per_block for one in windows)), pages, windows, 2 * budget
        )

    @invariant()
    def arena_adds_up(self) -> None:
        check_arena(self.scheduler)


class WindowSpeculationRules(WindowRules):
    speculative = SpeculationRules.speculative


class WindowModelDraftRules(WindowRules):
    max_proposed = ModelDraftRules.max_proposed


@pytest.mark.parametrize(
    ("rules", "examples"), [(WindowRules, 60), (WindowSpeculationRules, 60), (WindowModelDraftRules, 20)]
)
def test_the_memory_rules_hold_with_windows(
    rules: type[WindowRules], examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking_executor, "repeats_itself", rules is WindowSpeculationRules)
    check_rules(rules, examples)


def owner_of(cache_salt: str | None) -> str:
    return cache_salt or "nobody"


def _checked(budgets: TierBudgets, pop: Callable[[], CachedBlock | None]) -> Callable[[], CachedBlock | None]:
    def checked() -> CachedBlock | None:
        before = [(use.used, use.cached) for use in budgets.uses]
        node = pop()
        if node is not None:
            number = node.flags >> OWNER_SHIFT
            used, cached = before[number]
            assert cached > 0
            assert used > budgets.uses[number].budget.min or number == budgets.taker
        return node

    return checked


class BudgetRules(MemoryRules):
    """The memory rules with budgets that change while requests run."""

    wanted: dict[str, dict[int, Budget]]

    def _watched(self) -> Scheduler:
        scheduler = super()._watched()
        self.memory = MemoryBudgets(scheduler.kv, owner_of, scheduler.kv.capacity_tokens // 2)
        assert self.memory.try_set(getattr(self, "wanted", {}), 0)
        self._check_pops(scheduler)
        return scheduler

    def _check_pops(self, scheduler: Scheduler) -> None:
        for tier in scheduler.kv.tiers.values():
            assert tier.budgets is not None
            tier.budgets.pop = _checked(tier.budgets, tier.budgets.pop)  # type: ignore[method-assign]

    @rule(
        owner=st.sampled_from(["tenant", "nobody"]),
        tier=st.sampled_from([DEVICE, HOST]),
        least=st.integers(0, 15),
        low=st.integers(0, 20),
        high=st.none() | st.integers(0, 20),
    )
    def budget_changes(self, owner: str, tier: int, least: int, low: int, high: int | None) -> None:
        scheduler, before = self.scheduler, getattr(self, "wanted", {})
        wanted = {**before, owner: {**before.get(owner, {}), tier: Budget(least, low, high)}}
        slots = [
            max(len(one.prompt_token_ids), len(one.prompt_token_ids) + one.max_tokens - 1)
            + (scheduler.features.segments.num_slots(one.segments) if one.segments else 0)
            for one in scheduler.requests
        ]
        owed = scheduler.prefilling.blocks_owed() + scheduler.num_running
        if max(slots, default=0) <= self.memory.capacity_of(wanted) and self.memory.try_set(wanted, owed):
            self.wanted = wanted

    def step_fails(self, fails: int) -> None: ...

    @invariant()
    def uses_add_up(self) -> None:
        for tier in self.scheduler.kv.tiers.values():
            budgets = tier.budgets
            assert budgets is not None
            cached, in_use = Counter[int](), Counter[int]()
            for block in range(tier.num_blocks):
                if (node := tier.node(block)) is not None:
                    number = self.memory._number_of(cache_salt_of(node))
                    assert node.flags >> OWNER_SHIFT == number
                    (cached if tier.states[block] == CACHED else in_use)[number] += 1
            for number, use in enumerate(budgets.uses):
                assert (use.cached, use.in_use) == (cached[number], in_use[number])
                assert use.protected == max(0, min(use.cached, use.budget.min - use.in_use))
            assert budgets.num_protected == sum(use.protected for use in budgets.uses)
            assert tier.num_available >= tier.num_free


@pytest.mark.timeout(300)
def test_the_memory_rules_hold_with_budgets() -> None:
    check_rules(BudgetRules, 60)
