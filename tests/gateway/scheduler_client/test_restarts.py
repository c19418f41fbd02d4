"""A scheduler dies, is stuck, or is replaced: clients see a pause, and then exactly the same outputs as without."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway.scheduler_client import connection
from pagewise_shared.protocol import HeartbeatAck, Outputs, Rejoin, unpack_int32s

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, TOKENIZER, Server, gateway

COMPLETION = "/v1/completions"
PROMPT = "the quick brown fox "
IDS = TOKENIZER.encode(PROMPT)
SLOW = {"step_seconds": 0.01}


@pytest.fixture(autouse=True)
def short_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions may be as short as tests are."""
    monkeypatch.setattr(connection, "_LEAST_SESSION_SECONDS", 0.0)


@asynccontextmanager
async def served(**fields: Any) -> AsyncIterator[tuple[Server, AsyncExitStack]]:
    """A gateway that has joined a scheduler; closing the stack kills that."""
    async with AsyncExitStack() as life:
        first = await life.enter_async_context(FakeScheduler(**SLOW, **fields).listening())
        async with gateway(first.endpoint, first) as server:
            await server.until_joined()
            yield server, life


async def events_of(server: Server, body: dict[str, Any], path: str = COMPLETION) -> list[dict[str, Any]]:
    """The chunks of a stream, which ends well."""
    async with server.http.post(server.url + path, json={"model": MODEL, **body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        *events, done, rest = (await response.text()).split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index)


def repeated(shift: int, count: int, ids: list[int] = IDS) -> str:
    return TOKENIZER.decode([ids[(k + shift) % len(ids)] for k in range(count)])


async def until_tokens(server: Server, count: int) -> None:
    """Wait until the fake has generated so many tokens of something."""
    await server.scheduler.until(
        lambda: any(stream.position >= count for run in server.scheduler.running for stream in run.streams)
    )


async def test_a_stream_goes_on_at_the_next_scheduler() -> None:
    async with served() as (server, life):
        body = {"prompt": PROMPT, "max_tokens": 60, "n": 3, "stream_options": {"include_usage": True}}
        client = asyncio.create_task(events_of(server, body))
        await until_tokens(server, 20)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            chunks = await client
            (again,) = second.submits
        for index in range(3):
            assert text_of(chunks, index) == repeated(index, 60)
        first = server.scheduler.last
        assert (again.request_id, again.params.sampling, again.params.n) == (first.request_id, first.params.sampling, 3)
        assert [len(one.tokens) >= 4 * 15 for one in again.prompts[0].progress] == [True] * 3
        assert again.age_us > first.age_us
        assert chunks[-1]["usage"]["completion_tokens"] == 180
        assert 'gateway_rejoins_total{model_name="fake/model"} 1.0' in server.shown()
        assert f'prompt_tokens_total{{model_name="fake/model"}} {len(IDS)}.0' in server.shown()
        assert 'request_success_total{finished_reason="length",model_name="fake/model"} 3.0' in server.shown()


async def test_an_answer_that_does_not_stream_goes_on_too() -> None:
    async with served() as (server, life):
        client = asyncio.create_task(server.post(COMPLETION, {"prompt": [PROMPT, "a b c d"], "max_tokens": 60}))
        await until_tokens(server, 20)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint):
            status, answer = await client
        choices: Any = answer["choices"]
        assert status == 200
        expected = [repeated(0, 60), repeated(0, 60, TOKENIZER.encode("a b c d"))]
        assert [choice["text"] for choice in choices] == expected


async def test_outputs_that_have_ended_are_not_generated_again() -> None:
    """One by a stop string, one by a stop token; the third continues."""
    prompts = [TOKENIZER.encode("the dog, over"), [*TOKENIZER.encode("lazy"), 330], IDS]
    body = {"prompt": prompts, "max_tokens": 60, "stop": ["dog"], "stop_token_ids": [330]}
    async with served() as (server, life):
        client = asyncio.create_task(events_of(server, body))
        await until_tokens(server, 30)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            chunks = await client
            (again,) = second.submits
        progress = [prompt.progress[0] for prompt in again.prompts]
        assert [one.finished for one in progress] == [True, True, False]
        assert TOKENIZER.decode(unpack_int32s(progress[0].tokens)).endswith("dog")
        assert [text_of(chunks, index) for index in range(3)] == ["the ", "lazy", repeated(0, 60)]
        assert [endings(chunks, index) for index in range(3)] == [
            [("stop", "dog")],
            [("stop", 330)],
            [("length", None)],
        ]
        assert server.scheduler.stops == [0]


def endings(chunks: list[dict[str, Any]], index: int) -> list[tuple[str, Any]]:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return [(one["finish_reason"], one["stop_reason"]) for one in choices if one["finish_reason"]]


@pytest.mark.parametrize("echo", [False, True])
async def test_log_probabilities_come_once(echo: bool) -> None:
    async with served() as (server, life):
        body = {"prompt": PROMPT, "max_tokens": 40, "logprobs": 2, "echo": echo, "return_token_ids": True}
        client = asyncio.create_task(events_of(server, body))
        await until_tokens(server, 10)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint):
            chunks = await client
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        tokens = [token for choice in choices for token in choice["logprobs"]["tokens"]]
        expected = [*IDS * echo, *(IDS[k % len(IDS)] for k in range(40))]
        assert tokens == [TOKENIZER.token_text(token) for token in expected]
        assert [token for choice in choices for token in choice["token_ids"]] == expected[len(IDS) * echo :]
        assert text_of(chunks) == TOKENIZER.decode(expected)


async def test_beam_searches_start_over() -> None:
    """The outputs of a prompt that has been answered stay."""
    async with served(paused=True) as (server, life):
        body = {"prompt": [PROMPT, "a b c"], "max_tokens": 12, "use_beam_search": True, "n": 2, "temperature": 0}
        client = asyncio.create_task(events_of(server, body))
        await server.scheduler.until_running()
        (run,) = server.scheduler.running
        for stream in run.streams[2:]:
            stream.finished = True  # the second prompt takes its time
        server.scheduler.paused = False
        await server.scheduler.until_idle()
        await asyncio.sleep(0.05)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            chunks = await client
            (again,) = second.submits
        done, open_ = (prompt.progress for prompt in again.prompts)
        assert [(len(one.tokens), one.finished) for one in done] == [(48, True)] * 2
        assert [(one.tokens, one.finished) for one in open_] == [(b"", False)] * 2
        for index in range(4):
            ids = IDS if index < 2 else TOKENIZER.encode("a b c")
            assert text_of(chunks, index) == repeated(index % 2, 12, ids)


async def test_a_request_that_has_no_token_yet_was_taken_all_the_same() -> None:
    async with served(paused=True) as (server, life):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 5}))
        await server.scheduler.until_running()
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            assert text_of(await client) == repeated(0, 5)
            (progress,) = second.last.prompts[0].progress
            assert (progress.tokens, progress.finished) == (b"", False)


async def test_requests_are_submitted_again_in_their_order_and_numbered_anew() -> None:
    async with served(paused=True) as (server, life):
        clients = []
        for number in range(5):
            clients.append(asyncio.create_task(events_of(server, {"prompt": f"number {number}", "n": 2})))
            await server.scheduler.until(lambda n=number: len(server.scheduler.submits) > n)
        await life.aclose()
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            await asyncio.gather(*clients)
            assert [one.request_id for one in second.submits] == [one.request_id for one in server.scheduler.submits]
            assert [one.stream for one in second.submits] == [0, 2, 4, 6, 8]


async def test_a_client_that_leaves_meanwhile_is_forgotten() -> None:
    async with served() as (server, life):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 400}))
        await until_tokens(server, 3)
        await life.aclose()
        client.cancel()
        await server.scheduler.until(lambda: server.scheduler_client.num_live == 0)
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            await server.until_joined()
            assert (await server.post(COMPLETION, {"prompt": PROMPT}))[0] == 200
            assert len(second.submits) == 1


async def test_requests_wait_for_a_scheduler() -> None:
    async with served() as (server, life):
        await life.aclose()
        await server.scheduler.until(lambda: not server.scheduler_client.answers)
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 5}))
        await server.scheduler.until(lambda: server.scheduler_client.num_live)
        assert (await server.get("/health"))[0] == 503
        for path in ("/metrics", "/debug/memory", "/debug/requests/x"):
            async with server.http.get(server.url + path) as response:
                assert (response.status, response.headers["Retry-After"]) == (503, "2")
        async with FakeScheduler(**SLOW).listening(server.scheduler.endpoint) as second:
            assert text_of(await client) == repeated(0, 5)
            if len(second.hellos) == 1:  # a machine that is busy may let a second one through
                assert second.last.prompts[0].progress == (), "it was never taken before"


async def test_nobody_waits_longer_than_the_timeout() -> None:
    async with FakeScheduler(**SLOW).listening() as first:
        life = AsyncExitStack()
        scheduler = await life.enter_async_context(FakeScheduler(**SLOW).listening())
        async with gateway(scheduler.endpoint, first, scheduler_timeout=0.4) as server:
            await server.until_joined()
            body = {"prompt": PROMPT, "max_tokens": 400, "stream": True}
            async with server.http.post(server.url + COMPLETION, json=body) as response:
                await response.content.readuntil(b"\n\n")
                await life.aclose()
                rest = await response.text()
            error = json.loads(rest.strip().split("\n\n")[-1].removeprefix("data: "))["error"]
            assert (error["code"], error["message"]) == ("service_unavailable", "no scheduler answers")
            for stream in (False, True):
                body = {"prompt": PROMPT, "stream": stream}
                async with server.http.post(server.url + COMPLETION, json=body) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "2")
                    assert (await response.json())["error"]["message"] == "no scheduler answers"
            shown = server.shown()
        assert 'request_success_total{finished_reason="error",model_name="fake/model"} 1.0' in shown, (
            "those that were never taken do not count"
        )


async def test_limits_stay_known_while_a_scheduler_restarts() -> None:
    async with served() as (server, life):
        await life.aclose()
        fresh = FakeScheduler(ready=0, max_model_len=0, vocab_size=0, **SLOW)
        async with fresh.listening(server.scheduler.endpoint):
            await fresh.until(lambda: fresh.members and server.scheduler_client.answers)
            await asyncio.sleep(0.05)
            assert (await server.get("/health"))[0] == 503
            status, _ = await server.post(COMPLETION, {"prompt": [5] * 512, "max_tokens": 1})
            assert status == 400
            assert (await server.post(COMPLETION, {"prompt": PROMPT}))[0] == 200, "the scheduler lets it wait"


async def test_a_refusal_by_a_scheduler_that_has_just_started_is_not_the_last_word() -> None:
    async with served() as (server, life):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 60}))
        await until_tokens(server, 10)
        await life.aclose()
        second = FakeScheduler(**SLOW, refuse=("unavailable", "no executor", 0))
        async with second.listening(server.scheduler.endpoint):
            await second.until(lambda: second.members)
            await asyncio.sleep(0.2)
            second.refuse = None
            assert text_of(await client) == repeated(0, 60)


async def test_a_refusal_that_stays_is_told() -> None:
    async with AsyncExitStack() as life:
        first = await life.enter_async_context(FakeScheduler(paused=True).listening())
        async with gateway(first.endpoint, first, scheduler_timeout=0.5) as server:
            await server.until_joined()
            client = asyncio.create_task(server.post(COMPLETION, {"prompt": PROMPT}))
            await first.until_running()
            await life.aclose()
            async with FakeScheduler(refuse=("overloaded", "full", 9)).listening(first.endpoint):
                status, answer = await client
                error: Any = answer["error"]
                assert (status, error["message"]) == (429, "full")


@pytest.mark.parametrize("how", ["rejoin", "other epoch", "garbage", "impossible", "again"])
async def test_a_session_that_is_lost_loses_no_token(how: str) -> None:
    async with served() as (server, _):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 60}))
        await until_tokens(server, 10)
        scheduler = server.scheduler
        (member,) = scheduler.members.values()
        member.runs.clear()  # as if tokens had been lost on the way, and more with them
        match how:
            case "rejoin":
                await scheduler.send(Rejoin())
            case "other epoch":
                await scheduler.send(HeartbeatAck(member.epoch + 5))
            case "garbage":
                await scheduler.send(b"\x93\x01")
            case "impossible":
                await scheduler.send(Outputs(member.epoch, streams=b"\0\0\0\0"))
            case "again":
                await scheduler.welcome_again()
        assert text_of(await client) == repeated(0, 60)
        assert len(scheduler.submits) == 2
        assert len(unpack_int32s(scheduler.last.prompts[0].progress[0].tokens)) >= 9


async def test_a_scheduler_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MOST_SILENCE", 0.3)
    async with served() as (server, _):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 60}))
        await until_tokens(server, 10)
        server.scheduler.silent = True
        await server.scheduler.until(lambda: len(server.scheduler.hellos) > 1)
        server.scheduler.silent = False
        assert text_of(await client) == repeated(0, 60)


async def test_frames_of_another_epoch_are_dropped_and_counted() -> None:
    async with served() as (server, _):
        client = asyncio.create_task(events_of(server, {"prompt": PROMPT, "max_tokens": 30}))
        await until_tokens(server, 5)
        (member,) = server.scheduler.members.values()
        for _ in range(3):
            await server.scheduler.send(Outputs(member.epoch - 1, streams=b"\0" * 4, tokens=b"\1\0\0\0"))
        assert text_of(await client) == repeated(0, 30)
        assert 'gateway_frames_dropped_total{model_name="fake/model",reason="stale_epoch"} 3.0' in server.shown()
        assert len(server.scheduler.submits) == 1


async def test_requests_wait_for_the_first_scheduler_and_learn_what_is_missing(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/scheduler"
    fake = FakeScheduler(ready=0, max_model_len=0, vocab_size=0)
    async with gateway(endpoint, fake, scheduler_timeout=0.5) as server:
        status, body = await server.post(COMPLETION, {"prompt": PROMPT})
        assert (status, body["error"]["message"]) == (503, "no scheduler answers")  # type: ignore[index]
        assert 'gateway_requests_refused_total{model_name="fake/model",reason="no_scheduler"} 1.0' in server.shown()
    async with gateway(endpoint, fake) as server:
        waiting = asyncio.create_task(server.post(COMPLETION, {"prompt": PROMPT}))
        await asyncio.sleep(0.3)
        async with fake.listening(endpoint):
            status, body = await waiting
            assert (status, body["error"]["message"]) == (503, "no executor has joined the scheduler yet")  # type: ignore[index]
    async with gateway(endpoint, ready := FakeScheduler()) as server:
        waiting = asyncio.create_task(server.post(COMPLETION, {"prompt": PROMPT, "max_tokens": 3}))
        await asyncio.sleep(0.3)
        async with ready.listening(endpoint):
            status, body = await waiting
            assert status == 200
