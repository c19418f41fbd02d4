"""Long work takes turns: slices of it, fair between keys."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from pagewise_gateway.http.slices import Slices


def pieces(number: int, seconds: float, made: list[int] | None = None) -> Iterator[bytes]:
    """Pieces that take so many seconds each. ``made``: where each of them is noted."""
    for index in range(number):
        time.sleep(seconds)
        if made is not None:
            made.append(index)
        yield b"%d," % index


async def everything(slices: Slices, key: str, made: Iterator[bytes]) -> bytes:
    parts = []
    while (part := await slices.next(key, made)) is not None:
        parts.append(part)
    return b"".join(parts)


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
    slices, other = Slices(), Other(noted)
    running = asyncio.create_task(other.run())
    made = await asyncio.gather(*(everything(slices, "a", pieces(10, 0.004, noted)) for _ in range(10)))
    running.cancel()
    assert set(made) == {b"0,1,2,3,4,5,6,7,8,9,"}
    assert other.turns >= 30, "0.4 s of work"
    assert 0 < other.most < 25, "not those of all ten at once"


async def test_a_key_with_much_work_delays_another_by_a_slice() -> None:
    slices = Slices()
    order: list[str] = []

    async def work(key: str, number: int) -> None:
        await everything(slices, key, pieces(number, 0.005))
        order.append(key)

    tasks = [asyncio.create_task(work("a", 20)) for _ in range(5)]
    await asyncio.sleep(0.02)
    tasks.append(asyncio.create_task(work("b", 4)))
    await asyncio.gather(*tasks)
    assert order[0] == "b"


async def test_what_is_spent_elsewhere_counts_until_the_next_round() -> None:
    slices = Slices()
    assert slices.room()
    slices.spend(1.0)
    assert not slices.room()
    assert await everything(slices, "a", pieces(2, 0)) == b"0,1,"
    await asyncio.sleep(0)
    assert slices.room()


async def test_a_slice_ends_with_its_bytes_and_passes_on_whatever_happens() -> None:
    slices = Slices()
    large = iter([b"x" * 300_000, b"y"])
    assert len(await slices.next("a", large) or b"") == 300_000
    assert await slices.next("a", large) == b"y"
    assert await slices.next("a", large) is None

    def failing() -> Iterator[bytes]:
        yield b"a"
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError):
        await slices.next("a", failing())
    assert await everything(slices, "b", pieces(1, 0)) == b"0,"
