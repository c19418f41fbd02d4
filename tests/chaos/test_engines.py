"""An executor on torch and one on OpenVINO serve side by side, and take over each other's requests: real processes."""

import asyncio
import signal
from pathlib import Path

import pytest

from benchmarks.chaos.workload import Outcome, client_of, make_cases, references, stream
from benchmarks.processes import Cluster, Process, wait_until

pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'pagewise[openvino]'")

ENGINES = ("torch", "openvino")


@pytest.mark.timeout(400)
async def test_requests_move_between_engines_and_blocks_do_not(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, scheduler_options=("--executor-timeout=3",))
    cases = make_cases(30, 60)

    def start(kernels: str) -> Process:
        # Of one size, so that the engine alone tells the blocks apart.
        return cluster.start_executor(kernels, f"--kernels={kernels}", "--block-size=32", "--num-blocks=150")

    def is_back(kernels: str) -> None:
        def joined_twice() -> bool:
            return cluster.scheduler.output().count(f"cpu float32 by {kernels}") == 2

        wait_until(joined_twice, 120.0, f"{kernels} is back", cluster.scheduler)

    def both_work() -> bool:
        return [bool(report["requests"]) for report in cluster.members().values()] == [True, True]

    try:
        cluster.start()
        executors = {kernels: start(kernels) for kernels in ENGINES}
        await asyncio.to_thread(cluster.wait_ready, 2, 120.0)
        expected = await references(cluster.url, cases)
        for victim in ENGINES:
            async with client_of(cluster.url) as client:
                streams = [asyncio.create_task(stream(client, case, Outcome(case))) for case in cases]
                while not await asyncio.to_thread(both_work):
                    assert not all(task.done() for task in streams)
                executors[victim].signal(signal.SIGKILL)
                for task, right in zip(streams, expected, strict=True):
                    assert not (await task).differences(right)
            executors[victim] = start(victim)
            await asyncio.to_thread(is_back, victim)
        assert cluster.metric("request_moves_total", reason="lost") > 0
        assert cluster.metric("block_transfer_bytes_total") == 0
    finally:
        cluster.close()
