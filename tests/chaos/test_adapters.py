"""Requests with different adapters go on with their own, whichever executor is killed or leaves, and with them the
scheduler."""

import asyncio
import signal
from pathlib import Path

import openai
import pytest
import transformers
from pagewise_shared.model_files import resolve_model

from benchmarks.processes import Cluster, running
from tests.lora_adapters import build_adapter, greedy, peft_model

DEMO = "pagewise-demo"
MODULES = {"first": ["q_proj", "v_proj"], "second": ["down_proj", "o_proj"], "third": ["up_proj", "k_proj"]}
PROMPTS = ("class Account:\n    def __init__(self, owner):\n", "import os\n\n\ndef walk(path):\n", "for key, value in")
MOST = 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    path, model = tmp_path_factory.mktemp("adapters"), resolve_model(DEMO)
    return {
        name: build_adapter(model, path / name, seed, target_modules=modules)
        for seed, (name, modules) in enumerate(MODULES.items())
    }


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[tuple[str, str], str]:
    model = resolve_model(DEMO)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    found = {}
    for name, path in [(DEMO, None), *folders.items()]:
        computed = peft_model(model, path)
        for prompt in PROMPTS:
            tokens, _ = greedy(computed, tokenizer(prompt)["input_ids"], MOST)
            found[name, prompt] = tokenizer.decode(tokens)
    return found


async def stream(client: openai.AsyncOpenAI, model: str, prompt: str) -> str:
    options = {"ignore_eos": True, "skip_special_tokens": False}
    chunks = await client.completions.create(
        model=model, prompt=prompt, max_tokens=MOST, temperature=0, stream=True, extra_body=options
    )
    return "".join([chunk.choices[0].text async for chunk in chunks])


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_streams_keep_their_adapters_when_executors_and_the_scheduler_are_killed(
    tmp_path: Path, folders: dict[str, Path], expected: dict[tuple[str, str], str]
) -> None:
    lora = ("--enable-lora", "--max-lora-rank=8")
    modules = ("--lora-modules", *(f"{name}={path}" for name, path in folders.items()))
    cluster = Cluster(
        tmp_path,
        scheduler_options=modules,
        gateway_options=(*lora, *modules),
        executor_options=(*lora, "--max-loras=1", "--num-blocks=60", "--max-num-seqs=8"),
    )

    async def all_at_once(client: openai.AsyncOpenAI) -> list[tuple[tuple[str, str], str]]:
        cases = list(expected)
        return list(zip(cases, await asyncio.gather(*(stream(client, *case) for case in cases)), strict=True))

    def check(found: list[tuple[tuple[str, str], str]]) -> None:
        for case, text in found:
            assert text == expected[case], case

    with running(cluster, 2):
        url = f"{cluster.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            while len((await client.models.list()).data) < 4:
                await asyncio.sleep(0.1)
            check(await all_at_once(client))
            assert cluster.metric("lora_evictions_total") > 0, "two slots, and three adapters: nothing was exchanged"
            for victim, number in ((0, signal.SIGKILL), (1, signal.SIGTERM)):
                streams = asyncio.create_task(all_at_once(client))
                await asyncio.sleep(0.3)
                cluster.executors[victim].signal(number)
                await asyncio.to_thread(cluster.start_executor, f"next-{victim}")
                check(await streams)
            streams = asyncio.create_task(all_at_once(client))
            await asyncio.sleep(0.3)
            cluster.scheduler.close()
            await asyncio.to_thread(cluster.start_scheduler)
            check(await streams)
