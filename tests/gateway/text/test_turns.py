"""Turns are shared fairly between keys, and none is lost."""

import asyncio
import random
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
from pagewise_gateway.text.tokenizer import Turns

from tests.gateway.text import tokenizer_builders as builders


async def test_keys_take_turns() -> None:
    turns, order = Turns(1), list[str]()

    async def work(key: str) -> None:
        await turns.take(key)
        order.append(key)
        await asyncio.sleep(0)
        turns.pass_on()

    await turns.take("first")
    tasks = [asyncio.create_task(work(key)) for key in ("a", "a", "a", "a", "b", "b", "c")]
    await asyncio.sleep(0)
    turns.pass_on()
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "c", "a", "b", "a", "a"]


@given(
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 3)), max_size=20),
    st.randoms(use_true_random=False),
)
def test_no_turn_is_lost_whoever_gives_up(most: int, jobs: list[tuple[str, bool, int]], order: random.Random) -> None:
    async def run() -> None:
        turns, running = Turns(most), 0

        async def work(key: str, pauses: int) -> None:
            nonlocal running
            await turns.take(key)
            running += 1
            assert running <= most
            try:
                for _ in range(pauses):
                    await asyncio.sleep(0)
            finally:
                running -= 1
                turns.pass_on()

        tasks = [(asyncio.create_task(work(key, pauses)), gives_up) for key, gives_up, pauses in jobs]
        order.shuffle(tasks)
        for task, gives_up in tasks:
            await asyncio.sleep(0)
            if gives_up:
                task.cancel()
        await asyncio.gather(*(task for task, _ in tasks), return_exceptions=True)
        async with asyncio.timeout(20):  # all turns are there again
            for _ in range(most):
                await turns.take("z")

    asyncio.run(run())


async def test_a_short_text_does_not_wait_for_long_ones_of_another_key() -> None:
    tokenizer, ends = builders.byte_level(), threading.Event()
    waiting = [asyncio.create_task(tokenizer.off_loop(ends.wait, "greedy", 1_000_000)) for _ in range(8)]
    await asyncio.sleep(0)
    for key in ("greedy", "other"):
        async with asyncio.timeout(10):
            assert await tokenizer.off_loop(lambda: "done", key, 100) == "done"
    ends.set()
    assert await asyncio.gather(*waiting) == [True] * 8
    tokenizer.close()


async def test_a_client_that_goes_away_does_not_free_the_thread_that_works_for_it() -> None:
    tokenizer, ends = builders.byte_level(), threading.Event()
    gone = [asyncio.create_task(tokenizer.off_loop(ends.wait, "greedy", 100)) for _ in range(20)]
    await asyncio.sleep(0.05)
    for task in gone:
        task.cancel()
    await asyncio.gather(*gone, return_exceptions=True)
    other = asyncio.create_task(tokenizer.off_loop(time.monotonic, "other", 100))
    await asyncio.sleep(0.05)
    assert not other.done(), "both threads are at work"
    began = time.monotonic()
    ends.set()
    assert await other >= began
    tokenizer.close()
