"""Helpers for tests of the scheduler's actors: a coordinator on real sockets, executors that invent tokens, and
processes that send the messages of a test."""

import asyncio
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from pagewise_executor.service import ExecutorService
from pagewise_executor.simulated import SimulatedRunner
from pagewise_executor.worker import Worker
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.coordinator import Coordinator
from pagewise_scheduler.server.executor_handle import ExecutorHandle
from pagewise_scheduler.server.router import Router
from pagewise_shared.config import ExecutorConfig, SchedulerConfig
from pagewise_shared.curve import GATEWAY, Keys
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    AdapterState,
    FromScheduler,
    GatewayWelcome,
    Hello,
    Message,
    Role,
    Welcome,
    decode_from_scheduler,
    encode,
)
from pagewise_shared.sampling import BeamParams

from tests.scheduler.server.played_gateway import PlayedGateway


def executors_of(path: Path) -> str:
    """The endpoint for executors of the scheduler that runs under ``path``."""
    return f"ipc://{path}/wire"


def gateways_of(path: Path) -> str:
    """The endpoint for gateways of the scheduler that runs under ``path``."""
    return f"ipc://{path}/gateways"


class Stack:
    """A coordinator, a gateway that is played, and queries about them for tests."""

    def __init__(
        self,
        path: Path,
        keys: Keys | None = None,
        **options: Any,
    ) -> None:
        self.path = path
        self.metrics = Metrics("m")
        given: dict[str, Any] = {
            "placement_timeout": 5.0,
            "listen": executors_of(path),
            "listen_gateways": gateways_of(path),
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_waiting": 8,
            "max_waiting_tokens": 1000,
            "executor_timeout": 2.5,
            "gateway_timeout": 4.0,
            "step_timeout": 1.5,
        }
        self.coordinator = Coordinator(
            SchedulerConfig(**(given | options)),
            self.metrics,
            keys=keys,
        )
        self.registry, self.gateways = self.coordinator.executor_registry, self.coordinator.gateways
        self.gateway: PlayedGateway

    @property
    def router(self) -> Router:
        return self.coordinator.router

    @property
    def executors(self) -> list[ExecutorHandle]:
        """Executors that take requests."""
        return self.router.executors

    def dropped(self, reason: str) -> float:
        return float(self.metrics.frames_dropped(reason)._value.get())  # type: ignore[arg-type]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series, as a query for metrics would tell it; NaN: there is none."""
        for handle in self.executors:
            handle.stats.record(handle.scheduler)
        value = self.metrics.registry.get_sample_value(f"pagewise_{name}", {"model_name": "m"} | labels)
        return float("nan") if value is None else value

    async def ready(self, count: int) -> None:
        """Until so many executors take requests."""
        await until(lambda: self.router.capacity.ready_executors == count)

    async def generate(
        self, prompt: Sequence[int], max_tokens: int = 8, *, beam: BeamParams | None = None
    ) -> list[int]:
        """The tokens of one greedy output."""
        request = await self.gateway.submit(prompt, max_tokens=max_tokens, beam=beam)
        return (await request.result())[0]

    async def all_free(self) -> None:
        """Until no block of any executor is in use."""
        await until(lambda: not any(handle.scheduler.kv.pool.num_in_use for handle in self.executors))


async def until(holds: Any, seconds: float = 10.0) -> None:
    """Look until something holds."""
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running(
    path: Path,
    keys: Keys | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """A scheduler that runs, and a gateway that has joined it. With ``keys``, that gateway has the key ``GATEWAY``."""
    stack = Stack(path, keys, **options)
    task = asyncio.create_task(stack.coordinator.run())
    try:
        async with gateway(path, keys=Keys(path, GATEWAY) if keys is not None else None) as stack.gateway:
            yield stack
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def gateway(
    path: Path, name: str = "gateway", adapters: AdapterState | None = None, keys: Keys | None = None
) -> AsyncIterator[PlayedGateway]:
    """One more gateway that is played. ``adapters``: the adapters that it reports as served by an earlier scheduler."""
    played = PlayedGateway(gateways_of(path), name, keys)
    played.adapters = adapters or played.adapters
    try:
        assert isinstance(await played.join(), GatewayWelcome)
        yield played
    finally:
        await played.close()


@asynccontextmanager
async def executor(
    path: Path,
    name: str = "e",
    step_seconds: float = 0.0,
    keys: Keys | None = None,
    *,
    runner: SimulatedRunner | None = None,
    role: Role = "both",
) -> AsyncIterator["asyncio.Task[None]"]:
    """An executor that invents tokens."""
    runner = runner or SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4), step_seconds)
    runner.info = msgspec.structs.replace(runner.info, max_num_seqs=4, max_num_batched_tokens=64)
    service = ExecutorService(Worker(lambda: runner), executors_of(path), name, role=role, keys=keys)
    task = asyncio.create_task(service.run())
    try:
        yield task
    finally:
        service.stop("test over")
        with suppress(asyncio.CancelledError):
            await asyncio.gather(task, return_exceptions=True)


class RawExecutor:
    """A socket that sends the messages of a test."""

    def __init__(self, path: Path, keys: Keys | None = None, identity: bytes = b"") -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if identity:
            self.socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            keys.secure_client(self.socket)
        self.socket.connect(executors_of(path))

    async def send(self, message: Message | bytes) -> None:
        await self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> FromScheduler:
        async with asyncio.timeout(10):
            return decode_from_scheduler(await self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@asynccontextmanager
async def flood(endpoint: str) -> AsyncIterator[None]:
    """Meanwhile, a thread sends frames that cannot be decoded, as many as it can."""
    flooding = threading.Event()
    flooding.set()

    def send() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.connect(endpoint)
            while flooding.is_set():
                socket.send(b"x")

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        flooding.clear()
        await asyncio.to_thread(thread.join)  # it may wait until its frames are read


def hello(**fields: object) -> Hello:
    """The Hello of an executor that offers sensible values, except for ``fields``."""
    given = {
        "protocol_major": PROTOCOL_MAJOR,
        "protocol_minor": 0,
        "executor_id": "raw",
        "model_fingerprint": "simulated",
        "vocab_size": 100,
        "max_model_len": 64,
        "block_size": 4,
        "num_blocks": 16,
    }
    return Hello(**(given | fields))  # type: ignore[arg-type]


async def joined(path: Path, **fields: object) -> tuple[RawExecutor, Welcome]:
    """A raw executor that is in."""
    raw = RawExecutor(path)
    await raw.send(hello(vocab_size=4096, **fields))
    welcome = await raw.receive()
    assert isinstance(welcome, Welcome)
    return raw, welcome


def int32s(*values: int) -> bytes:
    """Integers as they travel."""
    return array("i", values).tobytes()
