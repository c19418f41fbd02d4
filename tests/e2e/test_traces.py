"""Traces of requests through real processes, as an OpenTelemetry collector gets them."""

import json
import os
import secrets
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.processes import EXECUTOR, Served, get, serving
from benchmarks.scrape import total
from tests.otlp_collector import Collector, SpanReport, collecting

SECRET = "a prompt about zebras"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def server(collector: Collector) -> Iterator[Served]:
    # A small pool and a slow step: sequences are preempted, evicted blocks go to the host, and streams can be moved.
    environment = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test"}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with serving(
            "--simulate", "--simulate-step=0.01", "--executors=2", "--num-blocks=40", "--host-memory=16MiB",
            "--recovery=swap", "--no-profile", "--executor-timeout=3", "--log-format=json", "--log-requests",
            f"--otlp-traces-endpoint={collector.url}",
        ) as running:  # fmt: skip
            yield running
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def post(server: Served, body: dict[str, Any], **headers: str) -> tuple[int, bytes]:
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({"model": "pagewise-demo", "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def traced(server: Served, collector: Collector, body: dict[str, Any], count: int, **headers: str) -> list[SpanReport]:
    """The spans of a request of a client that has a trace, once so many are there."""
    trace = secrets.token_hex(16)
    status, answer = post(server, body, traceparent=f"00-{trace}-{'c1' * 8}-01", **headers)
    assert status == 200, answer
    collector.wait(lambda: len(collector.of_trace(trace)) >= count)
    return collector.of_trace(trace)


def named(spans: list[SpanReport], name: str) -> SpanReport:
    (found,) = [span for span in spans if span.name == name]
    return found


def follow_each_other(spans: list[SpanReport], names: list[str], whole: SpanReport) -> None:
    """They begin with the whole, each ends where the next one begins, and the last ends with the whole."""
    parts = [named(spans, name) for name in names]
    assert all(part.parent == whole.id for part in parts)
    edges = [whole.began, *(part.ended for part in parts)]
    assert [part.began for part in parts] == pytest.approx(edges[:-1], abs=0.002)
    assert edges[-1] == pytest.approx(whole.ended, abs=0.002)


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_tells_where_the_time_went(server: Served, collector: Collector, stream: bool) -> None:
    body = {"prompt": SECRET * 4, "max_tokens": 8, "temperature": 0.5, "top_p": 0.9, "stream": stream}
    spans = traced(server, collector, body, 10, **{"X-Request-Id": f"order-{stream}"})
    assert collector.paths == {"/v1/traces"}
    http, served = named(spans, "POST /v1/completions"), named(spans, "llm_request")
    assert http.parent == "c1" * 8
    assert served.parent == http.id
    assert {span.service for span in spans} == {"pagewise-gateway", "pagewise-scheduler", "pagewise-executor"}
    follow_each_other(spans, ["read", "tokenize", "wait", "stream"], http)
    follow_each_other(spans, ["queue", "prefill", "decode"], served)
    executor = named(spans, "executor")
    assert executor.parent == served.id
    assert executor.instance == executor.attributes["pagewise.executor.id"]
    assert executor.instance in ("executor-0", "executor-1")
    assert http.began <= served.began <= served.ended <= http.ended + 0.002
    for span in (http, served):
        told = span.attributes
        assert (told["gen_ai.usage.output_tokens"], told["gen_ai.request.max_tokens"]) == (8, 8)
        assert told["gen_ai.usage.input_tokens"] > 8
        assert (told["gen_ai.request.temperature"], told["gen_ai.request.top_p"]) == (0.5, 0.9)
        assert told["gen_ai.response.finish_reasons"] == ["length"]
        first, whole = told["gen_ai.latency.time_to_first_token"], told["gen_ai.latency.e2e"]
        assert told["gen_ai.latency.time_in_queue"] <= first < whole
    # The two parts are added up: a busy processor may read the first token late, which lengthens the
    # prefill and shortens the decoding.
    parts = ("gen_ai.latency.time_in_model_prefill", "gen_ai.latency.time_in_model_decode")
    assert sum(served.attributes[part] for part in parts) >= 8 * 0.01
    told = http.attributes
    assert (told["gen_ai.operation.name"], told["gen_ai.request.model"]) == ("text_completion", "pagewise-demo")
    assert told["gen_ai.request.stream"] is stream
    assert told["http.response.status_code"] == 200
    assert told["gen_ai.request.id"] == served.attributes["gen_ai.request.id"]
    assert told["pagewise.client_request_id"] == f"order-{stream}"


def test_a_trace_tells_nothing_of_the_text(server: Served, collector: Collector) -> None:
    traced(server, collector, {"prompt": SECRET, "max_tokens": 2, "stop": ["xylophone"], "user": "trombone"}, 8)
    for word in (b"zebras", b"xylophone", b"trombone"):
        assert word not in collector.bytes


def test_a_client_that_is_not_sampled_has_no_trace(server: Served, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    assert post(server, {"prompt": "a", "max_tokens": 2}, traceparent=f"00-{trace}-{'c1' * 8}-00")[0] == 200
    traced(server, collector, {"prompt": "b", "max_tokens": 2}, 9)  # earlier spans have been sent by now
    assert collector.of_trace(trace) == []


@pytest.mark.parametrize("given", [{}, {"traceparent": "nonsense"}])
def test_a_client_without_a_trace_gets_one(server: Served, collector: Collector, given: dict[str, str]) -> None:
    mark = secrets.token_hex(8)
    assert post(server, {"prompt": "a", "max_tokens": 2}, **{"X-Request-Id": mark, **given})[0] == 200

    def roots() -> list[SpanReport]:
        return [span for span in collector.spans if span.attributes.get("pagewise.client_request_id") == mark]

    collector.wait(lambda: len(roots()) == 1)
    assert roots()[0].parent == ""
    collector.wait(lambda: len(collector.of_trace(roots()[0].trace)) >= 9)


def test_a_request_that_is_refused_has_the_span_of_its_gateway(server: Served, collector: Collector) -> None:
    trace = secrets.token_hex(16)
    assert post(server, {"prompt": "a", "max_tokens": -2}, traceparent=f"00-{trace}-{'c1' * 8}-01")[0] == 400
    collector.wait(lambda: len(collector.of_trace(trace)) == 1)
    (span,) = collector.of_trace(trace)
    assert (span.attributes["http.response.status_code"], span.parent) == (400, "c1" * 8)


def test_preemptions_are_events_and_recoveries_are_spans(server: Served, collector: Collector) -> None:
    body = {"prompt": "abc", "n": 4, "max_tokens": 320, "temperature": 1.0, "seed": 3}
    spans = traced(server, collector, body, 10)
    served = named(spans, "llm_request")
    events = [name for name, _ in served.events]
    assert served.attributes["pagewise.preemptions"] >= 1
    assert events.count("preempted") >= 1
    assert events.count("resumed") >= 1
    told = dict(served.events)["preempted"]
    assert told["blocks"] > 0
    assert told["reason"]
    recoveries = [span for span in spans if span.name == "recovery"]
    assert recoveries
    assert all(span.parent == served.id for span in recoveries)
    assert {span.attributes["pagewise.recovery.source"] for span in recoveries} <= {"host", "peer"}
    assert all(span.attributes["pagewise.recovery.method"] == "load" for span in recoveries)


def test_a_request_whose_executor_is_killed_has_one_trace(server: Served, collector: Collector) -> None:
    server.wait_for_metric("executors_ready", 2)
    trace = secrets.token_hex(16)
    statuses: list[int] = []

    def ask() -> None:
        body = {"prompt": SECRET, "max_tokens": 200, "stream": True}
        statuses.append(post(server, body, traceparent=f"00-{trace}-{'c1' * 8}-01")[0])

    client = threading.Thread(target=ask)
    client.start()
    try:
        victim = running_on(server)
        os.kill(next(pid for pid in server.pids(EXECUTOR) if f"--executor-id={victim}" in command(pid)), signal.SIGKILL)
    finally:
        client.join()
    assert statuses == [200]
    collector.wait(lambda: sum(span.name == "executor" for span in collector.of_trace(trace)) >= 2)
    collector.wait(lambda: any(span.name.startswith("POST") for span in collector.of_trace(trace)))
    spans = collector.of_trace(trace)
    served = named(spans, "llm_request")
    (lost, taken) = sorted((span for span in spans if span.name == "executor"), key=lambda span: span.began)
    assert lost.instance == victim
    assert taken.instance != victim
    assert dict(served.events)["moved"] == {"from": victim, "to": taken.instance}
    assert served.attributes["pagewise.moves"] == 1
    assert served.attributes["gen_ai.usage.output_tokens"] == 200
    assert named(spans, "POST /v1/completions").attributes["gen_ai.usage.output_tokens"] == 200


def running_on(server: Served) -> str:
    """The executor that runs the only request."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for report in get(f"{server.url}/debug/memory?limit=1")["executors"]:
            if report["running"]:
                return str(report["executor_id"])
        time.sleep(0.05)
    raise AssertionError("nothing runs")


def command(pid: int) -> list[str]:
    with open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")


def test_a_collector_that_is_out_of_order_holds_nobody_up(server: Served, collector: Collector) -> None:
    collector.refuses = True
    try:
        began = time.monotonic()
        for _ in range(5):
            assert post(server, {"prompt": "a", "max_tokens": 2})[0] == 200
        assert time.monotonic() - began < 10
        deadline = time.monotonic() + 20
        while not total(server.scrape(), "gateway_trace_spans_total", outcome="failed"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        collector.refuses = False


def test_each_line_of_the_log_is_json_and_names_its_trace(server: Served, collector: Collector) -> None:
    spans = traced(server, collector, {"prompt": "a", "max_tokens": 2}, 9)
    http = named(spans, "POST /v1/completions")
    server.wait_for_line(http.trace)
    lines = [json.loads(line) for line in server.output if line.startswith("{")]
    (line,) = [line for line in lines if line.get("trace_id") == http.trace]
    assert (line["service"], line["process"], line["message"]) == ("gateway", "gateway-0", "request ended")
    assert (line["request_id"], line["span_id"]) == (http.attributes["gen_ai.request.id"], http.id)
    assert (line["status"], line["output_tokens"], line["finish"]) == (200, 2, "length")
    assert {line["process"] for line in lines if "process" in line} >= {"scheduler", "gateway-0", "executor-0"}
    assert {line["service"] for line in lines if "service" in line} >= {"serve", "scheduler", "gateway", "executor"}
    loose = [line for line in server.output if not line.startswith("{") and line.strip()]
    assert all(line.startswith(("Serving ", "  curl ")) for line in loose), loose
