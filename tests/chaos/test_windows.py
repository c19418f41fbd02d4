"""Conversations with models of windowed or recurrent layers or latents go on as processes are killed: by HTTP."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from benchmarks.processes import Cluster, Process, free_port, running
from tests.model_builders import LATENTS
from tests.redis_servers import REAL, start_fake, start_real
from tests.structured import build_structured_model

TURNS, CONVERSATIONS, TOKENS = 4, 5, 24
SCHEDULER_OPTIONS = ("--executor-timeout=3", "--step-timeout=10", "--gateway-timeout=3", "--recovery=swap")
"""What lies somewhere is loaded, also where times that were measured beside other work say that computing is faster."""

OF_ONE_GROUP = ("glm4_moe", "minimax_m2", "qwen3_moe")


def conversation(model: Any, number: int) -> list[list[int]]:
    """The prompt of each turn, and the answer to the last one: each turn continues the one before."""
    turns = [[(7 * index * (number + 3) + index) % 90 + 3 for index in range(60 + 5 * number)]]
    for turn in range(TURNS):
        ids = torch.tensor([turns[-1]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        turns.append([*out[0].tolist(), 5 + turn, 9])
    return turns


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int], begun: asyncio.Event) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached. ``begun`` is set when the first token comes."""
    stream = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens: list[int] = []
    async for chunk in stream:
        begun.set()
        for choice in chunk.choices:
            tokens += choice.model_dump()["token_ids"]
    assert chunk.usage is not None
    assert chunk.usage.prompt_tokens_details is not None
    return tokens, chunk.usage.prompt_tokens_details.cached_tokens or 0


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(
    ("family", "num_blocks", "store"),
    [
        ("gemma3", 36, False),
        pytest.param("gemma4_moe", 36, True, marks=pytest.mark.long),
        pytest.param("granitemoehybrid", 90, True, marks=pytest.mark.long),
        pytest.param("llama4", 60, False, marks=pytest.mark.long),
        pytest.param("gpt_oss", 60, True, marks=pytest.mark.long),
        *(
            pytest.param(one, 60, True, marks=pytest.mark.long)
            for one in ("gemma4", "olmo3", "ministral", "glm4_moe_lite", "deepseek_v3", "mistral4", *OF_ONE_GROUP)
        ),
        pytest.param("qwen3_5", 90, False, marks=pytest.mark.long),
        pytest.param("lfm2", 60, True, marks=pytest.mark.long),
    ],
)
async def test_tokens_and_hits_after_kills_and_drains(
    family: str, num_blocks: int, store: bool, tmp_path: Path
) -> None:
    """Blocks and snapshots are found on the host, in storage, and on other executors."""
    folder, port = tmp_path / "model", free_port()
    model: Any = build_structured_model(folder, family=family)
    model.generation_config.eos_token_id = None
    turns = [conversation(model, number) for number in range(CONVERSATIONS)]
    stop = (start_real if REAL is not None else start_fake)(tmp_path, port) if store else None
    storage = f"--store=redis://127.0.0.1:{port}/0" if store else f"--disk-cache={tmp_path / 'disk'}"
    cluster = Cluster(
        tmp_path / "cluster",
        model=str(folder),
        scheduler_options=SCHEDULER_OPTIONS,
        executor_options=(
            f"--num-blocks={num_blocks}", "--block-size=8", "--host-memory=2MiB",
            f"--host-memory-dir={tmp_path}", storage, "--dtype=float32",
        ),
    )  # fmt: skip
    with running(cluster, 2):
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            cached = []
            for turn in range(TURNS):
                await asyncio.to_thread(cluster.wait_ready, 2)  # nobody else has what an executor leaves before
                begun = [asyncio.Event() for _ in turns]
                answers = [
                    asyncio.create_task(ask(client, str(folder), one[turn], event))
                    for one, event in zip(turns, begun, strict=True)
                ]
                async with asyncio.timeout(120):
                    await asyncio.gather(*(event.wait() for event in begun))
                if turn == 1:
                    kill(cluster.executors[0])
                    cluster.start_executor("first-0")
                elif turn == 2:
                    kill(cluster.scheduler)
                    await asyncio.to_thread(cluster.start_scheduler)
                elif turn == 3:
                    cluster.executors[1].signal(signal.SIGTERM)
                found = await asyncio.gather(*answers)
                for (tokens, _), one in zip(found, turns, strict=True):
                    assert tokens == one[turn + 1][len(one[turn]) : len(one[turn]) + TOKENS]
                cached.append(sum(count for _, count in found))
                if turn == 0:  # groups, with all tiers
                    logs = "".join(process.output() for process in cluster.executors)
                    assert "windowed layers keep all tokens" not in logs
                    assert (" pages for 2 groups" in cluster.scheduler.output()) == (
                        family not in (*LATENTS, *OF_ONE_GROUP)
                    )
            print(f"cached tokens of each turn: {cached}")
            assert all(count > 60 for count in cached[1:])
            assert await asyncio.to_thread(cluster.executors[1].wait, 60) == 0
            assert cluster.metric("executors_drained_total") == 1
            assert cluster.metric("kv_block_events_total", event="corrupt") == 0
    if stop is not None:
        stop()
