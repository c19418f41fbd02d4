"""A thinking budget counts from the beginning of the thinking, also when its executor is killed meanwhile."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import tokenizers

from benchmarks.processes import Cluster, running
from tests.model_builders import build_model
from tests.structured import VOCAB_SIZE, save_tokenizer

BUDGET, MORE = 400, 20
ENOUGH = 10
"""Tokens of thinking after which the executor is killed."""


async def think(client: openai.AsyncOpenAI, model: str, seed: int, tokens: list[int], enough: asyncio.Event) -> None:
    """Add the tokens of an output to ``tokens`` as they come. ``enough``: set after ``ENOUGH`` of them."""
    stream = await client.completions.create(
        model=model,
        prompt="Well. <think>",
        max_tokens=BUDGET + MORE,
        temperature=1.0,
        seed=seed,
        stream=True,
        extra_body={
            "thinking_token_budget": BUDGET, "ignore_eos": True, "return_token_ids": True, "bad_words": ["</think>"]
        },
    )  # fmt: skip
    async for chunk in stream:
        for choice in chunk.choices:
            tokens += choice.model_dump()["token_ids"] or ()
        if len(tokens) >= ENOUGH:
            enough.set()


@pytest.mark.chaos
async def test_a_budget_holds_when_the_executor_is_killed_while_the_model_thinks(tmp_path: Path) -> None:
    build_model("llama", folder := tmp_path / "model", seed=7, vocab_size=VOCAB_SIZE)
    save_tokenizer(folder, "<think>", "</think>")
    cluster = Cluster(
        tmp_path / "cluster",
        model=str(folder),
        gateway_options=("--reasoning-parser=qwen3",),
        executor_options=("--num-blocks=200", "--dtype=float32"),
    )
    with running(cluster, 1):
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            for seed in range(100):
                expected, found = list[int](), list[int]()
                await think(client, str(folder), seed, expected, asyncio.Event())
                enough = asyncio.Event()
                thinking = asyncio.create_task(think(client, str(folder), seed, found, enough))
                async with asyncio.timeout(60):
                    await enough.wait()
                victim = cluster.executors[-1]
                victim.signal(signal.SIGSTOP)
                in_time = len(found) < BUDGET - ENOUGH  # beside other work, it may have been too fast
                if in_time:
                    victim.signal(signal.SIGKILL)
                    victim.wait()
                    cluster.start_executor("second")
                else:
                    victim.signal(signal.SIGCONT)
                async with asyncio.timeout(120):
                    await thinking
                check(folder, expected, found)
                if in_time:
                    break
            assert cluster.metric("request_moves_total", reason="lost") >= 1


def check(folder: Path, expected: list[int], found: list[int]) -> None:
    end: Any = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("</think>")
    assert len(found) == BUDGET + MORE
    assert found.index(end) == BUDGET
    assert found == expected
