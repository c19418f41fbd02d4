"""Reports on a fleet that exchanges blocks: sources of KV, copies, their cost, and refused requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic as clock

import zmq
from pagewise_executor.service import ExecutorService
from pagewise_executor.worker import Worker
from pagewise_scheduler.core.memory_report import memory_report
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_shared.curve import EXECUTOR, GATEWAY, SCHEDULER, Keys, public_file
from pagewise_shared.reports import MemoryReport

from tests.executor.runners import build_runner, peers_at
from tests.model_builders import model_fixture
from tests.scheduler.server.stack import Stack, running
from tests.shared.key_pairs import make_key_pairs

PROMPT, *OTHERS = [list(range(start, start + 60)) for start in (3, 63, 123)]


model_path = model_fixture("llama", seed=5)


@asynccontextmanager
async def lending(path: Path, model_path: Path, name: str, keys: Keys | None = None) -> AsyncIterator[ExecutorService]:
    """An executor that computes, with room for one of the prompts on its device and for all of them on its host."""

    def service() -> ExecutorService:
        worker = Worker(
            lambda: build_runner(
                model_path,
                exchange=peers_at(f"ipc://{path}/{name}", keys),
                num_blocks=12,
                max_num_seqs=4,
                max_num_batched_tokens=64,
            )
        )
        return ExecutorService(worker, f"ipc://{path}/wire", name, keys=keys)

    made = await asyncio.to_thread(service)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        made.stop("test over")
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def two_executors(
    path: Path, model_path: Path, recovery: RecoveryMode, keys: Keys | None = None, executor_keys: Keys | None = None
) -> AsyncIterator[Stack]:
    """They take turns, whatever they hold."""
    patient = {"executor_timeout": 20.0, "step_timeout": 60.0}
    async with (
        running(path, keys=keys, routing="round-robin", recovery=recovery, **patient) as stack,
        lending(path, model_path, "one", executor_keys),
        lending(path, model_path, "two", executor_keys),
    ):
        await stack.ready(2)
        yield stack


async def test_what_came_from_a_peer_is_told_apart_from_what_came_from_the_host(
    tmp_path: Path, model_path: Path
) -> None:
    async with two_executors(tmp_path, model_path, "swap") as stack:
        first = await stack.generate(PROMPT)
        assert await stack.generate(PROMPT) == first
        assert stack.metric("recoveries_total", method="load", source="peer") == 1
        assert stack.metric("recoveries_total", method="load", source="host") == 0
        for other in OTHERS:  # takes the blocks of the prompt, on either executor
            await stack.generate(other)
        assert await stack.generate(PROMPT) == first
        for source in ("host", "peer"):
            assert stack.metric("recoveries_total", method="load", source=source) == 1
            assert stack.metric("recovery_actual_seconds_count", method="load", source=source) == 1
            assert stack.metric("recovery_predicted_seconds_count", method="load", source=source) == 1
            assert stack.metric("cached_tokens_total", source=source) > 0
        assert stack.metric("recoveries_total", method="device", source="device") == 0


def report(engine: ExecutorHandle) -> MemoryReport:
    return memory_report(engine.executor_id, engine.scheduler, clock(), 10)


async def test_what_moves_between_executors_is_measured(tmp_path: Path, model_path: Path) -> None:
    async with two_executors(tmp_path, model_path, "swap") as stack:
        await stack.generate(PROMPT)
        assert stack.metric("block_transfer_bytes_total") == stack.metric("block_transfer_seconds_total") == 0
        holder, fetcher = stack.router.executors
        before = report(fetcher)
        assert (before.block_endpoint, before.costs.peers) == (f"ipc://{tmp_path}/two", {})
        generating = asyncio.create_task(stack.generate(PROMPT))
        lent = 0
        while not generating.done():
            lent = max(lent, report(holder).device.lent)
            await asyncio.sleep(0)
        fetched = 7  # full blocks of 60 tokens
        assert lent == fetched
        bytes_per_block = fetcher.hello.bytes_per_block
        assert stack.metric("block_transfer_bytes_total") == fetched * bytes_per_block > 0
        assert 0 < stack.metric("block_transfer_seconds_total") < 20
        ((peer, link),) = report(fetcher).costs.peers.items()
        assert peer == f"ipc://{tmp_path}/one" == report(holder).block_endpoint
        assert link.setup + link.block > 0
        assert link.error > 0, "it has learned"
        assert (link.loading, link.rests, report(holder).device.lent) == (0, 0, 0)


async def test_who_has_no_key_and_knocks_at_a_block_socket_is_counted(tmp_path: Path, model_path: Path) -> None:
    make_key_pairs(tmp_path, SCHEDULER, EXECUTOR, "stranger")
    make_key_pairs(tmp_path, GATEWAY, kind="gateway")
    stranger = Keys(tmp_path, "stranger")
    public_file(tmp_path, "stranger").unlink()
    executors = Keys(tmp_path, EXECUTOR)
    async with two_executors(tmp_path, model_path, "swap", Keys(tmp_path, SCHEDULER), executors) as stack:
        assert await stack.generate(PROMPT) == await stack.generate(PROMPT)
        assert stack.metric("kv_block_events_total", event="fetched") == 7, "they let each other in"
        with zmq.Context() as context, context.socket(zmq.DEALER) as knocking:
            knocking.setsockopt(zmq.LINGER, 0)
            stranger.secure_client(knocking, executors.public)
            assert stack.metric("wire_connections_refused_total", reason="unknown_key_blocks") == 0
            knocking.connect(f"ipc://{tmp_path}/one")
            async with asyncio.timeout(20):
                while stack.metric("wire_connections_refused_total", reason="unknown_key_blocks") < 1:
                    await asyncio.sleep(0.05)
        assert stack.metric("wire_connections_refused_total", reason="unknown_key") == 0, "nobody came to the scheduler"


async def test_an_operator_who_wants_kv_recomputed_gets_none_from_peers(tmp_path: Path, model_path: Path) -> None:
    async with two_executors(tmp_path, model_path, "recompute") as stack:
        assert await stack.generate(PROMPT) == await stack.generate(PROMPT)
        assert stack.metric("recoveries_total", method="recompute", source="peer") == 1
        assert stack.metric("kv_block_events_total", event="fetched") == 0
        assert stack.metric("cached_tokens_total", source="peer") == 0
