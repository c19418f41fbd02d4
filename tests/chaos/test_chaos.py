"""All three kinds of process are killed and frozen, executors also drained and cut off, under a hundred streams: each
ends as if nothing had happened, except streams whose own gateway is gone."""

from pathlib import Path

import pytest

from benchmarks.chaos.disturbances import GATEWAY_OPTIONS, Monkey
from benchmarks.chaos.harness import Report, chaos
from benchmarks.chaos.network import namespace
from benchmarks.chaos.workload import make_cases
from benchmarks.processes import Cluster

TIMEOUT = 3.0
OPTIONS = (f"--executor-timeout={TIMEOUT:g}", f"--gateway-timeout={TIMEOUT:g}", "--step-timeout=10")
STEP_SECONDS = 0.02
"""Of executors that invent their tokens: streams last long enough to be moved."""

KINDS = {"kill", "hang", "drain", "kill scheduler", "kill gateway"}


async def disturb(cluster: Cluster, monkey: Monkey, max_tokens: int, seconds: float) -> Report:
    report = await chaos(cluster, monkey, make_cases(100, max_tokens), seconds, TIMEOUT)
    print(report.numbers())
    assert not report.failures, "\n".join([f"{len(report.failures)} failures", *report.failures[:20]])
    assert report.streams >= 100
    kinds = {event.kind for event in report.disturbances}
    assert kinds >= KINDS
    # Half of the streams have a gateway that stays; of the others, a kill of the gateway cuts the running ones.
    killed = sum(event.kind == "kill gateway" for event in report.disturbances)
    assert report.cut <= 60 * killed
    assert report.refused <= 60
    for name, rss in report.rss.items():
        growth = max(rss[-len(rss) // 3 :]) / max(rss[: 2 * len(rss) // 3])
        assert growth < 1.25, f"the memory of the {name} grows: {rss} MiB"
    return report


@pytest.mark.timeout(600)
@pytest.mark.chaos
async def test_a_hundred_streams_survive_simulated_executors_that_come_and_go(tmp_path: Path) -> None:
    cluster = Cluster(
        tmp_path,
        gateways=2,
        scheduler_options=OPTIONS,
        gateway_options=GATEWAY_OPTIONS,
        simulate=STEP_SECONDS,
        as_shipped=True,
    )
    monkey = Monkey(cluster, pause=1.0, freeze=TIMEOUT + 2, blocks=(900, 500, 300), every=(4.0, 6.0))
    await disturb(cluster, monkey, 80, 12)


@pytest.mark.chaos
@pytest.mark.timeout(900)
async def test_a_hundred_streams_survive_five_minutes(tmp_path: Path) -> None:
    with namespace() as network:
        address = "127.0.0.1" if isinstance(network, str) else network.host
        cluster = Cluster(
            tmp_path,
            gateways=2,
            scheduler_options=OPTIONS,
            gateway_options=GATEWAY_OPTIONS,
            address=address,
            as_shipped=True,
        )
        monkey = Monkey(cluster, pause=3.0, freeze=TIMEOUT + 3, blocks=(600, 400, 300))
        if isinstance(network, str):
            print(f"no packets are dropped: {network}")
        else:
            monkey.network = network
        report = await disturb(cluster, monkey, 150, 300)
    assert report.blocks["loaded"] > 0, "nothing came back from the host: that part was not tried"
    assert report.blocks["fetched"] > 0, "nothing came from another executor: that part was not tried"
