"""Conversations go on elsewhere as an executor leaves and between roles: with windows, states, latents, mixtures."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.service import ExecutorService
from pagewise_executor.worker import Worker
from pagewise_shared.protocol import Role

from tests.executor.references import reference
from tests.executor.runners import build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, build_model
from tests.scheduler.server.stack import Stack, executors_of, running, until

TOKENS = 80

families = pytest.mark.parametrize(
    "family",
    [
        *("gemma3", "granitemoehybrid"),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                *("llama4", "gpt_oss", "gemma4", "gemma4_moe", "olmo3", "ministral", "qwen3_next", "lfm2"),
                *("deepseek_v3", "glm4_moe_lite", "mistral4", "glm4_moe", "minimax_m2", "qwen3_moe"),
            )
        ),
    ],
)


class Conversations:
    """Prompts, and the answers to them of a model that is saved under ``path``."""

    def __init__(self, family: str, path: Path) -> None:
        build_model(family, path, seed=7)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        rng = random.Random(3)
        self._prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (70, 41, 64, 12)]
        self.answers = reference(model, self._prompts, [TOKENS] * len(self._prompts), "cpu")

    def ask(self, stack: Stack) -> list["asyncio.Task[list[int]]"]:
        return [asyncio.create_task(stack.generate(prompt, max_tokens=TOKENS)) for prompt in self._prompts]


@asynccontextmanager
async def two_executors(path: Path, *roles: Role) -> AsyncIterator[tuple[Stack, ExecutorService]]:
    """A scheduler, and executors with these roles, of which the first one is returned, that lend blocks."""

    def make_runner() -> ModelRunner:
        return build_runner(path / "model", exchange=peers_at(), threads=1)

    # An executor that other work on the machine delays is not to be lost.
    patience = {"executor_timeout": 60.0, "step_timeout": 60.0}
    async with running(path, max_waiting_tokens=10_000, recovery="swap", **patience) as stack:
        services = [
            ExecutorService(Worker(make_runner), executors_of(path), f"e{number}", role=role)
            for number, role in enumerate(roles)
        ]
        served = [asyncio.create_task(service.run()) for service in services]
        await until(lambda: stack.router.capacity.ready_executors == len(roles), 60)
        yield stack, services[0]
        for service in services:
            service.stop("test over")
        await asyncio.gather(*served, return_exceptions=True)


@families
async def test_answers_go_on_as_an_executor_leaves(family: str, tmp_path: Path) -> None:
    said = Conversations(family, tmp_path / "model")
    async with two_executors(tmp_path, "both", "both") as (stack, leaving):
        asked = said.ask(stack)
        await until(lambda: all(handle.scheduler.num_running for handle in stack.executors))
        leaving.leave("the test says so")
        async with asyncio.timeout(200):
            assert await asyncio.gather(*asked) == said.answers
        assert stack.metrics.request_moves("left")._value.get() > 0


@families
async def test_what_one_executor_computes_of_prompts_another_one_continues(family: str, tmp_path: Path) -> None:
    said = Conversations(family, tmp_path / "model")
    async with two_executors(tmp_path, "prefill", "decode") as (stack, _):
        async with asyncio.timeout(200):
            assert await asyncio.gather(*said.ask(stack)) == said.answers
        assert sum(handle.scheduler.kv.pool.counters.fetched for handle in stack.executors) > 3
