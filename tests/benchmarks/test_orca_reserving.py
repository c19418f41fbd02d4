"""Memory as it was before paging, for comparison: the buddy allocator and the reservations over it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest

from benchmarks.orca.reserving import BuddyAllocator, ReservingKVManager, reserved_slots, scheduler_over


@settings(max_examples=150, deadline=None)
@given(
    num_slots=st.integers(1, 300),
    operations=st.lists(st.tuples(st.booleans(), st.integers(1, 120), st.integers(0, 30)), max_size=60),
)
def test_pieces_never_overlap_and_all_come_back(num_slots: int, operations: list[tuple[bool, int, int]]) -> None:
    buddy = BuddyAllocator(num_slots)
    held: list[tuple[int, int]] = []
    for allocates, size, which in operations:
        if allocates:
            if buddy.fits(size):
                start, order = piece = buddy.allocate(size)
                assert size <= 1 << order < 2 * size
                assert start + (1 << order) <= num_slots
                assert all(start + (1 << order) <= s or s + (1 << o) <= start for s, o in held)
                held.append(piece)
            else:
                with pytest.raises(MemoryError):
                    buddy.allocate(size)
        elif held:
            buddy.free(held.pop(which % len(held)))
        assert buddy.num_free + sum(1 << order for _, order in held) == num_slots
    for piece in held:
        buddy.free(piece)
    largest = 1 << (num_slots.bit_length() - 1)
    assert buddy.allocate(largest)[0] == 0, "buddies have joined again"


@pytest.mark.parametrize(("kind", "slots"), [("max", 2048), ("pow2", 100 + 32), ("oracle", 125)])
def test_what_is_reserved(kind: str, slots: int) -> None:
    assert reserved_slots(kind, 100, 25, 2048) == slots  # type: ignore[arg-type]


def test_only_as_many_run_as_have_their_reservation() -> None:
    trace = [TraceRequest(0.0, 50, 20, unique=i) for i in range(12)]
    kv = ReservingKVManager(1024, 16, 2048)
    kv.reservations = {str(index): 256 for index in range(12)}
    scheduler = scheduler_over(kv, max_num_seqs=16, max_num_batched_tokens=512)
    running: list[int] = []
    outcome = Simulation(
        [scheduler], llama_3_8b(16), salt=str, watch=lambda now: running.append(len(scheduler.running))
    ).run(trace)
    assert len(outcome.served) == 12
    assert max(running) <= 4
    assert kv.buddy.num_free == 1024
    assert not kv.pieces
