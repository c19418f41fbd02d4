"""Joining the scheduler: admission of gateways, and the content of their Hello."""

import asyncio
from pathlib import Path

import pytest
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_shared.curve import SCHEDULER, Keys, public_file, secret_file
from pagewise_shared.errors import ConfigError, RefusedError
from pagewise_shared.protocol import PROTOCOL_MAJOR, unpack_int32s
from zmq.auth import create_certificates

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, TOKENIZER, serving


def scheduler_client(endpoint: str, keys: Keys | None = None) -> SchedulerClient:
    return SchedulerClient(endpoint, TOKENIZER, Metrics(MODEL), gateway_id="one", model_name=MODEL, keys=keys)


def make_keys(directory: Path) -> tuple[Keys, tuple[bytes, bytes]]:
    """The gateway's keys, and the scheduler's pair."""
    for name in (SCHEDULER, "gateway"):
        folder = secret_file(directory, name).parent
        folder.mkdir()
        public, _ = create_certificates(folder, name)
        secret_file(directory, name).chmod(0o600)
        if name == SCHEDULER:
            public_file(directory, name).parent.mkdir()
            public_file(directory, name).write_bytes(Path(public).read_bytes())
    scheduler = Keys(directory, SCHEDULER)
    return Keys(directory, "gateway"), (scheduler.public, scheduler.secret)


async def test_it_says_who_it_is() -> None:
    async with serving() as server:
        (hello,) = server.scheduler.hellos
        assert (hello.protocol_major, hello.gateway_id, hello.model_name) == (PROTOCOL_MAJOR, "gateway", MODEL)
    assert server.scheduler.goodbyes == ["stopped"]


async def test_connections_are_encrypted_if_there_are_keys(tmp_path: Path) -> None:
    keys, pair = make_keys(tmp_path)
    async with FakeScheduler(keys=pair).listening() as fake:
        linked = scheduler_client(fake.endpoint, keys)
        running = asyncio.create_task(linked.run())
        await fake.until(lambda: linked.answers)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fake.until(lambda: fake.goodbyes)


async def test_a_gateway_that_stops_before_its_welcome_says_goodbye() -> None:
    """The scheduler may have let it in already, and would take it for lost."""
    async with FakeScheduler(silent=True).listening() as fake:
        running = asyncio.create_task(scheduler_client(fake.endpoint).run())
        await fake.until(lambda: fake.hellos)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await fake.until(lambda: fake.goodbyes == ["stopped"])


async def test_a_scheduler_that_asks_for_a_key(tmp_path: Path) -> None:
    _, pair = make_keys(tmp_path)
    async with FakeScheduler(keys=pair).listening() as fake:
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await scheduler_client(fake.endpoint).run()
        assert raised.group_contains(ConfigError, match="asks for a key")


async def test_a_scheduler_that_refuses() -> None:
    async with FakeScheduler(refuse_gateways="another model\nis served").listening() as fake:
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.timeout(10):
                await scheduler_client(fake.endpoint).run()
        assert raised.group_contains(RefusedError, match=r"another model\?is served")


async def test_metrics_are_told_every_second_and_for_every_query() -> None:
    async with serving() as server:
        fake = server.scheduler
        await fake.until(lambda: fake.snapshots)
        families = {family.name: family for family in fake.snapshots["gateway"].families}
        assert {family.type for family in families.values()} == {"counter", "gauge", "histogram"}
        server.metrics.unauthorized.inc(3)
        async with server.http.get(server.url + "/metrics") as response:
            assert 'pagewise_http_unauthorized_total{model_name="fake/model"} 3.0' in await response.text()


async def test_reports_are_passed_on() -> None:
    reports = {("memory", ""): b'{"executors":[1]}', ("request", "abc"): b'{"request_id":"abc"}'}
    async with serving(FakeScheduler(reports=reports)) as server:
        assert await server.get("/debug/memory") == (200, {"executors": [1]})
        for name in ("abc", "cmpl-abc", "chatcmpl-abc"):
            assert await server.get(f"/debug/requests/{name}") == (200, {"request_id": "abc"})
        status, answer = await server.get("/debug/requests/nobody")
        assert (status, answer["error"]["code"]) == (404, "not_found")  # type: ignore[index]
        assert (await server.get("/debug/memory?limit=0"))[0] == 400


async def test_one_message_for_all_prompts_of_a_request() -> None:
    async with serving() as server:
        await server.post("/v1/completions", {"prompt": [[70, 71], [72]], "n": 2, "max_tokens": 3, "seed": 5})
        await server.post("/v1/completions", {"prompt": [73]})
        first, second = server.scheduler.submits
        assert [list(unpack_int32s(prompt.tokens)) for prompt in first.prompts] == [[70, 71], [72]]
        assert [prompt.max_tokens for prompt in first.prompts] == [3, 3]
        assert (first.params.n, first.params.sampling.seed, first.stream, second.stream) == (2, 5, 0, 4)
        assert 0 <= first.age_us < 5_000_000


async def test_a_request_that_no_frame_can_hold_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewise_gateway.scheduler_client.client.MAX_SUBMIT_BYTES", 2000)
    async with serving(FakeScheduler(max_model_len=4096)) as server:
        status, body = await server.post("/v1/completions", {"prompt": [5] * 1000, "max_tokens": 2})
        assert status == 400
        assert "bytes on its way to the scheduler" in str(body)
        status, _ = await server.post("/v1/completions", {"prompt": [5] * 100, "max_tokens": 2})
        assert status == 200
        assert len(server.scheduler.hellos) == 1


async def test_a_request_has_a_bounded_number_of_sequences() -> None:
    async with serving() as server:
        status, body = await server.post("/v1/completions", {"prompt": [[5]] * 1025, "n": 4})
        assert (status, body["error"]["param"]) == (400, "n")  # type: ignore[index]
        assert "the most that one request may have is 4096" in str(body)
