"""Work on the event loop takes turns: slices of it, fair between keys."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from pagewise_gateway.http.loop_turns import LoopTurns


def pieces(number: int, seconds: float, made: list[int] | None = None) -> Iterator[bytes]:
    """Pieces that take so many seconds each. ``made``: where each of them is noted."""
    for index in range(number):
        time.sleep(seconds)
        if made is not None:
            made.append(index)
        yield b"%d," % index


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def exhausted() -> LoopTurns:
    """Turns of which nothing is done at once, because much was done just now."""
    turns = LoopTurns()
    assert turns.free()
    busy(0.05)
    turns.done()
    assert not turns.free()
    return turns


class Other:
    """Something else that runs on the event loop. ``turns``: how often it has; ``most``: pieces made between two."""

    def __init__(self, made: list[int]) -> None:
        self.turns, self.most = 0, 0
        self._made = made

    async def run(self) -> None:
        before = 0
        while True:
            await asyncio.sleep(0)
            self.turns, self.most, before = self.turns + 1, max(self.most, len(self._made) - before), len(self._made)


async def test_others_run_between_slices_however_many_wait() -> None:
    noted: list[int] = []
    turns, other = LoopTurns(), Other(noted)
    running = asyncio.create_task(other.run())
    made = await asyncio.gather(*(turns.all("a", pieces(10, 0.004, noted)) for _ in range(10)))
    running.cancel()
    assert {bytes(one) for one in made} == {b"0,1,2,3,4,5,6,7,8,9,"}
    assert other.turns >= 30, "0.4 s of work"
    assert 0 < other.most < 25, "not those of all ten at once"


async def test_a_key_with_much_work_delays_another_by_a_slice() -> None:
    turns = LoopTurns()
    order: list[str] = []

    async def work(key: str, number: int) -> None:
        await turns.all(key, pieces(number, 0.005))
        order.append(key)

    tasks = [asyncio.create_task(work("a", 20)) for _ in range(5)]
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(work("b", 4)))
    await asyncio.gather(*tasks)
    assert order[0] == "b"


async def test_a_slice_ends_with_its_bytes_and_passes_on_whatever_happens() -> None:
    turns = LoopTurns()
    large = iter([b"x" * 300_000, b"y"])
    assert len(await turns.next("a", large) or b"") == 300_000
    assert await turns.next("a", large) == b"y"
    assert await turns.next("a", large) is None

    def failing() -> Iterator[bytes]:
        yield b"a"
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        await turns.next("a", failing())
    assert await turns.all("b", pieces(1, 0)) == b"0,"


async def test_turns_are_given_to_keys_in_turn() -> None:
    turns, done = exhausted(), []

    async def work(key: str, number: int) -> None:
        await turns.call(key, lambda: done.append((key, number)))

    tasks = [asyncio.create_task(work(key, number)) for number in range(3) for key in ("alice", "alice", "bob")]
    await asyncio.gather(*tasks)
    assert [key for key, _ in done] == ["alice", "bob"] * 3 + ["alice"] * 3
    assert [number for key, number in done if key == "bob"] == [0, 1, 2]


async def test_turns_end_after_a_slice() -> None:
    """A hundred milliseconds of work do not stop anything else for longer than a slice of it."""
    turns = LoopTurns()
    work = [asyncio.create_task(turns.call("alice", lambda: busy(0.002))) for _ in range(50)]
    rounds = 0
    while not all(task.done() for task in work):
        await asyncio.sleep(0)
        rounds += 1
    assert rounds >= 5


async def test_the_time_of_writing_is_no_time_for_more_work() -> None:
    """A client takes all that is written at once, so writing never waits, and takes longer than making the answer."""
    made: list[int] = []
    turns, other = LoopTurns(), Other(made)
    running = asyncio.create_task(other.run())
    answer = pieces(20, 0.006, made)
    while await turns.next("alice", answer):
        busy(0.01)
    running.cancel()
    assert 0 < other.most <= 2, "a piece at once, and one in its turn"


async def test_as_much_time_follows_work_that_is_longer_than_a_slice() -> None:
    turns, ends = exhausted(), []

    def work() -> None:
        busy(0.1)
        ends.append(time.monotonic())

    await asyncio.gather(*(turns.call("alice", work) for _ in range(2)))
    assert ends[1] - ends[0] > 0.19


async def test_turns_return_and_raise() -> None:
    for turns in (LoopTurns(), exhausted()):
        assert await turns.call("alice", lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await turns.call("alice", lambda: 1 / 0)


async def test_who_does_not_wait_any_more_takes_no_turn() -> None:
    turns, done = exhausted(), []
    task = asyncio.create_task(turns.call("alice", lambda: done.append(1)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.sleep(0.01)
    assert done == []
