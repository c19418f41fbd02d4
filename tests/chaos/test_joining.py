"""Who may join, and that executors of unequal sizes and speeds serve side by side: real processes."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from pagewise_shared.protocol import PROTOCOL_MAJOR

from benchmarks.chaos.network import Namespace, namespace
from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, Process, running, wait_until
from tests.free_cores import FreeCores

OPTIONS = ("--executor-timeout=3",)
STEP_SECONDS = 0.02


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running(Cluster(tmp_path, scheduler_options=OPTIONS, simulate=STEP_SECONDS), 1) as one:
        yield one


def test_an_executor_with_another_model_is_refused_and_both_ends_say_why(cluster: Cluster) -> None:
    with_model = Cluster(cluster.folder)
    other = with_model.start_executor("other-model", "--num-blocks=64", endpoint=cluster.endpoint)
    try:
        assert other.wait(90.0) == 2
    finally:
        with_model.close()
    reason = "is not the fleet's model simulated"
    assert reason in other.output()
    assert "refused" in other.output()
    assert "Traceback" not in other.output()
    assert reason in cluster.scheduler.output()
    assert "other-model" in cluster.scheduler.output()
    assert cluster.metric("wire_frames_dropped_total", reason="refused") == 1
    assert list(cluster.members()) == ["first-0"]


def test_an_executor_of_another_protocol_is_refused_and_both_ends_say_why(cluster: Cluster) -> None:
    script = str(Path(__file__).parent / "other_protocol.py")
    command = [sys.executable, script, f"--scheduler={cluster.endpoint}", "--executor-id=from-the-future"]
    other = Process("other-protocol", command, cluster.folder)
    try:
        assert other.wait() == 2
    finally:
        other.close()
    for text in (other.output(), cluster.scheduler.output()):
        assert f"it speaks protocol {PROTOCOL_MAJOR + 1}, this scheduler speaks {PROTOCOL_MAJOR}" in text
    assert "from-the-future" in cluster.scheduler.output()
    assert list(cluster.members()) == ["first-0"]


async def test_executors_of_unequal_sizes_and_speeds_serve_side_by_side(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=OPTIONS, simulate=STEP_SECONDS)
    cases = make_cases(60, 60)
    try:
        cluster.start()
        sizes = {"large-and-fast": (2000, 2), "small-and-slow": (40, 30), "middle": (300, 10)}
        for name, (blocks, milliseconds) in sizes.items():
            cluster.start_executor(name, f"--num-blocks={blocks}", f"--simulate-step={milliseconds / 1000}")
        await asyncio.to_thread(cluster.wait_ready, 3)
        expected = await references(cluster.url, cases)
        served: set[str] = set()
        rounds = 0
        async with client_of(cluster.url) as client:
            while served != set(sizes) and (rounds := rounds + 1) <= 5:
                streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
                for task, right in zip(streams, expected, strict=True):
                    assert not (await task).differences(right)
                for name, report in (await asyncio.to_thread(cluster.members)).items():
                    assert report["device"]["num_blocks"] == sizes[name][0]
                    if report["device"]["cached"]:  # served prompts stay in its cache
                        served.add(name)
        assert served == set(sizes)
    finally:
        cluster.close()


@pytest.fixture
def network() -> Iterator[Namespace]:
    with namespace(2) as made:
        if isinstance(made, str):
            pytest.skip(f"no network namespaces: {made}")
        yield made


@pytest.mark.parametrize(
    ("seconds", "executor_timeout"),
    [
        (4.5, 30.0),  # noticed by the rhythm of its heartbeats, long before the option would
        pytest.param(8.0, 3.0, marks=pytest.mark.chaos),
        pytest.param(30.0, 3.0, marks=pytest.mark.chaos),
    ],
)
async def test_an_executor_that_was_cut_off_is_noticed_and_back_soon(
    tmp_path: Path, network: Namespace, seconds: float, executor_timeout: float
) -> None:
    options = (f"--executor-timeout={executor_timeout:g}",)
    cluster = Cluster(tmp_path, scheduler_options=options, simulate=STEP_SECONDS, address=network.host)
    cases = make_cases(20, 120)
    try:
        cluster.start()
        cluster.start_executor("near")
        cluster.start_executor("far", prefix=network.prefix)
        await asyncio.to_thread(cluster.wait_ready, 2)
        expected = await references(cluster.url, cases)
        async with client_of(cluster.url) as client:
            streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
            while not (await asyncio.to_thread(cluster.members))["far"]["requests"]:
                assert not all(task.done() for task in streams)
            network.drop(1.0)
            await asyncio.sleep(seconds)
            assert list(await asyncio.to_thread(cluster.members)) == ["near"]
            network.heal()
            began, cores = monotonic(), FreeCores()
            await asyncio.to_thread(wait_for_second_welcome, cluster)
            back = monotonic() - began
            print(f"cut off for {seconds:g} s, back after {back:.2f} s")
            assert back * cores.share() < 5.0
            for task, right in zip(streams, expected, strict=True):
                assert not (await task).differences(right)
    finally:
        cluster.close()


def wait_for_second_welcome(cluster: Cluster) -> None:
    wait_until(
        lambda: cluster.scheduler.output().count("executor far joined") == 2, 60.0, "it is back", cluster.scheduler
    )


def test_an_executor_can_be_stopped_while_the_scheduler_is_away(cluster: Cluster) -> None:
    cluster.scheduler.signal(signal.SIGKILL)
    cluster.scheduler.wait()
    (executor,) = cluster.executors
    time.sleep(2.5)  # a heartbeat waits to be sent
    executor.signal(signal.SIGTERM)
    assert executor.wait(10.0) == 0
