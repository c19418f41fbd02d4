"""Who gets an adapter's slot, and when: on an executor that checks that each row has its own adapter in every step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import SequenceStatus
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import AdapterLoaded, LoadAdapter

from tests.core_requests import change
from tests.scheduler.core.adapter_fleet import Fleet, adapter, request, segmented
from tests.scheduler.core.builders import create_scheduler
from tests.scheduler.core.driving import expected_tokens

ARRIVALS = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.none(), st.integers(0, 6)), st.integers(1, 9)), min_size=1, max_size=40
)


@given(ARRIVALS, st.integers(1, 3), st.integers(14, 40), st.integers(0, 2**16))
def test_every_row_has_its_adapter_and_every_request_ends(
    arrivals: list[tuple[int, int | None, int]], max_loras: int, num_blocks: int, aborted: int
) -> None:
    fleet, requests = Fleet(max_loras, num_blocks=num_blocks), []
    for number, (pause, which, max_tokens) in enumerate(arrivals):
        for _ in range(pause):
            fleet.step()
        requests.append(request(number, which, max_tokens, fleet.now))
        fleet.scheduler.add(requests[-1])
        if aborted >> (number % 16) & 1 and number % 3 == 0:
            fleet.scheduler.abort(requests[number // 2].request_id)
    fleet.run()
    for one in requests:
        tokens = one.sequences[0].output_token_ids.tolist()
        assert one.sequences[0].finish_reason == "abort" or tokens == expected_tokens(one)
    assert fleet.scheduler.features.adapters.num_loads == len(fleet.asked)
    assert fleet.scheduler.num_waiting == fleet.scheduler.num_running == 0
    assert fleet.scheduler.kv.pool.num_in_use == 0


def test_32_adapters_share_four_slots() -> None:
    fleet = Fleet(4)
    requests = [request(number, number % 32, 6, arrival=number * 1e-3) for number in range(96)]
    for one in requests:
        fleet.scheduler.add(one)
    fleet.run()
    assert all(one.sequences[0].output_token_ids.tolist() == expected_tokens(one) for one in requests)
    adapters = fleet.scheduler.features.adapters
    assert (adapters.num_resident, adapters.num_loads - adapters.num_evictions) == (4, 4)
    assert adapters.num_loads >= 32


def test_an_adapter_that_is_always_asked_for_does_not_keep_its_slot() -> None:
    fleet = Fleet(1, load_steps=1)
    numbers = iter(range(10_000))
    late = request(9999, 1, 4, arrival=20.5)
    for step in range(200):
        fleet.scheduler.add(request(next(numbers), 0, 6, arrival=float(step)))
        if step == 20:
            fleet.scheduler.add(late)
        fleet.step()
        if late.finished:
            break
    assert late.finished, "it starves"
    assert step < 80
    fleet.run()


def test_who_has_no_adapter_waits_for_nobody() -> None:
    fleet = Fleet(1, load_steps=50)
    fleet.scheduler.add(request(0, 0))
    plain = request(1, None, arrival=1.0)
    fleet.scheduler.add(plain)
    for _ in range(12):
        fleet.step()
    assert plain.finished
    assert fleet.scheduler.num_waiting == 1
    fleet.run()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_only() -> None:
    fleet = Fleet(2, broken=[1])
    requests = [request(number, number % 3) for number in range(9)]
    for one in requests:
        fleet.scheduler.add(one)
    fleet.run()
    assert {one.request_id for one in fleet.failed} == {"r1", "r4", "r7"}
    assert all(
        one.sequences[0].finish_reason == ("error" if number % 3 == 1 else "length")
        for number, one in enumerate(requests)
    )
    assert fleet.scheduler.features.adapters.num_load_errors == 1
    assert fleet.scheduler.features.adapters.num_resident == 2


def test_after_a_reset_adapters_are_loaded_again() -> None:
    fleet = Fleet(2)
    requests = [request(number, number % 3, 8) for number in range(6)]
    for one in requests:
        fleet.scheduler.add(one)
    for _ in range(6):
        fleet.step()
    before = len(fleet.asked)
    assert before
    fleet.reset()
    fleet.run()
    assert len(fleet.asked) > before
    assert all(one.sequences[0].output_token_ids.tolist() == expected_tokens(one) for one in requests)


def test_a_better_priority_does_not_wait_for_what_has_not_begun() -> None:
    """The queue of an adapter that has its slot moves back behind an earlier request."""
    fleet = Fleet(1, load_steps=0)
    many = [request(number, 0, 20, arrival=number * 1e-3) for number in range(60)]
    for one in many:
        fleet.scheduler.add(one)
    for _ in range(12):
        fleet.step()
    urgent = request(100, 1, 4, arrival=1.0, priority=-1)
    fleet.scheduler.add(urgent)
    while not urgent.finished:
        fleet.step()
        assert fleet.now < 200
    assert sum(one.finished for one in many) < 30
    fleet.run()


def test_an_adapter_that_nobody_has_begun_to_use_gives_way_at_once() -> None:
    """Nothing runs, so nothing would come back that could be waited for."""
    fleet = Fleet(1, load_steps=0)
    fleet.scheduler.add(request(0, 0))
    fleet.run()
    fleet.now += 100
    first, urgent = request(1, 0, arrival=200.0), request(2, 1, arrival=201.0, priority=-1)
    fleet.scheduler.add(first)
    fleet.scheduler.add(urgent)
    fleet.step()
    assert fleet.asked[-1].adapter == adapter(1)
    fleet.run()
    assert first.finished
    assert urgent.finished


def test_a_request_that_never_fits_is_refused_before_its_adapter_is_loaded() -> None:
    fleet = Fleet(1)
    with pytest.raises(ValueError, match="needs more than"):
        fleet.scheduler.add(request(0, 0, 10_000))
    assert not fleet.scheduler.requests
    with pytest.raises(ValueError, match="serves none"):
        Fleet(0).scheduler.add(request(0, 0))


def test_loads_are_priced_by_what_they_took() -> None:
    fleet = Fleet(1)
    adapters = fleet.scheduler.features.adapters
    cold = adapters.seconds(adapter(0))
    fleet.scheduler.add(request(0, 0))
    assert adapters.seconds(adapter(0)) == pytest.approx(cold)
    fleet.run()
    assert adapters.seconds(adapter(0)) == 0.0
    assert adapters.seconds(adapter(1)) > cold  # the first one took half a second


def test_a_request_that_comes_from_elsewhere_waits_for_its_adapter_like_any_other() -> None:
    """It is reported as waiting, and its time of running elsewhere is forgotten."""
    first, second = Fleet(1), Fleet(1, load_steps=20)
    moving = request(0, 0, 8)
    first.scheduler.add(moving)
    while not moving.sequences[0].output_token_ids:
        first.step()
    (moved,) = first.scheduler.release_all()
    second.scheduler.add(moved)
    second.step()
    (sequence,) = moved.sequences
    assert (sequence.status, sequence.prefilled) == (SequenceStatus.WAITING, False)
    assert (second.scheduler.num_waiting, second.scheduler.num_running) == (1, 0)
    second.run()
    assert sequence.output_token_ids.tolist() == expected_tokens(moved)


def test_a_claim_ends_with_the_request_that_made_it() -> None:
    fleet = Fleet(1, load_steps=0, num_blocks=200)
    running, claimer = request(0, 0, 300), request(1, 1, arrival=20.0)
    fleet.scheduler.add(running)
    for _ in range(20):
        fleet.step()
    fleet.scheduler.add(claimer)
    fleet.step()
    late = request(2, 0, arrival=21.0)
    fleet.scheduler.add(late)
    for _ in range(10):
        fleet.step()
    assert not late.finished, "whoever comes later waits behind the claim"
    fleet.scheduler.abort(claimer.request_id)
    for _ in range(10):
        fleet.step()
    assert late.finished
    assert not running.finished
    fleet.run()


def test_the_original_of_a_segment_keeps_its_slot_when_who_wanted_it_has_gone() -> None:
    fleet = Fleet(1, load_steps=0, num_blocks=200)
    wanting, other = segmented(0, 0, 200), request(1, 1, arrival=1.0)
    fleet.scheduler.add(wanting)
    while not fleet.rows:
        fleet.step()
    (original,) = fleet.scheduler.features.segments.requests
    assert original.sequences[0].row in fleet.rows
    fleet.scheduler.add(other)
    fleet.scheduler.abort(wanting.request_id)
    fleet.run()
    assert other.sequences[0].output_token_ids.tolist() == expected_tokens(other)
    assert fleet.scheduler.kv.pool.num_in_use == 0


def test_what_computes_an_original_is_not_sent_back_behind_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who wants it would wait for it, and keep the slot that the claim is for."""
    scheduler = create_scheduler(max_adapters=1)
    slots = scheduler.features.adapters
    wanting, urgent = segmented(0, 0, 40), request(1, 1, arrival=1.0, priority=-1)
    scheduler.add(wanting)
    (load,) = slots.messages(0.0)
    assert isinstance(load, LoadAdapter)
    slots.take(AdapterLoaded(1, load.number), 0.0)
    assert slots.messages(0.0) == []
    assert list(scheduler.waiting) == wanting.sequences
    original = request(2, 0, 0)
    original.computes_for = wanting.sequences[0]
    original.create_sequences()
    assert slots.enter(original)
    scheduler.add(urgent)
    assert slots.messages(1000.0) == []
    assert list(scheduler.waiting) == wanting.sequences
    slots.leave(wanting, 0)
    original.sequences[0].last_step = 5  # it is preempted and not needed any more, while a step of it is in flight
    slots.leave(original, 5)
    for oldest_step, loads in ((5, []), (6, [adapter(1)])):
        monkeypatch.setattr(Scheduler, "oldest_step", oldest_step)
        asked = [one for one in slots.messages(1000.0) if isinstance(one, LoadAdapter)]
        assert [one.adapter for one in asked] == loads


def test_equal_files_under_a_path_that_cannot_be_read_fail_who_named_that_path_only() -> None:
    fleet = Fleet(1, broken=[1])
    gone, there = request(0, 1), request(1, 1, arrival=1.0)
    change(there, adapter=adapter(1, path="/elsewhere"))
    for one in (gone, there):
        fleet.scheduler.add(one)
    fleet.run()
    assert fleet.failed == [gone]
    assert there.sequences[0].output_token_ids.tolist() == expected_tokens(there)
    assert [load.adapter.path for load in fleet.asked] == ["/adapters/1", "/elsewhere"]


def test_a_request_that_is_refused_needs_no_slot() -> None:
    fleet = Fleet(1, load_steps=0)
    fleet.scheduler.add(request(0, 0))
    fleet.run()
    for refused, why in ((request(1, 0, 10_000), "needs more than"), (request(2, 0), "is here already")):
        if why == "is here already":
            fleet.scheduler.add(request(2, 0, 40))
        with pytest.raises(ValueError, match=why):
            fleet.scheduler.add(refused)
    fleet.scheduler.add(other := request(3, 1, arrival=1.0))
    fleet.run()
    assert other.finished, "the slot is free when those that were taken have ended"
    with pytest.raises(ValueError, match="of rank 8, and the executor serves none"):
        Fleet(1, max_rank=4).scheduler.add(request(4, 0))


def test_loads_that_do_not_return_fail_who_waits_for_them_and_nobody_else() -> None:
    fleet = Fleet(2, load_steps=0)
    held = request(0, 0, 12)
    fleet.scheduler.add(held)
    while not held.sequences[0].output_token_ids:
        fleet.step()
    fleet.stuck = True
    slots, waiting, plain = fleet.scheduler.features.adapters, [request(1, 1), request(2, 2)], request(3, None, 30)
    for one in (*waiting, plain):
        fleet.scheduler.add(one)
    told: list[str | None] = []
    slots.check(adapter(3), lambda error, *, lost=False: told.append(error))
    fleet.step()
    asked = fleet.now
    assert fleet.scheduler.features.give_up(asked + 5, 5.0) == []
    assert fleet.scheduler.features.give_up(asked + 5.5, 5.0) == waiting
    assert all(one.sequences[0].finish_reason == "error" for one in waiting)
    assert told == ["the adapter 'adapter-3' has not been loaded within 5 s"]
    assert slots.num_load_errors == 2  # the check, and that of one slot: the other one is needed
    assert not slots.can_take(adapter(1))
    assert slots.can_take(adapter(0))
    before = len(fleet.asked)
    # Loaded adapters are still served, and requests for other ones are refused at the next look.
    fleet.scheduler.add(again := request(4, 0))
    fleet.scheduler.add(late := request(5, 5))
    for _ in range(60):
        fleet.step()
    assert held.finished
    assert again.finished
    assert plain.finished
    assert not late.finished
    assert fleet.scheduler.features.give_up(asked + 6, 5.0) == [late]
    assert len(fleet.asked) == before
    fleet.stuck = False  # they return after all: no request waits for them, and their slot is loaded anew
    fleet.step()
    assert slots.can_take(adapter(1))
    fleet.scheduler.add(after := request(6, 1))
    fleet.run()
    assert after.sequences[0].output_token_ids.tolist() == expected_tokens(after)
    assert len(fleet.asked) == before + 1
    assert fleet.scheduler.kv.pool.num_in_use == 0


def test_a_load_has_as_long_as_it_may_take_from_the_end_of_the_one_before() -> None:
    scheduler = create_scheduler(max_adapters=1)
    slots = scheduler.features.adapters
    for number in range(2):
        slots.check(adapter(number), lambda error, *, lost=False: None)
    first, second = slots.messages(0.0)
    slots.take(AdapterLoaded(1, first.number), 4.0)
    slots.give_up(8.0, 5.0)
    assert slots.num_load_errors == 0
    slots.give_up(9.5, 5.0)
    assert slots.num_load_errors == 1
    slots.take(AdapterLoaded(1, second.number), 10.0)
    assert slots.can_take(adapter(7))
