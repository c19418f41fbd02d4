"""Long work takes turns: slices of it, fair between keys."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from pagewise_gateway.http.slices import Slices


def pieces(number: int, seconds: float) -> Iterator[bytes]:
    for index in range(number):
        time.sleep(seconds)
        yield b"%d," % index


async def everything(slices: Slices, key: str, made: Iterator[bytes]) -> bytes:
    parts = []
    while (part := await slices.next(key, made)) is not None:
        parts.append(part)
    return b"".join(parts)


class Other:
    """Something else that runs on the event loop. ``turns``: how often it has; ``longest``: seconds between two."""

    def __init__(self) -> None:
        self.turns, self.longest = 0, 0.0

    async def run(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0)
            now = time.monotonic()
            self.turns, self.longest, last = self.turns + 1, max(self.longest, now - last), now


async def test_others_run_between_slices_however_many_wait() -> None:
    slices, other = Slices(), Other()
    running = asyncio.create_task(other.run())
    made = await asyncio.gather(*(everything(slices, "a", pieces(10, 0.004)) for _ in range(10)))
    running.cancel()
    assert set(made) == {b"0,1,2,3,4,5,6,7,8,9,"}
    assert other.turns >= 30, "0.4 s of work"
    assert other.longest < 0.1, "not that of all ten at once"


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
