"""The tracer: whether it is there, and the fate of spans."""

import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from pagewise_shared.config import GatewayConfig, SchedulerConfig, ServeConfig, build_config
from pagewise_shared.errors import ConfigError
from pagewise_shared.tracing import Tracing, open_tracing, traces_url

from tests.otlp_collector import Collector, collecting


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def test_without_an_endpoint_there_is_none_and_nothing_is_imported() -> None:
    assert open_tracing(None, "a", "b", lambda outcome, spans: None) is None
    code = (
        "import sys, pagewise_gateway.service, pagewise_scheduler.service\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_opentelemetry_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint needs .* pip install 'pagewise\[otel\]'"):
        open_tracing("http://127.0.0.1:1", "a", "b", lambda outcome, spans: None)


@pytest.mark.parametrize("kind", [ServeConfig, GatewayConfig, SchedulerConfig])
def test_an_endpoint_is_a_url(kind: type[ServeConfig]) -> None:
    for wrong in ("collector:4317", "grpc://collector:4317", "http://", "http://[::1", "http://collector:port"):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint"):
            build_config(kind, {"otlp_traces_endpoint": wrong}, {})
    build_config(kind, {"otlp_traces_endpoint": "http://collector:4318"}, {})


@pytest.mark.parametrize("name", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE"])
def test_variables_that_are_no_sizes_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("many", "0", "-5"):
        monkeypatch.setenv(name, wrong)
        with pytest.raises(ConfigError, match=f"{name}='{wrong}' is no number above 0"):
            open_tracing("http://127.0.0.1:1", "a", "b", lambda outcome, spans: None)
    monkeypatch.setenv(name, "")
    tracing = open_tracing("http://127.0.0.1:1", "a", "b", lambda outcome, spans: None)
    assert tracing is not None
    tracing.close()


def test_an_endpoint_without_a_path_gets_that_of_otlp() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("http://collector:4318/") == "http://collector:4318/v1/traces"
    assert traces_url("https://collector/api/otlp?x=1") == "https://collector/api/otlp?x=1"


def test_spans_are_counted_by_what_became_of_them(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    counts: Counter[str] = Counter()
    tracing = Tracing(collector.url, "service", "instance", lambda outcome, spans: counts.update({outcome: spans}))
    collector.refuses = True
    for _ in range(30):
        tracing.span("one", tracing.parent({}), time.monotonic(), time.monotonic())
    collector.wait(lambda: counts["failed"] > 0)
    assert counts["dropped"] > 0
    collector.refuses = False
    collector.wait(lambda: counts["failed"] + counts["dropped"] == 30)
    tracing.span("one", tracing.parent({}), time.monotonic(), time.monotonic())
    tracing.close()
    assert counts["sent"] == 1
    assert [span.name for span in collector.spans] == ["one"]


def test_whoever_ends_spans_does_not_wait_for_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: Counter[str] = Counter()
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections, and never answers
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        tracing = Tracing(url, "a", "b", lambda outcome, spans: counts.update({outcome: spans}))
        began = time.monotonic()
        for _ in range(3000):
            tracing.span("one", tracing.parent({}), began, began)
        ended = time.monotonic()
        tracing.close()
        # An answer is awaited for 10 s. The work itself takes less than a second where nothing runs beside it.
        assert ended - began < 8.0
        assert time.monotonic() - ended < 8.0
    # One batch is under way. The others are not sent when it is over.
    for thread in threading.enumerate():
        if "Otel" in thread.name or thread.name == "last traces":
            assert thread.daemon
            thread.join(20)
            assert not thread.is_alive()
    assert counts["failed"] + counts["dropped"] == 3000


def test_the_variables_of_opentelemetry_apply(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing = Tracing(collector.url, "service", "instance", lambda outcome, spans: None)
    assert not tracing.begin("one", tracing.parent({}), time.monotonic()).is_recording()
    tracing.close()
