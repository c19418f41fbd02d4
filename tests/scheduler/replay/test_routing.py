"""Replays with several executors: the routing policies that serve, in virtual time."""

import random
from typing import Any

import pytest
from pagewise_scheduler.core.routing.policies import ROUTING_NAMES, RoutingName, make_routing
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.report import summarise
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest

from benchmarks.routing.run import BAR_BUSIEST, BAR_HIT_RATE, Case, simulate


def replayed(routing: RoutingName, executors: int = 4, *, peers: bool = False) -> dict[str, object]:
    """Sixteen documents, asked about ten times each, whose executors hold a quarter of them each."""
    rng, costs = random.Random(0), llama_3_8b(16)
    documents = [rng.randrange(16) for _ in range(160)]
    trace = [
        TraceRequest(0.1 * i, 4096, 8, [100 * document + j for j in range(7)], 512, i)
        for i, document in enumerate(documents)
    ]
    schedulers = [
        Scheduler(
            num_blocks=1500,
            block_size=16,
            max_num_seqs=32,
            max_num_batched_tokens=8192,
            eviction="cost",
            costs=costs.prefill,
        )
        for _ in range(executors)
    ]
    outcome = Simulation(schedulers, costs, routing=make_routing(routing), peers=peers).run(trace)
    assert len(outcome.served) == 160
    assert all(one.kv.num_available == one.kv.pool.num_blocks for one in schedulers)
    assert all(executor.view.load == 0 for executor in outcome.executors)
    return summarise(outcome, schedulers, slo_first_token=10.0, slo_per_token=1.0)


def test_cache_aware_policies_keep_documents_where_they_are() -> None:
    rates = {name: replayed(name)["hit_rate"]["all"] for name in ROUTING_NAMES}  # type: ignore[index]
    assert rates["ttft"] > 0.6
    assert rates["prefix"] > 0.6
    assert max(rates["round-robin"], rates["least-loaded"]) < 0.5 * rates["ttft"]


@pytest.mark.parametrize("name", ["round-robin", "least-loaded"])
def test_executors_that_fetch_from_each_other_compute_less(name: RoutingName) -> None:
    alone, together = replayed(name), replayed(name, peers=True)
    rates: list[Any] = [alone["hit_rate"], together["hit_rate"]]
    assert rates[0]["peer"] == 0.0
    assert rates[1]["peer"] > 0.2
    assert rates[1]["all"] > rates[0]["all"] + 0.2
    seconds: list[Any] = [alone["seconds"], together["seconds"]]
    assert seconds[1]["first_token"]["mean"] < 0.8 * seconds[0]["first_token"]["mean"]


def test_the_default_policy_fetches_where_that_is_sooner() -> None:
    result: dict[str, Any] = replayed("ttft", peers=True)
    assert result["hit_rate"]["peer"] > 0.0
    assert result["routing"]["actual_of_predicted"]["p50"] == pytest.approx(1.0, abs=0.1)


def test_a_replay_with_several_executors_is_reproducible_and_says_how_even_it_was() -> None:
    result = replayed("ttft")
    again = replayed("ttft")
    assert result == again
    routing = result["routing"]
    assert isinstance(routing, dict)
    assert 1.0 <= routing["busiest_of_mean"]["busy_seconds"] <= 2.0
    assert sum(routing["reasons"].values()) == 160
    assert routing["actual_of_predicted"]["p50"] == pytest.approx(1.0, abs=0.3)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_executors_hit_nearly_what_one_of_eight_times_the_memory_does() -> None:
    one, eight = simulate(Case("one", 1.0, executors=1)), simulate(Case("ttft", 1.0))
    assert eight["hit_rate"] >= BAR_HIT_RATE * one["hit_rate"]
    assert eight["busiest_of_mean"]["busy_seconds"] <= BAR_BUSIEST
