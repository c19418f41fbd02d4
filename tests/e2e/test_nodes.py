"""An executor whose ranks are on two nodes: processes that know of each other by address alone, as on two hosts.

One of the nodes is in a network namespace of its own where this machine allows that, so that all traffic between ranks
uses a network that can be cut.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from pagewise_shared.service_process import CANNOT_START

from benchmarks.chaos.network import Namespace, namespace
from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, Process, alive, children, free_port, running
from tests.executor.ranks.one_rank import texts_of_one_rank
from tests.free_cores import FreeCores

FOLLOWER = b"pagewise_executor.follower"
BLOCKS = ("--num-blocks=200", "--device=cpu")


class Nodes:
    """Starts the two nodes of an executor. ``address``: of node 0; ``prefix``: in front of the command of node 1."""

    def __init__(self, cluster: Cluster, address: str = "127.0.0.1", prefix: tuple[str, ...] = ()) -> None:
        self._cluster, self._prefix = cluster, prefix
        port = free_port(address)
        self._options = ("--tensor-parallel=2", "--nnodes=2", f"--master-addr={address}", f"--master-port={port}")

    def start(self, node: int, *options: str) -> Process:
        prefix = self._prefix if node else ()
        own = (*self._options, f"--node-rank={node}", *options)
        return self._cluster.start_executor(f"node-{node}", *own, prefix=prefix)


def ranks_of(node: Process) -> list[int]:
    """The processes of ranks that a node has started, also through ``ip netns exec``, which becomes the node."""
    return [pid for pid, command in children(node.pid) if FOLLOWER in command]


def ask(url: str, ids: list[int]) -> str:
    body = {"prompt": ids, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=90)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def wait_for_line(process: Process, text: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while text not in process.output():
        assert time.monotonic() < deadline, f"{text!r} is not in:\n{process.output()}"
        time.sleep(0.05)


def test_ranks_of_two_nodes_serve_what_one_rank_does_end_together_and_come_back(tmp_path: Path) -> None:
    prompts = [[11 + number, *range(40, 70 + 9 * number)] for number in range(3)]
    expected = texts_of_one_rank(prompts, 12)
    cluster = Cluster(tmp_path, executor_options=BLOCKS, as_shipped=True)
    with running(cluster, 0):
        nodes = Nodes(cluster)
        one = nodes.start(1)
        wait_for_line(one, "does not answer yet; trying again for up to")
        zero = nodes.start(0)
        cluster.wait_ready(1, 90.0)
        assert [ask(cluster.url, ids) for ids in prompts] == expected
        assert cluster.members()["node-0"]["device"]["num_blocks"] == 200
        assert not ranks_of(zero)
        (rank,) = ranks_of(one)
        os.kill(rank, signal.SIGKILL)
        cores, began = FreeCores(), time.monotonic()
        assert (zero.wait(), one.wait()) == (1, 1)
        assert (time.monotonic() - began) * cores.share() < 5.0
        assert "this executor ends: rank 1 has ended" in zero.output()
        assert "this node ends: rank 1 has ended with exit code -9" in one.output()
        zero, one = nodes.start(0), nodes.start(1)
        cluster.wait_ready(1, 90.0)
        assert [ask(cluster.url, ids) for ids in prompts] == expected
        (rank,) = ranks_of(one)
        zero.signal(signal.SIGTERM)
        assert (zero.wait(60.0), one.wait()) == (0, 0)
        assert not alive(rank)


def test_a_node_with_other_options_ends_and_says_why(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, executor_options=BLOCKS)
    nodes = Nodes(cluster)
    try:
        zero, one = nodes.start(0), nodes.start(1, "--block-size=32")
        assert one.wait(60.0) == CANNOT_START
        assert "has turned this node away: the nodes of an executor need the same options" in one.output()
        assert "--block-size is 32 on node 1 and 16 on node 0" in zero.output()
        assert "Traceback" not in one.output()
        one = nodes.start(1)
        wait_for_line(one, "ranks 1 of 2 have started")
        os.kill(zero.pid, signal.SIGKILL)
        assert one.wait() == 1
        assert "this node ends: node 0 at" in one.output()
    finally:
        cluster.close()


@pytest.fixture
def network() -> Iterator[Namespace]:
    with namespace(3) as made:
        if isinstance(made, str):
            pytest.skip(f"no network namespaces: {made}")
        yield made


@pytest.mark.chaos
@pytest.mark.timeout(300)
async def test_a_network_between_nodes_is_cut_under_load_and_no_stream_notices(
    tmp_path: Path, network: Namespace
) -> None:
    cases = make_cases(12, 60)
    # Node 1 needs a network to node 0 alone: it does not get the scheduler's address.
    cluster = Cluster(tmp_path, executor_options=(*BLOCKS, "--plaintext"))
    with running(cluster, 1):
        expected = await references(cluster.url, cases)
        nodes = Nodes(cluster, network.host, network.prefix)
        zero, one = nodes.start(0, "--num-blocks=2000"), nodes.start(1, "--num-blocks=2000")
        await asyncio.to_thread(cluster.wait_ready, 2, 120.0)
        async with client_of(cluster.url) as client:
            streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
            while not (await asyncio.to_thread(cluster.members))["node-0"]["requests"]:
                assert not all(task.done() for task in streams)
                await asyncio.sleep(0.02)
            network.drop(1.0)
            began, cores = time.monotonic(), FreeCores()
            assert await asyncio.to_thread(zero.wait, 60.0) == 1
            assert await asyncio.to_thread(one.wait, 60.0) == 1
            assert (time.monotonic() - began) * cores.share() < 12.0
            assert "node 1 has ended, or cannot be reached" in zero.output()
            for task, right in zip(streams, expected, strict=True):
                assert not (await task).differences(right)
        assert f"{network.host}:" in one.output()
        assert "through the interface pw" in one.output(), "ranks do not meet through another one"
