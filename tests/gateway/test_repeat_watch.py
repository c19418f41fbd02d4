"""The counters of repeated text, through a real gateway: counted texts, and texts that do not count."""

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway import repeats
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.repeats import RepeatWatch

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, Server, serving

EDGE = 15
"""Tokens that are not counted at either end of a repeated text, at most."""
REPEATED, UNSEARCHED = "repeated_tokens", "unsearched_tokens"


def ids(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def value(metrics: Metrics, name: str) -> int:
    (sample,) = (
        sample for family in metrics.snapshot() for sample in family.samples if sample.name == f"pagewise_{name}_total"
    )
    return int(sample.value)


async def complete(server: Server, prompt: object, key: str = "", path: str = "completions", **fields: Any) -> None:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    field = "prompt" if path == "completions" else "messages"
    body = {"model": MODEL, field: prompt, "max_tokens": 2, **fields}
    status, answer = await server.post(f"/v1/{path}", body, **headers)
    assert status == 200, answer


async def test_repeated_texts_are_counted_wherever_they_stand() -> None:
    one, two = ids(1, 300), ids(2, 260)
    async with serving(FakeScheduler(max_model_len=4096)) as server:
        await complete(server, [ids(3, 40) + one + ids(4, 9) + two, two])
        await complete(server, ids(5, 70) + two + ids(6, 33) + one)
        await server.scheduler.until(lambda: value(server.metrics, REPEATED) >= 820 - 3 * 2 * EDGE)
        assert value(server.metrics, REPEATED) <= 820
        assert value(server.metrics, UNSEARCHED) == 0


async def test_texts_of_conversations_are_counted_too() -> None:
    document = "".join(chr(97 + letter % 26) for letter in ids(1, 300))
    async with serving(FakeScheduler(max_model_len=4096)) as server:
        for question in ("What is this?", "And who wrote it, by the way?"):
            messages = [{"role": "user", "content": f"{question} {document}"}]
            await complete(server, messages, path="chat/completions")
        await server.scheduler.until(lambda: value(server.metrics, REPEATED) >= 200)


async def nothing_but_the_last(server: Server, last: list[int], key: str = "") -> None:
    """Send a text twice, behind different prefixes. Prompts are searched in order, so when it has been counted, earlier
    prompts have been searched, and have not been counted."""
    await complete(server, ids(91, 120) + last, key)
    await complete(server, ids(92, 120) + last, key)
    await server.scheduler.until(lambda: value(server.metrics, REPEATED) >= len(last) - 2 * EDGE)
    assert value(server.metrics, REPEATED) <= len(last)


async def test_prefixes_short_prompts_and_new_texts_are_not_counted() -> None:
    prefix = ids(1, 300)
    async with serving(FakeScheduler(max_model_len=4096)) as server:
        await complete(server, prefix + ids(2, 100))
        await complete(server, prefix + ids(3, 100))
        await complete(server, prefix + ids(3, 100))
        await complete(server, prefix[45:])
        await nothing_but_the_last(server, ids(4, 150))


async def test_texts_of_other_keys_and_salts_are_not_compared(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\nbob: sk-bob\n")
    text = ids(1, 300)
    async with serving(FakeScheduler(max_model_len=4096), api_keys_file=str(keys)) as server:
        await complete(server, ids(2, 30) + text, "sk-alice")
        await complete(server, ids(3, 30) + text, "sk-bob")
        await complete(server, ids(4, 30) + text, "sk-bob", cache_salt="own")
        await nothing_but_the_last(server, ids(5, 150), "sk-bob")
        await complete(server, ids(6, 30) + text, "sk-alice")
        await server.scheduler.until(lambda: value(server.metrics, REPEATED) >= 450 - 2 * 2 * EDGE)


async def test_prompts_of_many_pieces_take_turns_with_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of 50,000 tokens: seven pieces each, between which the event loop runs."""
    monkeypatch.setattr(repeats, "TURN_SECONDS", 0.0)
    metrics, steps, text = Metrics("m"), 0, array("i", ids(1, 50_000))
    watch = RepeatWatch(metrics)
    watch.prompt(text, None)
    watch.prompt(array("i", [7]) + text, None)
    while value(metrics, REPEATED) < 49_900:
        await asyncio.sleep(0)
        steps += 1
    assert steps >= 14
    assert value(metrics, REPEATED) <= 50_000


async def test_what_is_too_much_is_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "MOST_WAITING_TOKENS", 700)
    metrics, text = Metrics("m"), array("i", ids(1, 300))
    watch = RepeatWatch(metrics)
    for start in range(3):
        watch.prompt(array("i", [start]) + text, None)
    assert value(metrics, UNSEARCHED) == 301
    async with asyncio.timeout(10):
        while value(metrics, REPEATED) == 0:
            await asyncio.sleep(0)
    watch.prompt(array("i", [3]) + text, None)
    async with asyncio.timeout(10):
        while value(metrics, REPEATED) < 2 * (300 - 2 * EDGE):
            await asyncio.sleep(0)
    assert value(metrics, UNSEARCHED) == 301
