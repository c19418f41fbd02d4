"""A gateway without HTTP and text: a closed loop of streams over the wire to the scheduler, which costs little."""

import asyncio
import random
from collections.abc import Coroutine
from itertools import count

import zmq
import zmq.asyncio
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    FleetState,
    GatewayHello,
    GatewayWelcome,
    Heartbeat,
    Message,
    Outputs,
    Prompt,
    Query,
    QueryAnswer,
    Refused,
    Rejoin,
    RequestParams,
    Submit,
    decode_to_gateway,
    encode,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from benchmarks.scaling.load import OUTPUT_TOKENS, random_prompt
from benchmarks.scrape import Sample, parse_metrics

_PARAMS = RequestParams(SamplingParams(temperature=0))
_TOKEN_BYTES = 4


class WireLoad:
    """``streams`` requests at a time under the name of one gateway; each that ends is followed by another.

    ``tokens``: that have come. ``failures``: requests that were refused or have failed.
    """

    def __init__(self, endpoint: str, streams: int) -> None:
        self.tokens = 0
        self.failures: list[str] = []
        self._endpoint, self._streams = endpoint, streams
        self._rng = random.Random(streams)
        self._numbers = count()
        self._answers: dict[int, asyncio.Future[bytes]] = {}
        self._epoch, self._heartbeat_seconds = 0, 1.0
        self._ready_executors = 0
        self._changed = asyncio.Event()

    async def __aenter__(self) -> "WireLoad":
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.connect(self._endpoint)
        await self._send(GatewayHello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "wire load", "pagewise-demo", "wire load"))
        jobs: list[Coroutine[None, None, None]] = [self._receive(), self._keep_in_touch()]
        self._tasks = [asyncio.create_task(job) for job in jobs]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()
        self._context.term()

    async def start(self, executors: int) -> None:
        """Send the first requests once so many executors are ready."""
        while self._ready_executors < executors:
            self._changed.clear()
            await self._changed.wait()
        for _ in range(self._streams):
            await self._submit()

    async def scrape(self) -> list[Sample]:
        """The scheduler's metrics."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._send(Query(self._epoch, number, "metrics"))
        return parse_metrics((await answer).decode())

    async def _submit(self) -> None:
        number = next(self._numbers)
        prompt = Prompt(pack_int32s(random_prompt(self._rng)), OUTPUT_TOKENS)
        await self._send(Submit(self._epoch, number, f"wire-{number}", (prompt,), _PARAMS))

    async def _receive(self) -> None:
        while True:
            match decode_to_gateway(await self._socket.recv()):
                case Outputs() as outputs:
                    self.tokens += len(outputs.tokens) // _TOKEN_BYTES
                    self.failures += [refused.message for refused in outputs.refused]
                    self.failures += [failed.message for failed in outputs.failed]
                    for _ in outputs.finished:
                        await self._submit()
                case QueryAnswer() as answer:
                    self._answers.pop(answer.number).set_result(answer.body)
                case FleetState() as state:
                    self._ready_executors = state.ready_executors
                    self._changed.set()
                case GatewayWelcome() as welcome:
                    self._epoch, self._heartbeat_seconds = welcome.epoch, welcome.heartbeat_ms / 1000
                case Refused() as refused:
                    self.failures.append(refused.reason)
                case Rejoin():
                    self.failures.append("the scheduler has given this gateway up")

    async def _keep_in_touch(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_seconds)
            if self._epoch:
                await self._send(Heartbeat(self._epoch))

    async def _send(self, message: Message) -> None:
        await self._socket.send(encode(message))
