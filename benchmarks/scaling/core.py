"""The scheduler's process alone: what a token costs it, between simulated executors and a gateway that only counts.

    python -m benchmarks.scaling.core [--executors 8] [--streams 128] [--step 0.02] [--gateways 1] [--json FILE] [--smoke]

Executors are processes (``pagewise-executor --simulate``). The gateways are played by this process: they submit
requests of 32 prompt and 128 output tokens in a closed loop and read what they are told, without any text. CPU time is that
of all threads of the scheduler's process, ZeroMQ's too.
"""

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
import uuid
from array import array
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import uvloop
import zmq
import zmq.asyncio
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    FleetState,
    GatewayHello,
    GatewayWelcome,
    Heartbeat,
    Outputs,
    PromptToGenerate,
    Submit,
    decode_to_gateway,
    encode,
)
from pagewise_shared.sampling import SamplingParams

from benchmarks.record import record_file, write_record
from benchmarks.scaling.load import OUTPUT_TOKENS, random_prompt

_SAMPLING = SamplingParams(temperature=0)


@dataclass
class Row:
    """Medians over the windows. ``of_offered``: of the tokens that the executors would compute if nothing held them up.

    ``tokens_per_frame``: in one ``Outputs``. ``rss_mib``: memory of the scheduler's process at the end.
    """

    executors: int
    streams: int
    gateways: int
    step_ms: float
    tokens_per_s: float
    of_offered: float
    tokens_per_frame: float
    cpu_us_per_token: float
    cpu_us_per_token_windows: list[float]
    scheduler_cpu: float
    rss_mib: float


class CountingGateway:
    """A gateway that keeps ``streams`` requests running. ``tokens``, ``frames``: that have come."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str, number: int, streams: int) -> None:
        self.tokens = self.frames = 0
        self.ready_executors = 0
        self._streams = streams
        self._next = 0
        self._rng = random.Random(number)
        self._name = f"counting-{number}"
        self._socket = context.socket(zmq.DEALER)
        self._socket.connect(endpoint)

    async def join(self) -> None:
        await self._socket.send(encode(GatewayHello(PROTOCOL_MAJOR, PROTOCOL_MINOR, self._name)))
        welcome = decode_to_gateway(await self._socket.recv())
        assert isinstance(welcome, GatewayWelcome), welcome
        self._epoch = welcome.epoch

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._beat())
            while True:
                match decode_to_gateway(await self._socket.recv()):
                    case FleetState() as state:
                        self.ready_executors = state.ready_executors
                    case Outputs() as outputs:
                        self.frames += 1
                        self.tokens += len(outputs.tokens) // 4
                        assert not outputs.refused, outputs.refused
                        assert not outputs.failed, outputs.failed
                        for _ in outputs.finished:
                            await self._submit()

    async def begin(self) -> None:
        for _ in range(self._streams):
            await self._submit()

    async def _submit(self) -> None:
        prompt = PromptToGenerate(array("i", random_prompt(self._rng)).tobytes(), OUTPUT_TOKENS)
        await self._socket.send(encode(Submit(self._epoch, self._next, uuid.uuid4().hex, (prompt,), _SAMPLING)))
        self._next += 1

    async def _beat(self) -> None:
        while True:
            await self._socket.send(encode(Heartbeat(self._epoch)))
            await asyncio.sleep(1)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process; from its threads, because the process's own sum comes in pieces of 10 ms."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) * 1e-9


def resident_mib(pid: int) -> float:
    """Memory of a process that is in RAM."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def start(stack: ExitStack, *command: str) -> "subprocess.Popen[str]":
    """Start ``python -m`` of a command, which ends with ``stack``."""
    process = stack.enter_context(
        subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, text=True)
    )
    stack.callback(process.kill)
    return process


async def measure(args: argparse.Namespace) -> Row:
    """Let everything settle for a whole request, then look at it for ``--windows`` times ``--seconds``."""
    with ExitStack() as stack:
        scheduler = start(
            stack, "pagewise_scheduler.main", "--listen=tcp://127.0.0.1:*", "--listen-gateways=tcp://127.0.0.1:*",
            "--max-num-seqs=1024", "--max-num-batched-tokens=8192", "--max-waiting=100000", "--executor-timeout=60",
            "--gateway-timeout=60", "--log-level=error",
        )  # fmt: skip
        assert scheduler.stdout is not None
        _, for_gateways, for_executors = scheduler.stdout.readline().split()
        for number in range(args.executors):
            start(
                stack, "pagewise_executor.main", "--simulate", f"--simulate-step={args.step}", "--log-level=error",
                f"--scheduler={for_executors}", "--max-num-seqs=1024", "--max-num-batched-tokens=8192",
                "--num-blocks=65536", f"--executor-id=e{number}",
            )  # fmt: skip
        context = zmq.asyncio.Context()
        total = args.executors * args.streams
        gateways = [
            CountingGateway(context, for_gateways, number, total // args.gateways) for number in range(args.gateways)
        ]
        async with asyncio.TaskGroup() as tasks:
            running = []
            for gateway in gateways:
                await gateway.join()
                running.append(tasks.create_task(gateway.run()))
            while gateways[0].ready_executors < args.executors:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for gateway in gateways:
                await gateway.begin()
            await asyncio.sleep(OUTPUT_TOKENS * args.step + 2)
            windows = [await window(gateways, scheduler.pid, args.seconds) for _ in range(args.windows)]
            memory = resident_mib(scheduler.pid)
            for task in running:
                task.cancel()
        context.destroy(linger=0)
    return row_of(args, windows, memory)


async def window(gateways: list[CountingGateway], pid: int, seconds: float) -> tuple[float, float, float, float]:
    """Tokens, frames, CPU seconds and seconds of a window."""

    def read() -> tuple[float, ...]:
        tokens, frames = sum(one.tokens for one in gateways), sum(one.frames for one in gateways)
        return tokens, frames, cpu_seconds(pid), time.perf_counter()

    before = read()
    await asyncio.sleep(seconds)
    tokens, frames, cpu, taken = (now - then for now, then in zip(read(), before, strict=True))
    return tokens, frames, cpu, taken


def row_of(args: argparse.Namespace, windows: list[tuple[float, float, float, float]], memory: float) -> Row:
    """What the windows say."""
    per_token = [cpu / tokens * 1e6 for tokens, _, cpu, _ in windows]
    rate = statistics.median(tokens / taken for tokens, _, _, taken in windows)
    return Row(
        executors=args.executors,
        streams=args.streams,
        gateways=args.gateways,
        step_ms=args.step * 1e3,
        tokens_per_s=round(rate),
        of_offered=round(rate * args.step / (args.executors * args.streams), 3),
        tokens_per_frame=round(statistics.median(tokens / frames for tokens, frames, _, _ in windows), 1),
        cpu_us_per_token=round(statistics.median(per_token), 2),
        cpu_us_per_token_windows=[round(value, 2) for value in per_token],
        scheduler_cpu=round(statistics.median(cpu / taken for _, _, cpu, taken in windows), 3),
        rss_mib=round(memory, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--executors", type=int, default=8)
    parser.add_argument("--streams", type=int, default=128, help="per executor")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a simulated step")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=5.0, help="of a window")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="small and short: does everything run?")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    if args.smoke:
        args.executors, args.streams, args.step, args.seconds, args.windows = 2, 4, 0.01, 0.5, 1
    row = uvloop.run(measure(args))
    print(
        f"{row.executors} executors x {row.streams} streams, {row.gateways} gateways, steps of {row.step_ms:g} ms: "
        f"{row.tokens_per_s:.0f} tokens/s ({row.of_offered:.0%} of offered), {row.tokens_per_frame} tokens/frame, "
        f"{row.cpu_us_per_token} µs CPU/token, scheduler {row.scheduler_cpu:.0%}, {row.rss_mib} MiB"
    )
    if args.json:
        write_record(args.json, asdict(row))


if __name__ == "__main__":
    main()
