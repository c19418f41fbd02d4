"""A scheduler process with keys, and a peer with a key whose message does not end."""

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import EXECUTOR, GATEWAY, SCHEDULER, Keys, Kind
from pagewise_shared.protocol import GatewayWelcome

from tests.scheduler.actors.played_gateway import PlayedGateway
from tests.shared.key_pairs import make_key_pairs

MIB = 2**20
MOST = 128 * MIB
"""The smallest bound that the scheduler takes."""
CURVE_BYTES = 35
"""What CURVE adds to a small frame."""
MEMORY_OF_A_BYTE = 4.5
"""The most memory that a received byte takes (see ``unread_bytes.prepare``)."""


@contextmanager
def scheduler_of(folder: Path) -> Iterator[tuple[psutil.Process, str, str]]:
    """A scheduler process, its endpoint for gateways, and that for executors."""
    arguments = ["--listen=tcp://127.0.0.1:*", "--listen-gateways=tcp://127.0.0.1:*", f"--keys={folder}", "--model=m"]
    process = psutil.Popen(
        [sys.executable, "-m", "pagewise_scheduler.main", *arguments, f"--max-unread-bytes={MOST}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        _, gateways, executors = process.stdout.readline().split()
        yield process, gateways, executors
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


async def metric(gateway: PlayedGateway, series: str) -> float:
    text = (await gateway.ask("metrics")).body.decode()
    (value,) = re.findall(rf"^pagewise_{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(value)


@pytest.mark.parametrize(("kind", "size"), [("executor", 30), pytest.param("gateway", 60_000, marks=pytest.mark.long)])
async def test_the_schedulers_memory_is_bounded_and_others_go_on(tmp_path: Path, kind: Kind, size: int) -> None:
    make_key_pairs(tmp_path, SCHEDULER, EXECUTOR, "bad")
    make_key_pairs(tmp_path, GATEWAY, "worse", kind="gateway")
    with scheduler_of(tmp_path) as (process, gateways, executors):
        runner = SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4))
        service = ExecutorService(
            Worker(lambda: runner),
            executors,
            "e",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            keys=Keys(tmp_path, EXECUTOR),
        )
        serving = asyncio.create_task(service.run())
        gateway = PlayedGateway(gateways, keys=Keys(tmp_path, GATEWAY))
        assert isinstance(await gateway.join(), GatewayWelcome)
        assert len((await (await gateway.submit([1, 2, 3], max_tokens=8)).result())[0]) == 8
        welcome = service._welcome
        before = process.memory_info().rss
        script = Path(__file__).parent / "endless_message.py"
        endpoint, name = (executors, "bad") if kind == "executor" else (gateways, "worse")
        parts = MOST * 3 // 2 // (size + CURVE_BYTES)
        arguments = [str(script), endpoint, str(tmp_path), name, str(size), str(parts)]
        peer = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=subprocess.PIPE)
        assert peer.stdout is not None
        try:
            await peer.stdout.readline()
            greatest = requests = 0
            while await metric(gateway, f'wire_connections_closed_total{{model_name="m",peer="{kind}"}}') < 1:
                assert len((await (await gateway.submit([1, 2, 3], max_tokens=8)).result())[0]) == 8
                requests += 1
                greatest = max(greatest, process.memory_info().rss - before)
                await asyncio.sleep(0.02)
            for _ in range(20):
                greatest = max(greatest, process.memory_info().rss - before)
                await asyncio.sleep(0.05)
        finally:
            peer.kill()
            await peer.wait()
        assert requests > 5
        assert MOST * 0.9 < greatest < MEMORY_OF_A_BYTE * 1.25 * MOST
        assert len((await (await gateway.submit([1, 2, 3], max_tokens=8)).result())[0]) == 8
        assert service._welcome is welcome, "its session goes on"
        await gateway.close()
        service.stop("test over")
        await serving
