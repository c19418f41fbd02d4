"""The soak's samples: of real processes, and the samples by which it judges them."""

import asyncio
import contextlib
import os
import socket
import time
from pathlib import Path

from benchmarks.processes import Cluster, wait_until
from benchmarks.soak.resources import Life, Resources, Sample, num_sockets, tasks_by_process
from benchmarks.soak.run import grown


def test_sockets_are_counted() -> None:
    before = num_sockets(os.getpid())
    pair = socket.socketpair()
    assert num_sockets(os.getpid()) == before + 2
    for one in pair:
        one.close()
    assert num_sockets(os.getpid()) == before
    assert num_sockets(2**22 + 1) == 0, "a process that is not there"


async def watch(resources: Resources, cluster: Cluster, samples: int) -> None:
    """Until a process has been sampled so often."""
    watching = asyncio.create_task(resources.watch(cluster))
    async with asyncio.timeout(60):
        while not any(len(one.samples) >= samples for one in resources.lives.values()):
            await asyncio.sleep(0.1)
    watching.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await watching


def test_every_kind_of_process_tells_its_tasks(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, simulate=0.001)
    names = {"scheduler", "gateway-0", "one"}
    try:
        assert tasks_by_process(cluster) == {}, "nothing answers yet"
        cluster.start()
        executor = cluster.start_executor("one")
        wait_until(lambda: names == tasks_by_process(cluster).keys(), 60.0, "all tell", executor)
        wait_until(lambda: all(tasks_by_process(cluster).values()), 10.0, "an executor's first heartbeat", executor)
        assert max(tasks_by_process(cluster).values()) < 100
        resources = Resources()
        asyncio.run(watch(resources, cluster, 3))
        assert {name for name, _ in resources.lives} == names
        for one in resources.lives.values():
            assert one.samples[-1].descriptors > one.samples[-1].sockets > 0
            assert 0 < (one.samples[-1].tasks or 0) < 100
    finally:
        cluster.close()


def life(tasks: list[float | None]) -> Life:
    """One of ten minutes, with so many tasks every second, one after the other."""
    now = time.monotonic()
    samples = [Sample(now + second, 100.0, 20, 10, 5, tasks[second * len(tasks) // 600]) for second in range(600)]
    return Life("gateway-0", 1, samples)


def test_tasks_that_stay_are_found_and_those_that_go_are_not() -> None:
    assert grown([life([10.0])]) == []
    assert grown([life([10.0, 500.0, 10.0])]) == []
    (found,) = grown([life([None])])
    assert "has told no number of tasks" in found
    assert grown([life([None, *[10.0] * 9, None])]) == []
    (found,) = grown([life([10.0] * 5 + [40.0] * 5)])
    assert "40 tasks, 10 before" in found
