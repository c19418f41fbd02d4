"""Tiers below the device, any number of them: blocks that one evicts move to the next, and come back from any tier."""

from array import array

import pytest
from pagewise_scheduler.core.memory.prefix_tree import ancestors
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.plan_builder import PendingCopies
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.protocol import DEVICE, HOST, tier_name, unpack_int32s

from tests.scheduler.core.builders import FURTHER, create_request, create_scheduler
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import check_states, executor_for, expected_tokens, run

PROMPTS = [list(range(start, start + 40)) for start in (100, 200, 300, 400)]


def serve(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int]) -> Request:
    request = create_request(prompt=prompt, max_tokens=2)
    scheduler.add(request)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    return request


@pytest.mark.parametrize("mode", ["swap", "both"])
def test_what_the_host_gives_up_comes_back_from_the_tier_below(mode: RecoveryMode) -> None:
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=12, num_further_blocks=40, recovery=mode)
    executor = executor_for(scheduler)
    for prompt in PROMPTS:
        serve(scheduler, executor, prompt)
        check_states(scheduler.kv.pool)
    further = scheduler.kv.tiers[FURTHER]
    assert further.num_used > 0
    again = serve(scheduler, executor, PROMPTS[0])
    assert again.cached_tokens[tier_name(FURTHER)] > 0
    assert again.num_cached_tokens == (36 if mode == "swap" else again.cached_tokens[tier_name(FURTHER)])
    check_states(scheduler.kv.pool)


def test_a_prefix_may_come_from_two_tiers_at_once() -> None:
    scheduler = create_scheduler(num_blocks=11, num_host_blocks=6, num_further_blocks=40, recovery="swap")
    executor = executor_for(scheduler)
    serve(scheduler, executor, PROMPTS[0])
    serve(scheduler, executor, PROMPTS[1])
    tree = scheduler.kv.pool.tree
    lying = {node.nearest_tier for _, leaf in tree.leaves() for node in ancestors(leaf)}
    assert {HOST, FURTHER} <= lying
    again = create_request(prompt=PROMPTS[0], max_tokens=2)
    scheduler.add(again)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    loads = {copies.source for copies in plan.copies if copies.target == DEVICE}
    assert loads == {HOST, FURTHER}
    scheduler.update(executor.execute(plan))
    run(scheduler, executor)
    assert again.sequences[0].output_token_ids.tolist() == expected_tokens(again)
    assert again.num_cached_tokens == 36


def test_copies_are_in_an_order_in_which_each_reads_what_it_is_meant_to_read() -> None:
    pending = PendingCopies()
    # Block 7 of the host moves down, then block 1 of the device takes its place, and moves down at once.
    pending.add([(HOST, 7, FURTHER, 0, 0), (DEVICE, 1, HOST, 7, 0), (DEVICE, 2, HOST, 8, 0)])
    pending.add([(HOST, 7, FURTHER, 1, 0), (DEVICE, 3, HOST, 7, 0), (DEVICE, 4, DEVICE, 5, 0)])
    content = {(DEVICE, block): f"device {block}" for block in range(6)} | {(HOST, 7): "host 7"}
    for copies in pending.take():
        pairs = unpack_int32s(copies.pairs)
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            content[copies.target, target] = content[copies.source, source]
    assert content[FURTHER, 0] == "host 7"
    assert content[FURTHER, 1] == "device 1"
    assert (content[HOST, 7], content[HOST, 8], content[DEVICE, 5]) == ("device 3", "device 2", "device 4")
    assert not pending


def test_copies_on_write_that_nobody_wants_are_not_made_but_demotions_are() -> None:
    pending = PendingCopies()
    pending.add([(DEVICE, 1, DEVICE, 2, 0), (DEVICE, 3, DEVICE, 4, 0), (DEVICE, 5, HOST, 6, 0)])
    pending.give_up([2])
    assert pending.demotes
    lists = [(copies.source, copies.target, unpack_int32s(copies.pairs)) for copies in pending.take()]
    assert lists == [(DEVICE, HOST, array("i", [5, 6])), (DEVICE, DEVICE, array("i", [3, 4]))]
