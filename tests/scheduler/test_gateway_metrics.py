"""Metrics of gateways that come and go: each counter once, and none ever falls."""

import re
from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.gateway_metrics import GatewayMetrics
from pagewise_scheduler.metrics import Metrics
from pagewise_shared.protocol import MetricFamily, MetricSample
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram


def snapshot(requests: float, *, latencies: tuple[float, ...] = (), streams: float = 0.0) -> list[MetricFamily]:
    """The report of a gateway with these counts."""
    registry = CollectorRegistry()
    Counter("pagewise_requests", "Requests.", ("model_name",), registry=registry).labels("m").inc(requests)
    Gauge("pagewise_streams", "Streams.", registry=registry).set(streams)
    histogram = Histogram("pagewise_latency", "Latency.", buckets=(0.1, 1.0), registry=registry)
    for latency in latencies:
        histogram.observe(latency)
    return [
        MetricFamily(
            family.name,
            family.documentation,
            family.type,
            tuple(MetricSample(one.name, tuple(one.labels.items()), one.value) for one in family.samples),
        )
        for family in registry.collect()
    ]


def shown(metrics: GatewayMetrics) -> dict[str, float]:
    """Values by sample name, and also by ``le`` for samples that have one."""
    return {
        sample.name + sample.labels.get("le", ""): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_living_gateways_are_added_up() -> None:
    metrics = GatewayMetrics()
    assert metrics.take(b"a", "a", snapshot(3, latencies=(0.05, 0.5), streams=2))
    assert metrics.take(b"b", "b", snapshot(4, latencies=(5.0,), streams=1))
    assert metrics.take(b"b", "b", snapshot(5, latencies=(5.0,), streams=7))
    values = shown(metrics)
    assert (values["pagewise_requests_total"], values["pagewise_streams"]) == (8, 9)
    assert [values[f"pagewise_latency_bucket{le}"] for le in ("0.1", "1.0", "+Inf")] == [1, 2, 3]
    assert (values["pagewise_latency_count"], values["pagewise_latency_sum"]) == (3, 5.55)


def test_what_a_gateway_has_counted_stays_when_it_is_gone_and_its_gauges_do_not() -> None:
    metrics = GatewayMetrics()
    metrics.take(b"a", "a", snapshot(3, latencies=(0.5,), streams=2))
    metrics.take(b"b", "b", snapshot(4, streams=1))
    metrics.gone(b"a")
    metrics.gone(b"never")
    values = shown(metrics)
    assert (values["pagewise_requests_total"], values["pagewise_streams"]) == (7, 1)
    assert values["pagewise_latency_count"] == 1
    metrics.gone(b"b")
    assert shown(metrics)["pagewise_requests_total"] == 7
    assert "pagewise_streams" not in shown(metrics)


def test_one_that_was_given_up_and_is_back_is_not_counted_twice() -> None:
    metrics = GatewayMetrics()
    metrics.take(b"a", "a", snapshot(3))
    metrics.gone(b"a")
    metrics.take(b"other connection", "a", snapshot(5))
    assert shown(metrics)["pagewise_requests_total"] == 5


def test_one_that_is_back_before_its_old_connection_is_known_to_be_broken_is_counted_once() -> None:
    metrics = GatewayMetrics()
    metrics.take(b"a", "a", snapshot(10, streams=2))
    metrics.take(b"other connection", "a", snapshot(10, streams=2), older=True)
    assert shown(metrics)["pagewise_requests_total"] == 10
    metrics.gone(b"a")
    values = shown(metrics)
    assert (values["pagewise_requests_total"], values["pagewise_streams"]) == (10, 2)


def test_one_that_was_started_again_begins_anew() -> None:
    metrics = GatewayMetrics()
    metrics.take(b"a", "a", snapshot(3))
    metrics.gone(b"a")
    metrics.take(b"other process", "another a", snapshot(1))
    assert shown(metrics)["pagewise_requests_total"] == 4
    metrics.gone(b"other process")
    metrics.take(b"a third", "a third a", snapshot(0))
    assert shown(metrics)["pagewise_requests_total"] == 4


def test_the_schedulers_own_metrics_and_theirs_are_each_shown_once() -> None:
    metrics = Metrics("m")
    metrics.generation_tokens.inc(2)
    own = [
        MetricFamily(
            "pagewise_generation_tokens",
            "",
            "counter",
            (MetricSample("pagewise_generation_tokens_total", (("model_name", "m"),), 5.0),),
        ),
        MetricFamily("pagewise_executors_ready", "", "gauge", (MetricSample("pagewise_executors_ready", (), 9.0),)),
    ]
    metrics.gateways.take(b"a", "a", [*snapshot(3), *own])
    text = metrics.render().decode()
    names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(names) == len(set(names))
    assert 'pagewise_generation_tokens_total{model_name="m"} 7.0' in text
    assert 'pagewise_executors_ready{model_name="m"} 0.0' in text
    assert "pagewise_executors_ready 9.0" not in text
    assert 'pagewise_requests_total{model_name="m"} 3.0' in text


def test_many_gateways_that_come_and_go_take_bounded_memory() -> None:
    metrics = GatewayMetrics()
    for number in range(1000):
        metrics.take(b"%d" % number, f"pod-{number}", snapshot(1))
        metrics.gone(b"%d" % number)
    assert shown(metrics)["pagewise_requests_total"] == 1000
    assert len(metrics._gone) <= 64


MOVES = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["count", "die", "break", "notice", "restart"])), max_size=60
)


@given(MOVES)
def test_no_counter_ever_falls(moves: list[tuple[str, str]]) -> None:
    """Whatever happens: gateways count, lose their connection and come back, before or after that is noticed, or die
    and are started again, as the scheduler is, which then counts from zero."""
    metrics = GatewayMetrics()
    counted: dict[str, int] = defaultdict(int)
    lives, connections, older = (dict.fromkeys("abc", value) for value in (0, 0, False))
    broken: list[bytes] = []
    everything, last = 0, 0.0
    for name, move in moves:
        identity = f"{name}{connections[name]}".encode()
        if move == "count":
            counted[name] += 1
            everything += 1
            told = snapshot(counted[name], latencies=(0.5,) * counted[name])
            metrics.take(identity, f"{name}{lives[name]}", told, older=older[name])
        elif move == "restart":
            metrics, everything, last, broken = GatewayMetrics(), 0, 0.0, []
            older = dict.fromkeys("abc", True)
        elif move == "notice":
            while broken:
                metrics.gone(broken.pop())
        else:
            broken.append(identity)
            connections[name] += 1
            if move == "die":
                counted[name], older[name] = 0, False
                lives[name] += 1
        total = shown(metrics).get("pagewise_requests_total", 0.0)
        assert last <= total <= everything
        last = total
