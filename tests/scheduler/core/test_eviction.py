"""Uses that eviction learns from, and the blocks that it evicts first."""

import random
from collections.abc import Iterable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.memory import use_history
from pagewise_scheduler.core.memory.eviction import (
    NEAREST,
    PREEMPTED,
    REDUNDANT,
    RETAINED_MINUTES,
    TOOL_CALL,
    Evictable,
    LeastRecentlyUsed,
    ending,
)
from pagewise_scheduler.core.memory.eviction_queue import EvictionQueue
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree
from pagewise_scheduler.core.memory.roles import NUM_CLASSES
from pagewise_scheduler.core.memory.use_history import UseHistory

from tests.scheduler.core.builders import create_request, create_scheduler
from tests.scheduler.core.driving import executor_for, run


def a_block(tree: PrefixTree, number: int) -> CachedBlock:
    return tree.add(tree.root(None), number.to_bytes(4, "little"))


class Tables:
    """Counts the same as ``UseHistory``, the slow way: from the list of all uses."""

    def __init__(self, history: UseHistory) -> None:
        self._history = history
        self._uses: list[tuple[int, int, int]] = []  # when, block, class

    def used(self, blocks: list[CachedBlock]) -> None:
        for block in blocks:
            self._history.used([block], ending(9))
            self._uses.append((self._history.now, id(block), block.kind))

    def of(self, kind: int) -> tuple[list[int], list[int]]:
        """How many have reached each span, and how many were used again in it."""
        bounds = [0.0, *use_history._BOUNDS]
        reached, returned = [0] * use_history._SPANS, [0] * use_history._SPANS
        for number, (begin, block, its_kind) in enumerate(self._uses):
            if its_kind != kind:
                continue
            again = next((when for when, other, _ in self._uses[number + 1 :] if other == block), None)
            lived = (self._history.now if again is None else again) - begin
            spans = [span for span, bound in enumerate(bounds[: use_history._SPANS]) if bound <= lived]
            for span in spans:
                reached[span] += 1
            if again is not None:
                returned[spans[-1]] += 1
        return reached, returned


@given(st.lists(st.one_of(st.integers(0, 40), st.none()), min_size=1, max_size=400))
def test_a_life_table_says_who_reached_an_age_and_who_was_used_in_it(uses: list[int | None]) -> None:
    tree, history, fresh = PrefixTree(1), UseHistory(), 1000
    tables, known = Tables(history), {number: a_block(tree, number) for number in range(41)}
    for use in uses:
        if use is None:  # time passes: blocks without a next use
            for _ in range(50):
                tables.used([a_block(tree, fresh := fresh + 1)])
        else:
            tables.used([known[use]])
    history._learn()
    for kind in range(1, NUM_CLASSES):
        assert (history._reached[kind], history._returned[kind]) == tables.of(kind)


@given(st.lists(st.floats(0, 1), min_size=use_history._SPANS, max_size=use_history._SPANS))
def test_a_density_is_that_of_the_best_time_to_wait(rates: list[float]) -> None:
    found = use_history.gittins_densities(rates, use_history._WIDTHS)
    for begin in range(use_history._SPANS):
        uses = time = best = 0.0
        alive = 1.0
        for rate, width in zip(rates[begin:], use_history._WIDTHS[begin:], strict=True):
            bounded = min(rate, 0.999)
            uses += alive * bounded
            time += alive * width * (1 - bounded / 2)
            alive *= 1 - bounded
            best = max(best, uses / time)
        assert found[begin] == pytest.approx(best, rel=1e-6, abs=1e-200)


def test_before_anything_is_known_the_older_block_is_worth_less() -> None:
    history = UseHistory()
    history.now = 1 << 22
    ages = [0, 100, 1000, 10_000, 1_000_000]
    worths = [history.density(0, history.now - age) for age in ages]
    assert all(younger > older for younger, older in pairwise(worths))


def test_how_a_use_ended_is_told_by_what_says_the_most() -> None:
    assert [ending(length) for length in (0, 1, 2, 7, 8, 100_000)] == [0, 0, 1, 1, 2, 6]
    assert ending(9, tool_call=True, priority=1) == TOOL_CALL
    assert ending(9, retention=60, tool_call=True) == RETAINED_MINUTES
    kinds = [ending(9, retention=seconds) for seconds in (1, 3600, 86400)]
    assert len({*kinds, ending(9, priority=1), ending(9), TOOL_CALL, PREEMPTED}) == 7


@given(st.sampled_from([PREEMPTED, TOOL_CALL, RETAINED_MINUTES]), st.booleans())
def test_an_announced_return_counts_until_it_does_not_come(announced: int, comes: bool) -> None:
    tree, history = PrefixTree(1), UseHistory()
    told, others = a_block(tree, 0), a_block(tree, 1)
    history.used([told], announced)
    history.used([others], ending(9))

    def worths() -> tuple[float, float]:
        return history.density(told.kind, history.now - 50), history.density(others.kind, history.now - 50)

    mine, theirs = worths()
    assert mine > theirs, "what is announced is believed"
    blocks = [a_block(tree, number) for number in range(2, 4000)]
    for number, block in enumerate(blocks):
        history.used([block], announced if number % 2 else ending(9))
        if number >= 100 and (comes if number % 2 else not comes):
            history.used([blocks[number - 100]], announced if number % 2 else ending(9))
    history._learn()
    mine, theirs = worths()
    assert (mine > theirs) == comes, "what was seen counts more"


def test_what_is_remembered_is_bounded() -> None:
    tree, history = PrefixTree(1), UseHistory()
    history.serve(64)
    often = a_block(tree, 0)
    for number in range(1, 30_000):
        history.used([a_block(tree, number)], ending(9))
        for _ in range(3):
            history.used([often], ending(9))
    most = use_history._LEAST_REMEMBERED + use_history._MOST_BETWEEN_LESSONS
    assert len(history._remembered) <= most
    assert len(history._times) == len(history._classes) <= use_history._MOST_USES_KEPT * most


class Fixed:
    """A policy whose groups, orders and values are given by the tokens of a block."""

    learns = False

    def __init__(self, of: dict[bytes, tuple[int, float, float]]) -> None:
        self._of, self._tick = of, 0

    def tick(self) -> int:
        self._tick += 1
        return self._tick

    def group(self, block: CachedBlock) -> int:
        return self._of[block.tokens][0]

    def order(self, block: CachedBlock) -> float:
        return self._of[block.tokens][1]

    def value(self, block: CachedBlock, use: Evictable | None = None) -> float:
        return self._of[block.tokens][2]

    def probability(self, block: CachedBlock) -> float:
        return 0.5

    def used(self, blocks: Iterable[CachedBlock], output_tokens: int) -> None: ...


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_the_group_whose_first_block_is_worth_the_least_gives_it_up(rng: random.Random, count: int) -> None:
    tree = PrefixTree(1)
    blocks = [a_block(tree, number) for number in range(count)]
    of = {block.tokens: (rng.randrange(4), rng.random(), rng.random()) for block in blocks}
    ranks = {id(block): rng.choice([REDUNDANT, NEAREST]) for block in blocks}
    queue = EvictionQueue(Fixed(of), lambda block: ranks.get(id(block)))
    for block in sorted(blocks, key=lambda block: of[block.tokens][1]):
        queue.push(block, ranks[id(block)])
    for block in rng.sample(blocks, count // 3):
        del ranks[id(block)]  # in use again
    queue.shrink(rng.choice([count, 0]))
    queue._look_at_all()  # as it does now and then: the first block represents a group, until it is found in use
    waiting = [block for block in blocks if id(block) in ranks]
    while waiting:
        lowest = min(ranks[id(block)] for block in waiting)
        firsts: dict[int, CachedBlock] = {}
        for block in sorted(waiting, key=lambda block: of[block.tokens][1]):
            if ranks[id(block)] == lowest:
                firsts.setdefault(of[block.tokens][0], block)
        expected = min(firsts.values(), key=lambda block: (of[block.tokens][2], of[block.tokens][0]))
        assert queue.peek() is queue.pop() is expected
        waiting.remove(expected)
    assert queue.peek() is queue.pop() is None


def test_values_that_change_with_time_are_looked_at_again() -> None:
    tree = PrefixTree(1)
    blocks = [a_block(tree, number) for number in range(1000)]
    of = {block.tokens: (number % 2, float(number), float(number % 2)) for number, block in enumerate(blocks)}
    queue = EvictionQueue(Fixed(of), lambda block: NEAREST)
    for block in blocks:
        queue.push(block, NEAREST)
    assert queue.pop() is blocks[0]
    for number, block in enumerate(blocks):
        of[block.tokens] = number % 2, float(number), -float(number % 2)
    popped = [queue.pop() for _ in range(400)]
    assert popped[-1] in blocks[1::2], "the other group is worth less by now"


def test_lru_gives_up_what_was_released_first() -> None:
    tree, policy = PrefixTree(1), LeastRecentlyUsed()
    queue = EvictionQueue(policy, lambda block: NEAREST)
    blocks = [a_block(tree, number) for number in range(300)]
    for block in blocks:
        block.last_used = policy.tick()
        queue.push(block, NEAREST)
    for block in blocks[:100]:  # released again
        block.last_used = policy.tick()
        queue.push(block, NEAREST)
    assert [queue.pop() for _ in blocks] == blocks[100:] + blocks[:100]


def test_conversations_stay_and_what_is_asked_once_goes() -> None:
    """Answers of different lengths tell them apart: eviction learns by itself which of them come back."""

    def hits(eviction: str) -> int:
        rng = random.Random(1)
        scheduler = create_scheduler(num_blocks=160, max_num_batched_tokens=100, eviction=eviction)  # type: ignore[arg-type]
        executor = executor_for(scheduler)
        found = 0
        for turn in range(240):
            once = [rng.randrange(1 << 20) for _ in range(64)]
            for prompt, length in ((once, 1), (once[::-1], 1), ([turn % 6 + 1] * 64, 20)):
                request = create_request(prompt, length)
                scheduler.add(request)
                run(scheduler, executor)
                found += request.num_cached_tokens > 0
        return found

    learned, lru = hits("cost"), hits("lru")
    assert (learned, lru) == (pytest.approx(234, abs=30), 0)
