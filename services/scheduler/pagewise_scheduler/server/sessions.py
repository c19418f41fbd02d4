"""Sessions: what executors and gateways have in common, from Hello until they leave or are given up."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from time import monotonic as clock
from typing import Generic, TypeVar

import msgspec
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.failure_detector import FailureDetector
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    GatewayHello,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Hello,
    Message,
    Refused,
    Rejoin,
)

from pagewise_scheduler.metrics import Drop, Metrics
from pagewise_scheduler.server.router_socket import PeerKind, Received, RouterSocket

log = logging.getLogger(__name__)

HEARTBEAT_MS = 250
SILENT_SECONDS = 1.5
"""After how many seconds without a sign of life a process is called silent."""
MAX_BAD_FRAMES = 8
"""Undecodable frames after which a sender is ignored until it says Hello properly."""

MAX_TEXT = 256
"""Characters of a name."""

_MOST_SENDERS = 10_000
_AGAIN_SECONDS = 1.0
_BURST, _PER_SECOND = 256.0, 32.0

PeerT = TypeVar("PeerT")


class Loss(Enum):
    """How a process was lost; the values are reasons of a ``Move``.

    LEFT: it said so. REJOINED: it is back in another session. DIED: its connection broke, it fell silent, or it was
    started again. STALLED: a step or a copy does not return. MISBEHAVED: what it sends makes no sense. REVOKED: its key
    was. FAILED: the scheduler itself failed while it did something for it.
    """

    LEFT = "drain"
    REJOINED = "rejoined"
    DIED = "lost"
    STALLED = "stalled"
    MISBEHAVED = "misbehaved"
    REVOKED = "revoked"
    FAILED = "failed"

    @property
    def expected(self) -> bool:
        """Whether the process itself has ended its session, and nothing has failed."""
        return self in (Loss.LEFT, Loss.REJOINED)


@dataclass(slots=True, eq=False)
class Session(Generic[PeerT]):
    """A process that is in. Times are in seconds of ``clock``.

    Fields:
        identity: of its connection. key: its public key, "" without CURVE. name: for people.
        peer: what the scheduler knows of it beside that.
        epoch: fences its lives: what it sends under another one is not applied.
        detector: when it was heard, and for how long it may be silent.
        unreachable: something could not be sent to it. It is given up when all is read that it had sent before.
    """

    identity: bytes
    key: str
    name: str
    peer: PeerT
    epoch: int
    joined: float
    detector: FailureDetector
    unreachable: bool = False


class JoinGuard:
    """Decides about Hellos of one kind of process. ``keys``: the allow-list, None where connections have no keys."""

    def __init__(self, kind: PeerKind, keys: Keys | None) -> None:
        self._kind = kind
        self._keys = keys
        self._allowance: dict[str, tuple[float, float]] = {}

    def in_time(self, key: str, joined: float | None, now: float) -> bool:
        """Whether a Hello may be looked at now, or comes too often.

        A process that waited for long has queued several: those that come right after a welcome are void. Apart from
        that each ``key`` has an allowance, large enough for a fleet that comes back all at once.
        """
        if joined is not None and now - joined < _AGAIN_SECONDS:
            return False
        left, since = self._allowance.get(key, (_BURST, now))
        left = min(_BURST, left + (now - since) * _PER_SECOND)
        self._allowance[key] = max(0.0, left - 1.0), now
        return left >= 1.0

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that are not on the allow-list any more."""
        return set() if self._keys is None else set(keys) - self._keys.allowed(self._kind).keys()

    def refusal(self, name: str, key: str, others: Iterable[tuple[str, str]]) -> str | None:
        """Why the owner of ``key`` may not join under ``name``; None: it may.

        ``others``: names and keys of the processes of its kind that are in.
        """
        if len(name) > MAX_TEXT or not name.isprintable():
            return f"its name is longer than {MAX_TEXT} characters, or has some that cannot be printed"
        if self._keys is None:
            return None
        allowed = self._keys.allowed(self._kind)
        owner = allowed.get(key)
        if owner is None:
            kind = self._keys.kind(key)
            return "its key was revoked" if kind is None else f"its key is one for {kind}s"
        if name != owner and name in allowed.values():
            return f"the name {name} belongs to the key {name}, and its key is {owner}"
        if dict(others).get(name, key) != key:
            return f"{self._kind} {name} with another key is in already"
        return None


class Sessions(ABC, Generic[PeerT]):
    """Who is in over one socket. Belongs to the coordinator; subclasses say what a Hello and a message mean.

    This is the one place where epochs are checked: when a message is handled, after everything that came before it,
    because handling one may begin a new epoch. The core takes each message that it gets to be of its present epoch.
    """

    hello_type: type[Message]
    name_field: str
    """The field of a Hello with its sender's name."""
    least_timeout: float
    """Seconds of silence after which a process is given up at the soonest, however regular its heartbeats were."""

    def __init__(
        self,
        socket: RouterSocket,
        keys: Keys | None,
        metrics: Metrics,
        timeout: float,
        next_epoch: Callable[[], int],
    ) -> None:
        """``timeout``: seconds without a sign of life after which a process is given up at the latest."""
        self.metrics = metrics
        self.socket = socket
        self.timeout = timeout
        self.guard = JoinGuard(socket.kind, keys)
        self._next_epoch = next_epoch
        self._sessions: dict[bytes, Session[PeerT]] = {}
        self._given_up: dict[str, FailureDetector] = {}  # of those that fell silent, by their names
        self._bad_frames: dict[bytes, int] = {}
        self._complaints, self._refusals = BoundedLog(log), BoundedLog(log)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session[PeerT]]:
        return iter(list(self._sessions.values()))

    # ---- what comes in -------------------------------------------------------------------------------

    def take(self, received: Received) -> None:
        """Apply a frame that has come, or drop and count it."""
        identity, key, message, now = received.identity, received.key, received.message, clock()
        session = self._sessions.get(identity)
        if session is not None and session.key != key:
            self.metrics.frames_dropped("wrong_key").inc()
            self._complaints.warning("dropped a frame (wrong_key): not that of %s", session.name)
        elif isinstance(message, ProtocolError):
            self.drop(identity, "undecodable", str(message))
        elif isinstance(message, self.hello_type):
            self._hello(identity, key, message, now, session)
        elif session is None:
            self._take_from_unknown(identity, message)
        elif isinstance(message, Goodbye):
            self.lose(session, f"it left ({printable(message.reason) or 'no reason given'})", Loss.LEFT)
        else:
            self._take_from(session, message, now)

    def _take_from_unknown(self, identity: bytes, message: Message) -> None:
        # One that leaves may have been given up already, because its connection broke before this was read.
        self.drop(identity, "unknown_sender", "" if isinstance(message, Goodbye) else "its sender has not joined")
        if self._bad_frames.get(identity, 0) <= MAX_BAD_FRAMES:
            self.socket.send(identity, Rejoin())

    def _take_from(self, session: Session[PeerT], message: Message, now: float) -> None:
        """Apply a message of a process that is in, if it belongs to its present life."""
        fresh = message.epoch == session.epoch  # type: ignore[attr-defined]  # all but Hellos have one
        if fresh:
            if isinstance(message, Heartbeat):
                session.detector.beat(now)
            else:
                session.detector.heard(now)
        else:  # of an earlier life: no sign of this one
            self.metrics.frames_dropped("stale_epoch").inc()
        if isinstance(message, Heartbeat):
            self.socket.send(session.identity, HeartbeatAck(session.epoch))
        if fresh:
            self._apply(session, message)

    def _hello(self, identity: bytes, key: str, hello: Message, now: float, session: Session[PeerT] | None) -> None:
        """``session``: that of the same connection, if it has one already."""
        assert isinstance(hello, Hello | GatewayHello)
        if not self.guard.in_time(key, session.joined if session is not None else None, now):
            self.metrics.frames_dropped("too_many_hellos").inc()
        elif (major := hello.protocol_major) == PROTOCOL_MAJOR:
            self._admit(identity, key, hello, now)
        else:
            reason = f"it speaks protocol {major}, this scheduler speaks {PROTOCOL_MAJOR}"
            self.refuse(identity, getattr(hello, self.name_field), reason)

    def refuse(self, identity: bytes, name: str, reason: str) -> None:
        """Turn away who has said Hello."""
        self._refusals.warning("%s %s refused: %s", self.socket.kind, printable(name), reason)
        self.metrics.frames_dropped("refused").inc()
        self.socket.send(identity, Refused(reason))

    def enter(self, session: Session[PeerT]) -> None:
        """Let a process in; one of the same name that has fallen silent is its former life."""
        if (before := self._sessions.get(session.identity)) is not None:
            self.lose(before, "it said Hello again", Loss.REJOINED)
        for other in self:
            # One that was started again under its old name: no need to wait until its old life times out. Two that
            # are alive under one name are both kept: names are for people.
            if other.name == session.name and other.detector.silence(session.joined) > SILENT_SECONDS:
                self.lose(other, "it was started again")
        known = self._given_up.pop(session.name, None)
        if known is not None and (silence := known.silence(session.joined)) < self.timeout:
            # It was alive, so its next silence of that kind is waited for. One that comes later was given up rightly.
            known.beat(session.joined)
            session.detector = known
            text = "%s %s is back after %.1f s of silence: for the next minute it may be silent for %.1f s"
            log.info(text, self.socket.kind, printable(session.name), silence, known.timeout)
        self._bad_frames.pop(session.identity, None)
        self._sessions[session.identity] = session

    def new_detector(self, now: float) -> FailureDetector:
        """For a process that says Hello now."""
        return FailureDetector(now, least=self.least_timeout, most=self.timeout)

    def others(self, identity: bytes) -> list[Session[PeerT]]:
        """All sessions but that of a connection."""
        return [session for session in self if session.identity != identity]

    def drop(self, identity: bytes, reason: Drop, detail: str) -> None:
        """Count a frame that is not applied; who sends too many of them is given up.

        ``detail``: what a warning says about it; "": there is none.
        """
        self.metrics.frames_dropped(reason).inc()
        seen = self._bad_frames.get(identity, 0) + 1
        if len(self._bad_frames) > _MOST_SENDERS:  # identities are the sender's choice: keep the table bounded
            self._bad_frames.clear()
        self._bad_frames[identity] = seen
        if seen == 1 and detail:
            self._complaints.warning("dropped a frame (%s): %s", reason, detail)
        if seen >= MAX_BAD_FRAMES and (session := self._sessions.get(identity)) is not None:
            self.lose(session, "it keeps sending frames that cannot be decoded", Loss.MISBEHAVED)

    # ---- who is lost ---------------------------------------------------------------------------------

    def lose(self, session: Session[PeerT], reason: str, loss: Loss = Loss.DIED) -> None:
        """A process is gone, or given up; harmless the second time."""
        if self._sessions.get(session.identity) is session:
            del self._sessions[session.identity]
            self._lost(session, reason, loss)

    def watch(self, now: float, stood_still: float) -> None:
        """Give up those that have fallen silent, or whose key was revoked.

        ``stood_still``: seconds for which this process could hear nothing; they are no silence of another one.
        """
        revoked = self.guard.revoked(session.key for session in self._sessions.values())
        for session in self:
            detector = session.detector
            detector.stood_still(stood_still, now)
            if detector.suspects(now):
                if len(self._given_up) > _MOST_SENDERS:  # names are the sender's choice: keep the table bounded
                    self._given_up.clear()
                self._given_up[session.name] = detector
                gap = detector.longest_gap
                before = "" if gap is None else f", and before for {gap:.2f} s at most"
                self.lose(session, f"no heartbeat for {detector.silence(now):.1f} s{before}")
            elif session.key in revoked:
                self.lose(session, "its key was revoked", Loss.REVOKED)

    def probe(self) -> None:
        """Connections have broken: find those that cannot be reached, without waiting for their heartbeats."""
        for session in self:
            self.send(session, HeartbeatAck(session.epoch))

    def send(self, session: Session[PeerT], message: Message) -> None:
        """Send a message to a process that has joined. If it cannot be reached, it is lost soon, even if it comes back,
        because it lacks that message. It is not lost at once, because its Goodbye may not have been read yet."""
        if not self.socket.send(session.identity, message) and not session.unreachable:
            session.unreachable = True
            self.socket.report_unreachable(session.identity)

    def give_up(self, identity: bytes) -> None:
        """Lose a process that cannot be reached, unless its last messages, handled by now, had its Goodbye."""
        if (session := self._sessions.get(identity)) is not None and session.unreachable:
            self.lose(session, "its connection broke, or it does not read what it is sent")
            self.socket.send(identity, Rejoin())

    # ---- what it means -------------------------------------------------------------------------------

    @abstractmethod
    def _admit(self, identity: bytes, key: str, hello: Message, now: float) -> None:
        """Somebody says Hello: ``enter`` or ``refuse``."""

    @abstractmethod
    def _apply(self, session: Session[PeerT], message: Message) -> None:
        """A message of a process that is in, under its present epoch."""

    @abstractmethod
    def _lost(self, session: Session[PeerT], reason: str, loss: Loss) -> None:
        """A process is not in any more."""


def spoken_version(hello: Hello | GatewayHello) -> str:
    """What the line that says who joined adds for a process of another minor version; else nothing."""
    if hello.protocol_minor == PROTOCOL_MINOR:
        return ""
    major, minor = PROTOCOL_MAJOR, hello.protocol_minor
    return f" (it speaks protocol {major}.{minor}, this scheduler {major}.{PROTOCOL_MINOR})"


def text_flaw(struct: msgspec.Struct, names: tuple[str, ...], most: int) -> str | None:
    """Which of the texts of ``struct`` is too long, or would spoil a line of a log; None: none."""
    for name in names:
        text = getattr(struct, name)
        if len(text) > most or not text.isprintable():
            return f"its {name} is longer than {most} characters, or has some that cannot be printed"
    return None
