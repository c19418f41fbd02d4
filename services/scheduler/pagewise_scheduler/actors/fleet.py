"""The fleet: the socket executors connect to, and who of them is alive."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import count

import msgspec
import zmq
import zmq.asyncio
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    Copied,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    Refused,
    Rejoin,
    StepResult,
    decode_from_executor,
    encode,
)

from pagewise_scheduler.actors.engine import HEARTBEAT_MS, Engine, Lost
from pagewise_scheduler.actors.live_request import clock
from pagewise_scheduler.actors.router import Joined, Left, Router
from pagewise_scheduler.core.memory.cost_aware import UseHistory
from pagewise_scheduler.core.memory.eviction import EvictionName
from pagewise_scheduler.core.recovery.cost_model import Costs, Eviction
from pagewise_scheduler.core.recovery.recovery import RecoveryMode
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.metrics import Metrics

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_BAD_FRAMES = 8
"""Undecodable frames after which a sender is ignored until it says Hello properly."""


@dataclass(slots=True)
class Member:
    """An executor that has joined."""

    hello: Hello
    engine: Engine
    last_seen: float


@dataclass(slots=True)
class _Link:
    """One executor's end of the shared socket."""

    socket: zmq.asyncio.Socket
    identity: bytes
    epochs: "count[int]" = field(repr=False)

    async def send(self, frame: bytes) -> bool:
        try:
            await self.socket.send_multipart([self.identity, frame])
        except zmq.ZMQError:
            return False
        return True

    def next_epoch(self) -> int:
        return next(self.epochs)


class Fleet:
    """Admits executors, gives each an engine, and gives up those that fall silent.

    One task reads the socket, one watches the clock; engines run beside them in the same task group.
    """

    def __init__(
        self,
        endpoint: str,
        router: Router,
        metrics: Metrics,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int | None,
        executor_timeout: float,
        step_timeout: float,
        recovery: RecoveryMode = "auto",
        eviction: EvictionName = "cost",
    ) -> None:
        self._router = router
        self._metrics = metrics
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._executor_timeout = executor_timeout
        self._step_timeout = step_timeout
        self._recovery: RecoveryMode = recovery
        self._eviction: Eviction = UseHistory() if eviction == "cost" else eviction  # all executors learn together
        self._members: dict[bytes, Member] = {}
        self._bad_frames: dict[bytes, int] = {}
        self._fingerprint: str | None = None
        # Epochs grow over restarts of the scheduler too, so that a result of an earlier life is never taken.
        self._epochs = count(time.time_ns() // 1_000_000)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(executor_timeout * 1000))
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(), name="fleet watch")
                while True:
                    identity, *frames = await self._socket.recv_multipart()
                    await self._take(identity, frames[-1] if frames else b"", tasks)
        finally:
            self._socket.close()
            self._context.term()

    async def _take(self, identity: bytes, frame: bytes, tasks: asyncio.TaskGroup) -> None:
        try:
            message = decode_from_executor(frame)
        except ProtocolError as error:
            self._drop(identity, "undecodable", str(error))
            return
        if isinstance(message, Hello):
            await self._admit(identity, message, tasks)
            return
        member = self._members.get(identity)
        if member is None:
            self._drop(identity, "unknown_sender", "not a member")
            if self._bad_frames.get(identity, 0) <= MAX_BAD_FRAMES:
                await self._send(identity, Rejoin())
            return
        member.last_seen = clock()
        match message:
            case StepResult() | Copied():
                member.engine.tell(message)
            case Heartbeat(epoch):
                if epoch != member.engine.scheduler.epoch:
                    self._metrics.frames_dropped("stale_epoch").inc()
                await self._send(identity, HeartbeatAck(member.engine.scheduler.epoch))
            case Goodbye(reason=reason):
                self._give_up(identity, f"it left ({reason or 'no reason given'})")

    async def _admit(self, identity: bytes, hello: Hello, tasks: asyncio.TaskGroup) -> None:
        refusal = self._refusal(hello)
        if refusal is not None:
            log.error("executor %s refused: %s", hello.executor_id, refusal)
            self._metrics.frames_dropped("refused").inc()
            await self._send(identity, Refused(refusal))
            return
        if identity in self._members:
            self._give_up(identity, "it said Hello again")
        for other, member in list(self._members.items()):
            # One that was started again under its old name: no need to wait until its old life times out. Two that
            # are alive under one name are both kept: names are for people.
            silent = clock() - member.last_seen > 1.5 * HEARTBEAT_MS / 1000
            if member.hello.executor_id == hello.executor_id and silent:
                self._give_up(other, "it was started again")
        self._bad_frames.pop(identity, None)
        self._fingerprint = hello.model_fingerprint
        limit = min(hello.max_model_len, self._max_model_len or hello.max_model_len)
        link = _Link(self._socket, identity, self._epochs)
        scheduler = Scheduler(
            model_fingerprint=hello.model_fingerprint,
            num_blocks=hello.num_blocks,
            block_size=hello.block_size,
            max_num_seqs=min(self._max_num_seqs, hello.max_num_seqs or self._max_num_seqs),
            max_num_batched_tokens=min(
                self._max_num_batched_tokens, hello.max_num_batched_tokens or self._max_num_batched_tokens
            ),
            epoch=link.next_epoch(),
            num_host_blocks=hello.num_host_blocks,
            costs=_costs(hello),
            recovery=self._recovery,
            eviction=self._eviction,
        )
        engine = Engine(hello.executor_id, scheduler, link, self._router, self._metrics)
        self._members[identity] = Member(hello, engine, clock())
        await self._send(identity, engine.welcome())
        tasks.create_task(self._live(identity, engine), name=engine.name)
        self._router.tell(Joined(engine, scheduler.kv.capacity_tokens, limit, hello.vocab_size))
        log.info(
            "executor %s joined: %d blocks of %d tokens and %d on the host, %s %s",
            hello.executor_id,
            hello.num_blocks,
            hello.block_size,
            hello.num_host_blocks,
            hello.device,
            hello.dtype,
        )

    async def _live(self, identity: bytes, engine: Engine) -> None:
        """Run an engine; one that ended by itself takes its executor out of the fleet."""
        await engine.run()
        self._router.tell(Left(engine))
        if (member := self._members.get(identity)) is not None and member.engine is engine:
            del self._members[identity]
            await self._send(identity, Rejoin())

    def _refusal(self, hello: Hello) -> str | None:
        if hello.protocol_major != PROTOCOL_MAJOR:
            return f"it speaks protocol {hello.protocol_major}, this scheduler speaks {PROTOCOL_MAJOR}"
        if (
            min(hello.num_blocks, hello.block_size, hello.max_model_len, hello.vocab_size) < 1
            or hello.num_host_blocks < 0
        ):
            return "it offers no blocks, or a block, model length or vocabulary of no tokens"
        # A fleet that is empty may come back with another model; a live one is of one model.
        if self._members and self._fingerprint != hello.model_fingerprint:
            return f"its model {hello.model_fingerprint} is not the fleet's model {self._fingerprint}"
        return None

    def _give_up(self, identity: bytes, reason: str) -> None:
        member = self._members.pop(identity)
        log.warning("executor %s is gone: %s; its requests move on", member.hello.executor_id, reason)
        self._router.tell(Left(member.engine))
        member.engine.tell(Lost(reason))

    def _drop(self, identity: bytes, reason: str, detail: str) -> None:
        self._metrics.frames_dropped(reason).inc()
        seen = self._bad_frames.get(identity, 0) + 1
        if len(self._bad_frames) > 10_000:  # identities are the sender's choice: keep the table bounded
            self._bad_frames.clear()
        self._bad_frames[identity] = seen
        if seen == 1:
            log.warning("dropped a frame (%s): %s", reason, detail)
        if seen == MAX_BAD_FRAMES and identity in self._members:
            self._give_up(identity, "it keeps sending frames that cannot be decoded")

    async def _watch(self) -> None:
        """Give up members that fell silent, or whose step does not return."""
        while True:
            await asyncio.sleep(min(1.0, self._executor_timeout / 4))
            now = clock()
            for identity, member in list(self._members.items()):
                if now - member.last_seen > self._executor_timeout:
                    self._give_up(identity, f"no heartbeat for {now - member.last_seen:.1f} s")
                elif (began := member.engine.oldest_step_time) is not None and now - began > self._step_timeout:
                    self._give_up(identity, f"a step has not returned for {now - began:.1f} s")
                elif (due := member.engine.oldest_copy_time) is not None and now - due > self._step_timeout:
                    self._give_up(identity, f"a copy to or from its host memory is {now - due:.1f} s late")

    async def _send(self, identity: bytes, message: Message) -> None:
        await _Link(self._socket, identity, self._epochs).send(encode(message))


def _costs(hello: Hello) -> Costs | None:
    """What the executor has measured, in seconds."""
    if hello.costs is None:
        return None
    return Costs(**{name: value * 1e-6 for name, value in msgspec.structs.asdict(hello.costs).items()})
