"""Executors are killed, frozen, drained and cut off under a hundred streams: each ends as if nothing had happened."""

from pathlib import Path

import pytest

from tests.chaos.disturbances import Monkey
from tests.chaos.harness import Report, chaos
from tests.chaos.network import namespace
from tests.chaos.processes import SLOW_SIMULATED, Cluster
from tests.chaos.workload import make_cases

EXECUTOR_TIMEOUT = 3.0
OPTIONS = (f"--executor-timeout={EXECUTOR_TIMEOUT:g}", "--step-timeout=10", "--log-level=info")


async def disturb(cluster: Cluster, monkey: Monkey, max_tokens: int, seconds: float) -> Report:
    report = await chaos(cluster, monkey, make_cases(100, max_tokens), seconds)
    print(report.numbers())
    assert not report.failures, "\n".join([f"{len(report.failures)} failures", *report.failures[:20]])
    assert report.streams >= 100
    assert {event.kind for event in report.disturbances} >= {"kill", "hang", "drain"}
    growth = max(report.rss[-len(report.rss) // 3 :]) / max(report.rss[: 2 * len(report.rss) // 3])
    assert growth < 1.25, f"the scheduler's memory grows: {report.rss} MiB"
    return report


@pytest.mark.timeout(300)
async def test_a_hundred_streams_survive_simulated_executors_that_come_and_go(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, executor=SLOW_SIMULATED, as_shipped=True)
    await disturb(cluster, Monkey(cluster, pause=1.0, freeze=EXECUTOR_TIMEOUT + 2, blocks=(900, 500, 300)), 80, 15)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_hundred_streams_survive_five_minutes(tmp_path: Path) -> None:
    with namespace() as network:
        address = "127.0.0.1" if isinstance(network, str) else network.host
        cluster = Cluster(tmp_path, scheduler_options=OPTIONS, address=address, as_shipped=True)
        monkey = Monkey(cluster, pause=3.0, freeze=EXECUTOR_TIMEOUT + 3, blocks=(600, 400, 300))
        if isinstance(network, str):
            print(f"no packets are dropped: {network}")
        else:
            monkey.network = network
        report = await disturb(cluster, monkey, 150, 300)
    assert report.blocks["loaded"] > 0, "nothing came back from the host: that part was not tried"
    assert report.blocks["fetched"] > 0, "nothing came from another executor: that part was not tried"
