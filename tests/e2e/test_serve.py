"""The demo model through real processes, with the real ``openai`` client."""

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import openai
import pytest
import torch
import transformers
from pagewise_shared.model_files import resolve_model

from benchmarks.processes import EXECUTOR, GATEWAY, SCHEDULER, Served, alive, serving

TEXTS = [
    "import os",
    "class Point:\n    def __init__(self",
    "def main(argv):",
    "for key, value in",
    "raise ValueError(",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # A small pool: 64 streams do not fit at once, so sequences are preempted while this runs.
    with serving("--num-blocks", "26", "--max-num-seqs", "48", "--executor-timeout", "5") as running:
        yield running


@pytest.fixture(scope="module")
def requests() -> list[tuple[str, int]]:
    rng = random.Random(5)
    lines = [rng.choice(TEXTS) + f"  # {rng.randrange(1000)}\n" * rng.randrange(1, 8) for _ in range(16)]
    return [(line, rng.randrange(1, 90)) for line in lines] * 4


@pytest.fixture(scope="module")
def references(requests: list[tuple[str, int]]) -> list[str]:
    path = resolve_model("pagewise-demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    texts = []
    for text, max_tokens in requests[:16]:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    return texts * 4


async def stream_text(
    client: openai.AsyncOpenAI, prompt: str, max_tokens: int, hang_up_after: int | None = None
) -> str:
    stream = await client.completions.create(
        model="pagewise-demo", prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    text, chunks = "", 0
    async for chunk in stream:
        text += chunk.choices[0].text
        chunks += 1
        if hang_up_after is not None and chunks >= hang_up_after:
            await stream.close()
            break
    return text


async def run_all(url: str, requests: list[tuple[str, int]], hang_up: bool) -> list[str]:
    limits = httpx.Limits(max_connections=200)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=httpx.AsyncClient(limits=limits, timeout=240)
    ) as client:
        return await asyncio.gather(
            *(
                stream_text(client, text, max_tokens, hang_up_after=3 if hang_up and number % 3 == 0 else None)
                for number, (text, max_tokens) in enumerate(requests)
            )
        )


async def outgrow(url: str) -> list[str]:
    """The outputs of a request that the pool cannot hold, though it can hold each of them: one has to be preempted.

    They are sampled, because equal outputs would share their blocks, and all of them would fit.
    """
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:
        answer = await client.completions.create(
            model="pagewise-demo",
            prompt=TEXTS[0],
            n=3,
            max_tokens=180,
            temperature=1.0,
            seed=7,
            extra_body={"ignore_eos": True},
        )
        return [choice.text for choice in answer.choices]


@pytest.mark.timeout(300)  # the references are computed here, too
async def test_64_streams_equal_their_references_while_a_third_hang_up(
    server: Served, requests: list[tuple[str, int]], references: list[str]
) -> None:
    alone = await outgrow(server.url)
    assert len(set(alone)) == 3
    before = server.metric("num_preemptions_total")
    texts, outgrown = await asyncio.gather(run_all(server.url, requests, hang_up=True), outgrow(server.url))
    assert outgrown == alone
    for number, (text, reference) in enumerate(zip(texts, references, strict=True)):
        if number % 3 == 0:
            assert reference.startswith(text)
        else:
            assert text == reference
    assert server.metric("num_preemptions_total") > before
    server.wait_for_metric("num_requests_running", 0)
    server.wait_for_metric("num_requests_waiting", 0)
    server.wait_for_metric("kv_cache_usage_perc", 0)


async def test_an_executor_that_is_killed_costs_nobody_a_token(
    server: Served, requests: list[tuple[str, int]], references: list[str]
) -> None:
    async def kill() -> None:
        await asyncio.sleep(0.7)
        os.kill(server.pids(EXECUTOR)[0], signal.SIGKILL)

    texts, _ = await asyncio.gather(run_all(server.url, requests[:24], hang_up=False), kill())
    assert texts == references[:24]
    server.wait_for_metric("kv_cache_usage_perc", 0)


async def test_a_scheduler_that_is_killed_costs_nobody_a_token(
    server: Served, requests: list[tuple[str, int]], references: list[str]
) -> None:
    async def kill() -> None:
        await asyncio.sleep(0.7)
        os.kill(server.pids(SCHEDULER)[0], signal.SIGKILL)

    texts, _ = await asyncio.gather(run_all(server.url, requests[:24], hang_up=False), kill())
    assert texts == references[:24]
    server.wait_for_metric("kv_cache_usage_perc", 0)


def test_sampling_with_a_seed_is_reproducible_and_without_one_is_not(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def sample(seed: int | None) -> str:
            answer = client.chat.completions.create(
                model="pagewise-demo",
                messages=[{"role": "user", "content": "Write a function named main."}],
                max_tokens=24,
                temperature=1.0,
                seed=seed,
            )
            assert answer.usage is not None
            assert answer.usage.completion_tokens <= 24
            return answer.choices[0].message.content or ""

        assert sample(7) == sample(7)
        assert len({sample(None) for _ in range(3)} | {sample(8)}) > 1


def test_a_conversation_is_not_computed_twice(server: Served) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def cached(prompt: str, **extra: object) -> int:
            answer = client.completions.create(
                model="pagewise-demo", prompt=prompt, max_tokens=8, temperature=0, extra_body=extra
            )
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            found = answer.usage.prompt_tokens_details.cached_tokens
            assert found is not None
            assert found < answer.usage.prompt_tokens
            return found

        history = "class Account:\n    def __init__(self, owner, balance):\n        self.owner = owner\n"
        first = cached(history)
        again = cached(history)
        assert again > first
        assert cached(history + "        self.balance = balance\n") >= again
        assert cached(history, cache_salt="somebody else's") == 0
        hits, queries = (server.metric(f"prefix_cache_{kind}_total") for kind in ("hits", "queries"))
        assert 0 < hits < queries


def test_beam_search_finds_what_transformers_finds(server: Served) -> None:
    path = resolve_model("pagewise-demo")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    ids = tokenizer(TEXTS[1], return_tensors="pt").input_ids
    found = model.generate(ids, num_beams=4, num_return_sequences=4, max_new_tokens=20, do_sample=False)
    expected = tokenizer.batch_decode(found[:, ids.shape[1] :], skip_special_tokens=True)
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="pagewise-demo",
            prompt=TEXTS[1],
            max_tokens=20,
            n=4,
            extra_body={"use_beam_search": True},
        )
        assert [choice.text for choice in answer.choices] == expected
        stream = client.completions.create(
            model="pagewise-demo",
            prompt=TEXTS[1],
            max_tokens=20,
            n=4,
            stream=True,
            extra_body={"use_beam_search": True},
        )
        texts = [""] * 4
        for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == expected
    server.wait_for_metric("num_requests_running", 0)
    server.wait_for_metric("kv_cache_usage_perc", 0)


@pytest.mark.parametrize("module", [SCHEDULER, GATEWAY])
def test_only_executors_load_torch(server: Served, module: str) -> None:
    (pid,) = server.pids(module)
    with open(f"/proc/{pid}/maps") as maps:
        assert "torch" not in maps.read()


def test_health_turns_good_when_an_executor_joins_and_ctrl_c_stops_everything() -> None:
    with serving("--simulate", "--executors", "2") as simulated:
        simulated.wait_for_metric("executors_ready", 2)
        healthy = {"status": "ok", "executors": 2, "scheduler": True, "problems": []}
        assert httpx.get(f"{simulated.url}/health").json() == healthy
        pids = [pid for module in (EXECUTOR, SCHEDULER, GATEWAY) for pid in simulated.pids(module)]
        assert len(pids) == 4
        assert simulated.interrupt() == 0
        assert not any(alive(pid) for pid in pids)


def test_services_die_with_a_serve_that_is_killed() -> None:
    with serving("--simulate") as simulated:
        pids = [pid for module in (EXECUTOR, SCHEDULER, GATEWAY) for pid in simulated.pids(module)]
        assert len(pids) == 3
        simulated.process.kill()
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "pagewise.main", "serve", "--simulate", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["/no/such/model"], "no such model: /no/such/model"),
        (["--device", "cuda"], "torch sees no CUDA device"),
        (["--kv-memory", "4000GiB"], "--kv-memory asks for 4000GiB, and "),
        (["--kv-memory", "80KiB"], "it would hold 16 tokens (1 block, 64KiB). One sequence of 256 tokens"),
        (["--simulate", "--num-blocks", "3"], "(3 blocks). One sequence of 256 tokens, which is the least, needs 16"),
        (["--max-model-len", "1000000"], "over the model's own limit"),
    ],
)
def test_it_says_plainly_why_it_cannot_start(arguments: list[str], reason: str) -> None:
    if "cuda" in arguments and torch.cuda.is_available():
        arguments, reason = ["/no/such/model"], "no such model"
    done = subprocess.run(
        [sys.executable, "-m", "pagewise.main", "serve", "--port", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode != 0
    assert reason in done.stderr
    assert "Traceback" not in done.stderr
