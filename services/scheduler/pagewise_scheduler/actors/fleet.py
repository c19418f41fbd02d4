"""The fleet: the socket executors connect to, and who of them is alive."""

import asyncio
import logging
import time
from dataclasses import dataclass, field
from itertools import count

import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections, HandshakeFailure
from pagewise_shared.curve import Gate, Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import (
    HOST,
    PROTOCOL_MAJOR,
    Copied,
    Drain,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Leaving,
    Message,
    Refused,
    Rejoin,
    StepResult,
    decode_from_executor,
    encode,
)

from pagewise_scheduler.actors.checks import flaw_of_copies, flaw_of_result
from pagewise_scheduler.actors.draining import Draining
from pagewise_scheduler.actors.engine import HEARTBEAT_MS, CopiesLate, Engine, Lost
from pagewise_scheduler.actors.entry import Entry, costs_of
from pagewise_scheduler.actors.lending import Lending
from pagewise_scheduler.actors.live_request import clock
from pagewise_scheduler.actors.router import Joined, Left, Router
from pagewise_scheduler.core.memory.cost_aware import UseHistory
from pagewise_scheduler.core.memory.eviction import EvictionName
from pagewise_scheduler.core.recovery.cost_model import Eviction
from pagewise_scheduler.core.recovery.recovery_plan import RecoveryMode
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.virtual_tokens import VirtualTokens
from pagewise_scheduler.metrics import Drop, Metrics

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 64 * 1024 * 1024
_MOST_PATIENCE, _SHARE_OF_PATIENCE = 600.0, 0.9
"""Seconds that draining may take at most, and how much of what an executor grants is used."""
MAX_BAD_FRAMES = 8
"""Undecodable frames after which a sender is ignored until it says Hello properly."""

_MOST_REFUSED = 1000
"""Refused connections that are counted for one heartbeat: an executor may claim any number of them."""

_QUEUED_FRAMES = 64
_FRAMES_AT_ONCE = 16


@dataclass(slots=True)
class Member:
    """An executor that has joined. ``key``: its public key, "" without CURVE. Times are in seconds of ``clock``.

    ``refused``: connections to its block socket that it has refused.
    """

    hello: Hello
    engine: Engine
    key: str
    joined: float
    last_seen: float
    leaving: bool = False
    refused: int = 0


@dataclass(slots=True)
class _Link:
    """One executor's end of the shared socket."""

    socket: zmq.asyncio.Socket
    identity: bytes
    epochs: "count[int]" = field(repr=False)

    async def send(self, frame: bytes) -> bool:
        try:
            # Never waits: one that does not read must not hold up the others.
            await self.socket.send_multipart([self.identity, frame], zmq.DONTWAIT)
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
        keys: Keys | None = None,
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
        self._lending = Lending(metrics)
        self._draining = Draining(router.tokenizer, self._staying, metrics)
        self._bad_frames: dict[bytes, int] = {}
        self._complaints, self._refusals = BoundedLog(log), BoundedLog(log)
        self._entry = Entry(keys)
        self._fingerprint: str | None = None
        self._virtual_tokens = VirtualTokens()
        # Epochs grow over restarts of the scheduler too, so that a result of an earlier life is never taken.
        self._epochs = count(time.time_ns() // 1_000_000)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(executor_timeout * 1000))
        # What a sender may have queued here; what it sends beyond that waits on its own side.
        self._socket.setsockopt(zmq.RCVHWM, _QUEUED_FRAMES)
        self._gate: Gate | None = None
        if keys is not None:
            self._gate = Gate(self._context, keys, metrics.connections_refused("unknown_key").inc)
            self._gate.secure_server(self._socket)
        self._connections = Connections(self._socket)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def run(self) -> None:
        """Serve until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(), name="fleet watch")
                tasks.create_task(self._watch_connections(), name="fleet connections")
                for number in count():
                    if number % _FRAMES_AT_ONCE == 0:  # where frames never end, receiving never waits
                        await asyncio.sleep(0)
                    identity, *frames = await self._socket.recv_multipart(copy=False)
                    # A message is one frame; another number of them is none.
                    content = frames[0].bytes if len(frames) == 1 else b""
                    await self._take(identity.bytes, content, self._key_of(identity), tasks)
        finally:
            if self._gate is not None:
                self._gate.close()
            self._connections.close()
            self._socket.close()
            self._context.term()

    def _key_of(self, frame: zmq.Frame) -> str:
        """The public key that the connection of this frame has proved to own."""
        return str(frame.get("User-Id")) if self._gate is not None else ""

    async def _take(self, identity: bytes, frame: bytes, key: str, tasks: asyncio.TaskGroup) -> None:
        member = self._members.get(identity)
        if member is not None and member.key != key:
            self._metrics.frames_dropped("wrong_key").inc()
            self._complaints.warning("dropped a frame (wrong_key): not that of %s", member.hello.executor_id)
            return
        try:
            message = decode_from_executor(frame)
        except ProtocolError as error:
            self._drop(identity, "undecodable", str(error))
            return
        if isinstance(message, Hello):
            if self._entry.in_time(key, member.joined if member else None, clock()):
                await self._admit(identity, message, key, tasks)
            else:
                self._metrics.frames_dropped("too_many_hellos").inc()
            return
        if member is None:
            self._drop(identity, "unknown_sender", "not a member")
            if self._bad_frames.get(identity, 0) <= MAX_BAD_FRAMES:
                await self._send(identity, Rejoin())
            return
        if not isinstance(message, Goodbye):
            if message.epoch == member.engine.scheduler.epoch:
                member.last_seen = clock()
            else:  # of an earlier life: no sign of this one
                self._metrics.frames_dropped("stale_epoch").inc()
        match message:
            case StepResult() | Copied():
                if message.epoch == member.engine.scheduler.epoch:
                    self._pass_on(identity, member, message)
            case Heartbeat(epoch=epoch, refused=refused):
                if epoch == member.engine.scheduler.epoch:
                    self._count_refused(member, refused)
                await self._send(identity, HeartbeatAck(member.engine.scheduler.epoch))
            case Leaving(patience_ms=patience):
                if not member.leaving:
                    member.leaving = True
                    log.info("executor %s is leaving: its work moves", member.hello.executor_id)
                    self._router.tell(Left(member.engine))
                    seconds = min(patience / 1000, _MOST_PATIENCE) * _SHARE_OF_PATIENCE
                    tasks.create_task(self._drain(identity, member.engine, seconds), name="drain")
            case Goodbye(reason=reason):
                self._give_up(identity, f"it left ({printable(reason) or 'no reason given'})", died=False)

    def _count_refused(self, member: Member, refused: int) -> None:
        if refused > member.refused:
            more = min(refused - member.refused, _MOST_REFUSED)
            self._metrics.connections_refused("unknown_key_blocks").inc(more)
            member.refused = refused

    async def _drain(self, identity: bytes, engine: Engine, seconds: float) -> None:
        """Drain an executor; if that fails, it is told to go at once."""
        try:
            await self._draining.drain(engine, seconds)
        except Exception:
            log.exception("draining %s failed", engine.executor_id)
        await self._send(identity, Drain(engine.scheduler.epoch))

    def _pass_on(self, identity: bytes, member: Member, message: StepResult | Copied) -> None:
        """Hand a result to the engine, unless it tells of what cannot be."""
        flaw = flaw_of_result(message, member.hello) if isinstance(message, StepResult) else flaw_of_copies(message)
        if flaw is None:
            member.engine.tell(message)
        else:
            self._metrics.frames_dropped("impossible").inc()
            self._give_up(identity, f"it told of {flaw}")

    async def _admit(self, identity: bytes, hello: Hello, key: str, tasks: asyncio.TaskGroup) -> None:
        for other, member in list(self._members.items()):
            # The same process on another connection: the old one has broken, which nobody may have noticed yet.
            same = (member.hello.executor_id, member.hello.block_endpoint, member.key)
            if other != identity and hello.block_endpoint and same == (hello.executor_id, hello.block_endpoint, key):
                self._give_up(other, "it is back on another connection", died=False)
        refusal = self._refusal(identity, hello, key)
        if refusal is not None:
            self._refusals.warning("executor %s refused: %s", printable(hello.executor_id), refusal)
            self._metrics.frames_dropped("refused").inc()
            await self._send(identity, Refused(refusal))
            return
        if identity in self._members:
            self._give_up(identity, "it said Hello again", died=False)
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
            tiers={HOST: hello.num_host_blocks},
            costs=costs_of(hello),
            recovery=self._recovery,
            eviction=self._eviction,
            max_model_len=limit,
            virtual_tokens=self._virtual_tokens,
        )
        engine = Engine(hello.executor_id, scheduler, link, self._router, self._metrics, hello.bytes_per_block)
        self._lending.begin(hello, engine, key)
        now = clock()
        self._members[identity] = Member(hello, engine, key, joined=now, last_seen=now)
        keeps = self._lending.take_over(hello, scheduler)
        await self._send(identity, engine.welcome(keeps_blocks=keeps, hello=hello.number))
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
        self._lending.end(engine, self._engines())
        if (member := self._members.get(identity)) is not None and member.engine is engine:
            del self._members[identity]
            log.warning("executor %s is gone: its engine has ended; its requests move on", engine.executor_id)
            await self._send(identity, Rejoin())

    def _refusal(self, identity: bytes, hello: Hello, key: str) -> str | None:
        if hello.protocol_major != PROTOCOL_MAJOR:
            return f"it speaks protocol {hello.protocol_major}, this scheduler speaks {PROTOCOL_MAJOR}"
        others = [(member.hello, member.key) for other, member in self._members.items() if other != identity]
        if (refusal := self._entry.refusal(hello, key, others)) is not None:
            return refusal
        # A fleet that is empty may come back with another model; a live one is of one model.
        if self._members and self._fingerprint != hello.model_fingerprint:
            return f"its model {hello.model_fingerprint} is not the fleet's model {self._fingerprint}"
        if any(member.hello.vocab_size != hello.vocab_size for member in self._members.values()):
            return f"its vocabulary of {hello.vocab_size} is not the fleet's"
        return None

    def _give_up(self, identity: bytes, reason: str, *, died: bool = True) -> None:
        member = self._members.pop(identity)
        log.warning("executor %s is gone: %s; its requests move on", member.hello.executor_id, reason)
        self._router.tell(Left(member.engine))
        self._lending.end(member.engine, self._engines())
        member.engine.tell(Lost(reason, died))

    def _engines(self) -> list[Engine]:
        return [member.engine for member in self._members.values()]

    def _staying(self, leaving: Engine) -> list[Engine]:
        """Engines of members that are not about to leave."""
        engines = [member.engine for member in self._members.values() if not member.leaving]
        return [engine for engine in engines if engine is not leaving and not engine.ended]

    def _drop(self, identity: bytes, reason: Drop, detail: str) -> None:
        self._metrics.frames_dropped(reason).inc()
        seen = self._bad_frames.get(identity, 0) + 1
        if len(self._bad_frames) > 10_000:  # identities are the sender's choice: keep the table bounded
            self._bad_frames.clear()
        self._bad_frames[identity] = seen
        if seen == 1:
            self._complaints.warning("dropped a frame (%s): %s", reason, detail)
        if seen == MAX_BAD_FRAMES and identity in self._members:
            self._give_up(identity, "it keeps sending frames that cannot be decoded")

    async def _watch(self) -> None:
        """Give up members that fell silent, or whose step does not return."""
        while True:
            await asyncio.sleep(min(1.0, self._executor_timeout / 4))
            now = clock()
            revoked = self._entry.revoked(member.key for member in self._members.values())
            for identity, member in list(self._members.items()):
                if now - member.last_seen > self._executor_timeout:
                    self._give_up(identity, f"no heartbeat for {now - member.last_seen:.1f} s")
                elif (began := member.engine.oldest_step_time) is not None and now - began > self._step_timeout:
                    self._give_up(identity, f"a step has not returned for {now - began:.1f} s")
                elif member.key in revoked:
                    self._give_up(identity, "its key was revoked")
                elif (due := member.engine.oldest_copy_time) is not None and now > due:
                    if now - due > self._step_timeout:
                        self._give_up(
                            identity, f"a copy to or from its host memory or a peer is {now - due:.1f} s late"
                        )
                    else:
                        member.engine.tell(CopiesLate())

    async def _watch_connections(self) -> None:
        """Give up members whose connection has broken, without waiting for a heartbeat that cannot come."""
        refused = self._metrics.connections_refused("handshake")
        while True:
            event = await self._connections.next()
            if isinstance(event, HandshakeFailure):
                if not event.refused:  # those are counted by the gate
                    refused.inc()
                    self._complaints.warning("a handshake failed: no CURVE, or meant for a scheduler with another key")
                continue
            for identity, member in list(self._members.items()):
                reached = await self._send(identity, HeartbeatAck(member.engine.scheduler.epoch))
                if not reached and self._members.get(identity) is member:
                    self._give_up(identity, "its connection broke")

    async def _send(self, identity: bytes, message: Message) -> bool:
        return await _Link(self._socket, identity, self._epochs).send(encode(message))
