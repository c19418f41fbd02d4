"""Conversations with a model of windowed layers go on as its processes are killed: by real processes and HTTP."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import torch

from benchmarks.processes import Cluster, Process, running
from tests.structured import build_structured_model

TURNS, CONVERSATIONS, TOKENS = 4, 5, 24
SCHEDULER_OPTIONS = ("--executor-timeout=3", "--step-timeout=10", "--gateway-timeout=3")


def conversation(model: Any, number: int) -> list[list[int]]:
    """The prompt of each turn, and the answer to the last one: each turn continues the one before."""
    turns = [[(7 * index * (number + 3) + index) % 90 + 3 for index in range(60 + 5 * number)]]
    for turn in range(TURNS):
        ids = torch.tensor([turns[-1]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)
        turns.append([*out[0].tolist(), 5 + turn, 9])
    return turns


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> tuple[list[int], int]:
    """The tokens of an answer, and how many of the prompt were cached."""
    answer = await client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    choice, usage = answer.choices[0].model_dump(), answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return choice["token_ids"], usage.prompt_tokens_details.cached_tokens or 0


def kill(process: Process) -> None:
    process.signal(signal.SIGKILL)
    process.wait()


async def test_windows_are_found_after_kills_on_the_host_the_disk_and_other_executors(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model: Any = build_structured_model(folder, family="gemma3")
    model.generation_config.eos_token_id = None
    turns = [conversation(model, number) for number in range(CONVERSATIONS)]
    cluster = Cluster(
        tmp_path / "cluster",
        model=str(folder),
        scheduler_options=SCHEDULER_OPTIONS,
        executor_options=(
            "--num-blocks=36", "--block-size=8", "--host-memory=2MiB", f"--disk-cache={tmp_path / 'disk'}",
            "--dtype=float32",
        ),
    )  # fmt: skip
    with running(cluster, 2):
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
            cached = []
            for turn in range(TURNS):
                answers = [asyncio.create_task(ask(client, str(folder), one[turn])) for one in turns]
                await asyncio.sleep(0.3)
                if turn == 1:
                    kill(cluster.executors[0])
                    cluster.start_executor("first-0")
                elif turn == 2:
                    kill(cluster.scheduler)
                    await asyncio.to_thread(cluster.start_scheduler)
                found = await asyncio.gather(*answers)
                for (tokens, _), one in zip(found, turns, strict=True):
                    assert tokens == one[turn + 1][len(one[turn]) : len(one[turn]) + TOKENS]
                cached.append(sum(count for _, count in found))
                if turn == 0:  # groups, with all tiers
                    logs = "".join(process.output() for process in cluster.executors)
                    assert "windowed layers keep all tokens" not in logs
                    assert " pages for 2 groups" in cluster.scheduler.output()
            print(f"cached tokens of each turn: {cached}")
            assert all(count > 60 for count in cached[1:])
