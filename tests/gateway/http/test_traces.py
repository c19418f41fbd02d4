"""A request of which no trace can be made is still answered."""

import asyncio

import pytest
from pagewise_gateway.http.request_log import RequestTrace
from pagewise_shared.tracing import Tracing

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_connections import COMPLETION, LONG
from tests.gateway.server import serving
from tests.otlp_collector import collecting


async def test_a_request_whose_trace_fails_does_not_go_on_after_its_client_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no attributes")

    monkeypatch.setattr(RequestTrace, "generated", fail)
    scheduler = FakeScheduler(max_model_len=LONG, step_seconds=0.005)
    with collecting() as collector:
        tracing = Tracing(collector.url, "gateway", "gateway", lambda outcome, spans: None)
        async with serving(scheduler, tracing=tracing) as server:
            body = {"prompt": "a", "max_tokens": 10_000, "ignore_eos": True, "stream": True}
            async with server.http.post(server.url + COMPLETION, json=body) as response:
                await response.content.readline()
            async with asyncio.timeout(20):
                await scheduler.until_idle()
            assert len(scheduler.aborts) == 1
        tracing.close()
