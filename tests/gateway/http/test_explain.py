"""``/debug/explain``: the scheduler's report, and the gateway's own fact: whether the client read slowly."""

import asyncio
import json
import re

import msgspec
import pytest
from pagewise.main import main
from pagewise_gateway.http.explanation import delivery, sentences
from pagewise_gateway.http.writing import Deliveries
from pagewise_shared.reports import RequestReport

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_connections import COMPLETION, LONG, http_bytes, read_late
from tests.gateway.server import serving


def told(request_id: str) -> bytes:
    return msgspec.json.encode(waiting(request_id))


def waiting(request_id: str) -> RequestReport:
    """The report of a request that waits."""
    return RequestReport(
        *(request_id, "", "", "", "waiting", 3, 0, 0, 0, 0, 0, 0, 1.0, None, None),
        arrived=0.0,
        state="waiting",
        total_seconds=1.0,
        ended_seconds_ago=None,
        executors=[],
        cached_tokens={},
        sequences=[],
    )


async def test_a_slow_client_is_the_cause() -> None:
    scheduler = FakeScheduler(max_model_len=LONG)
    request = {"prompt": "the fox", "max_tokens": 3000, "stream": True, "n": 8, "logprobs": 20}
    async with serving(scheduler, slow_reader_seconds=5) as server:
        sent = http_bytes(COMPLETION, json.dumps(request).encode(), "Connection: close\r\n")
        received = await read_late(server, sent, 1.0)
        named = re.search(rb'"id":"(cmpl-(\w+))"', received)
        assert named is not None
        name, own = named[1].decode(), named[2].decode()
        scheduler.reports["request", own] = told(own)
        status, answer = await server.get(f"/debug/explain/{name}")
        assert status == 200
        assert answer["client"]["known"]  # type: ignore[index]
        assert answer["client"]["blocked_seconds"] > 0.1  # type: ignore[index]
        assert "for its client, which read more slowly" in answer["sentences"][-1]  # type: ignore[index]


async def test_a_client_that_reads_at_once_and_one_of_another_gateway() -> None:
    async with serving() as server:
        _, answer = await server.post(COMPLETION, {"prompt": "the fox", "max_tokens": 3})
        own = str(answer["id"]).removeprefix("cmpl-")
        for name in (own, "elsewhere"):
            server.scheduler.reports["request", name] = told(name)
        _, here = await server.get(f"/debug/explain/{own}")
        assert here["sentences"] == sentences(waiting(own))
        _, elsewhere = await server.get("/debug/explain/elsewhere")
        assert elsewhere["client"] == {"known": False, "blocked_seconds": None}
        assert "is not known to this gateway" in elsewhere["sentences"][-1]  # type: ignore[index]


async def test_unknown_requests_and_older_schedulers() -> None:
    async with serving() as server:
        assert (await server.get("/debug/explain/nobody"))[0] == 404
        server.scheduler.reports["request", "x"] = b'{"request_id": "x", "sequences": []}'
        status, answer = await server.get("/debug/explain/x")
        assert status == 404
        assert "explains no requests" in answer["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("blocked", "total", "slow"), [(0.003, 0.1, False), (0.05, 10.0, False), (0.02, 1.0, True), (0.2, 10.0, True)]
)
def test_a_client_is_blamed_for_a_noticeable_part_of_the_time_only(blocked: float, total: float, slow: bool) -> None:
    assert (delivery(blocked, total) is not None) == slow


@pytest.mark.parametrize("most", [1, 3])
def test_deliveries_are_bounded(most: int) -> None:
    deliveries = Deliveries(most)
    for number in range(5):
        deliveries.add(str(number), 1.0)
    deliveries.add("4", 1.5)
    assert deliveries.blocked("4") == 2.5
    assert deliveries.blocked(str(4 - most)) is None


async def test_the_commands_name_the_variable_for_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(api_keys="alice:sk-alice") as server:
        for command, *arguments in (["vmstat"], ["pmap", "x"], ["explain", "x"]):
            assert await asyncio.to_thread(main, [command, *arguments, "--url", server.url]) == 1
            assert "PAGEWISE_API_KEY" in capsys.readouterr().err
