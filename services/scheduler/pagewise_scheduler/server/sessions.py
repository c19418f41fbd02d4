"""Sessions: the part of executors' and gateways' protocol that is the same, from Hello to Goodbye or a time-out."""

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
from pagewise_scheduler.server.router_socket import (
    ConnectionsBroke,
    Event,
    PeerKind,
    Received,
    RouterSocket,
    Unreachable,
)

log = logging.getLogger(__name__)

HEARTBEAT_MS = 250
SILENT_SECONDS = 1.5
"""Seconds of silence after which a new session of the same name replaces a session."""
MAX_BAD_FRAMES = 8
"""Undecodable frames after which a sender is ignored until its next valid Hello."""

MAX_TEXT = 256
"""Characters of a name."""

_MOST_SENDERS = 10_000
_AGAIN_SECONDS = 1.0
_BURST, _PER_SECOND = 256.0, 32.0

PeerT = TypeVar("PeerT")


class ImpossibleError(ProtocolError):
    """A message has a value that is out of bounds; the text names it."""


class Loss(Enum):
    """Why a session ended; the values are reasons of a ``Move``.

    LEFT: the process sent Goodbye. REJOINED: it is back in another session. DIED: its connection broke, it fell silent,
    or it was restarted. STALLED: a step or a copy does not return. MISBEHAVED: its messages are invalid. REVOKED: its
    key was revoked. FAILED: the scheduler itself failed while it worked for this process.
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
    """A process that has joined. Times are in seconds of ``clock``.

    Fields:
        identity: of its connection. key: its public key, "" without CURVE. name: for people.
        peer: the state of the executor or the gateway.
        epoch: fences off its earlier sessions: messages of another epoch are dropped.
        detector: suspects it when it is silent for too long.
        unreachable: a message could not be sent to it. It is lost once all its earlier messages have been read.
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
    """Decides which processes of one kind may join. ``keys``: the allow-list, None where connections have no keys."""

    def __init__(self, kind: PeerKind, keys: Keys | None) -> None:
        self._kind = kind
        self._keys = keys
        self._allowance: dict[str, tuple[float, float]] = {}

    def in_time(self, key: str, joined: float | None, now: float) -> bool:
        """Whether a Hello is handled now, or comes too soon after others.

        A process that waited for long has queued several: Hellos right after a Welcome are void. Besides, each ``key``
        has a token bucket of Hellos, large enough for a fleet that comes back all at once.
        """
        if joined is not None and now - joined < _AGAIN_SECONDS:
            return False
        left, since = self._allowance.get(key, (_BURST, now))
        left = min(_BURST, left + (now - since) * _PER_SECOND)
        self._allowance[key] = max(0.0, left - 1.0), now
        return left >= 1.0

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """Return the keys that are not on the allow-list any more."""
        return set() if self._keys is None else set(keys) - self._keys.allowed(self._kind).keys()

    def refusal(self, name: str, key: str, others: Iterable[tuple[str, str]]) -> str | None:
        """Return why the owner of ``key`` may not join under ``name``; None if it may.

        ``others``: names and keys of the processes of its kind that have joined.
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
    """The sessions over one socket. Subclasses handle Hellos and messages of executors or of gateways.

    Epochs are checked here only, when a message is handled: an earlier message of the same round may have begun a new
    epoch. The core relies on this check: every message that it gets belongs to its present epoch.
    """

    hello_type: type[Message]
    name_field: str
    """The field of a Hello with its sender's name."""
    least_timeout: float
    """The shortest time-out in seconds, for a process with regular heartbeats."""

    def __init__(
        self,
        socket: RouterSocket,
        keys: Keys | None,
        metrics: Metrics,
        timeout: float,
        next_epoch: Callable[[], int],
    ) -> None:
        """``timeout``: the longest time-out in seconds. ``next_epoch``: returns an epoch higher than all before."""
        self.metrics = metrics
        self.socket = socket
        self.timeout = timeout
        self.guard = JoinGuard(socket.kind, keys)
        self._next_epoch = next_epoch
        self._sessions: dict[bytes, Session[PeerT]] = {}
        self._given_up: dict[str, FailureDetector] = {}  # of processes that fell silent, by name
        self._bad_frames: dict[bytes, int] = {}
        self._complaints, self._refusals = BoundedLog(log), BoundedLog(log)

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session[PeerT]]:
        return iter(list(self._sessions.values()))

    # ---- receiving -----------------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Handle an event of the socket."""
        match event:
            case Received(identity, key, message):
                self._take(identity, key, message)
            case Unreachable(identity):
                self._give_up(identity)
            case ConnectionsBroke():
                self.probe()

    def _take(self, identity: bytes, key: str, message: Message | ProtocolError) -> None:
        """Apply a frame, or drop and count it."""
        now = clock()
        session = self._sessions.get(identity)
        if session is not None and session.key != key:
            self.metrics.frames_dropped("wrong_key").inc()
            self._complaints.warning("dropped a frame (wrong_key): not that of %s", session.name)
        elif isinstance(message, ProtocolError):
            self.drop(identity, "undecodable", str(message))
        elif isinstance(message, self.hello_type):
            self._hello(identity, key, message, now, session)
        elif session is None:
            # The session may have ended before its Goodbye was read, because the connection broke.
            self.drop(identity, "unknown_sender", "" if isinstance(message, Goodbye) else "its sender has not joined")
            if self._bad_frames.get(identity, 0) <= MAX_BAD_FRAMES:
                self.socket.send(identity, Rejoin())
        elif isinstance(message, Goodbye):
            self.lose(session, f"it left ({printable(message.reason) or 'no reason given'})", Loss.LEFT)
        else:
            self._take_from(session, message, now)

    def _take_from(self, session: Session[PeerT], message: Message, now: float) -> None:
        fresh = message.epoch == session.epoch  # type: ignore[attr-defined]  # all but Hellos have one
        if not fresh:  # of an earlier epoch: no evidence that the process is alive in this one
            self.metrics.frames_dropped("stale_epoch").inc()
        elif isinstance(message, Heartbeat):
            session.detector.beat(now)
        else:
            session.detector.heard(now)
        if isinstance(message, Heartbeat):
            self.socket.send(session.identity, HeartbeatAck(session.epoch))
        if fresh:
            self._apply(session, message)

    def _hello(self, identity: bytes, key: str, hello: Message, now: float, session: Session[PeerT] | None) -> None:
        """``session``: the present session of the same connection, if there is one."""
        assert isinstance(hello, Hello | GatewayHello)
        if not self.guard.in_time(key, session.joined if session is not None else None, now):
            self.metrics.frames_dropped("too_many_hellos").inc()
        elif (major := hello.protocol_major) == PROTOCOL_MAJOR:
            self._admit(identity, key, hello, now)
        else:
            reason = f"it speaks protocol {major}, this scheduler speaks {PROTOCOL_MAJOR}"
            self.refuse(identity, getattr(hello, self.name_field), reason)

    def drop(self, identity: bytes, reason: Drop, detail: str) -> None:
        """Count an invalid frame, and end the session of a sender of too many.

        ``detail``: of the warning; "": log none.
        """
        self.metrics.frames_dropped(reason).inc()
        seen = self._bad_frames.get(identity, 0) + 1
        if len(self._bad_frames) > _MOST_SENDERS:  # senders choose their identities: keep the table bounded
            self._bad_frames.clear()
        self._bad_frames[identity] = seen
        if seen == 1 and detail:
            self._complaints.warning("dropped a frame (%s): %s", reason, detail)
        if seen >= MAX_BAD_FRAMES and (session := self._sessions.get(identity)) is not None:
            self.lose(session, "it keeps sending frames that cannot be decoded", Loss.MISBEHAVED)

    # ---- joining -------------------------------------------------------------------------------------

    def refuse(self, identity: bytes, name: str, reason: str) -> None:
        """Refuse the sender of a Hello."""
        self._refusals.warning("%s %s refused: %s", self.socket.kind, printable(name), reason)
        self.metrics.frames_dropped("refused").inc()
        self.socket.send(identity, Refused(reason))

    def enter(self, session: Session[PeerT]) -> None:
        """Add a session, and end the sessions that it replaces."""
        if (before := self._sessions.get(session.identity)) is not None:
            self.lose(before, "it said Hello again", Loss.REJOINED)
        for other in self:
            # A silent process of this name has probably been restarted: do not wait for its time-out. Two processes
            # that are both alive under one name are both kept: names are for people.
            if other.name == session.name and other.detector.silence(session.joined) > SILENT_SECONDS:
                self.lose(other, "it was started again")
        known = self._given_up.pop(session.name, None)
        if known is not None and (silence := known.silence(session.joined)) < self.timeout:
            # It was alive, so the time-out was too short: measure this silence as a gap between heartbeats, which makes
            # the next time-outs longer. A process that comes back later than ``timeout`` was lost rightly.
            known.beat(session.joined)
            session.detector = known
            text = "%s %s is back after %.1f s of silence: for the next minute it may be silent for %.1f s"
            log.info(text, self.socket.kind, printable(session.name), silence, known.timeout)
        self._bad_frames.pop(session.identity, None)
        self._sessions[session.identity] = session

    def new_detector(self, now: float) -> FailureDetector:
        """Return the failure detector of a process that joins at ``now``."""
        return FailureDetector(now, least=self.least_timeout, most=self.timeout)

    def others(self, identity: bytes) -> list[Session[PeerT]]:
        """Return all sessions except that of a connection."""
        return [session for session in self if session.identity != identity]

    def joined(self) -> set[str]:
        """Return the names of all that have a session."""
        return {session.name for session in self}

    # ---- sending and losing --------------------------------------------------------------------------

    def lose(self, session: Session[PeerT], reason: str, loss: Loss = Loss.DIED) -> None:
        """End a session; harmless the second time."""
        if self._sessions.get(session.identity) is session:
            del self._sessions[session.identity]
            self._lost(session, reason, loss)

    def tick(self, now: float, stood_still: float) -> None:
        """End the sessions of processes that have fallen silent, or whose key was revoked.

        ``stood_still``: seconds for which the scheduler itself was not running; they do not count as silence.
        """
        revoked = self.guard.revoked(session.key for session in self._sessions.values())
        for session in self:
            detector = session.detector
            detector.stood_still(stood_still, now)
            if detector.suspects(now):
                if len(self._given_up) > _MOST_SENDERS:  # senders choose their names: keep the table bounded
                    self._given_up.clear()
                self._given_up[session.name] = detector
                gap = detector.longest_gap
                before = "" if gap is None else f", and before for {gap:.2f} s at most"
                self.lose(session, f"no heartbeat for {detector.silence(now):.1f} s{before}")
            elif session.key in revoked:
                self.lose(session, "its key was revoked", Loss.REVOKED)

    def probe(self) -> None:
        """Send to all sessions after connections have broken: this finds the broken ones before their time-out."""
        for session in self:
            self.send(session, HeartbeatAck(session.epoch))

    def send(self, session: Session[PeerT], message: Message) -> None:
        """Send a message.

        A process that cannot be reached has missed a message, so its session ends even if it comes back. It ends later,
        in ``_give_up``, because its Goodbye may be among the frames that have not been read yet.
        """
        if not self.socket.send(session.identity, message) and not session.unreachable:
            session.unreachable = True
            self.socket.report_unreachable(session.identity)

    def _give_up(self, identity: bytes) -> None:
        """End the session of an unreachable process, unless a Goodbye among its last messages has ended it."""
        if (session := self._sessions.get(identity)) is not None and session.unreachable:
            self.lose(session, "its connection broke, or it does not read what it is sent")
            self.socket.send(identity, Rejoin())

    # ---- for subclasses ------------------------------------------------------------------------------

    @abstractmethod
    def _admit(self, identity: bytes, key: str, hello: Message, now: float) -> None:
        """``enter`` or ``refuse`` the sender of a Hello."""

    @abstractmethod
    def _apply(self, session: Session[PeerT], message: Message) -> None:
        """Handle a message of the session's present epoch."""

    @abstractmethod
    def _lost(self, session: Session[PeerT], reason: str, loss: Loss) -> None:
        """Clean up after a session that has ended."""


def spoken_version(hello: Hello | GatewayHello) -> str:
    """Return a note for the log line of a process that joins with another minor version; else ""."""
    if hello.protocol_minor == PROTOCOL_MINOR:
        return ""
    major, minor = PROTOCOL_MAJOR, hello.protocol_minor
    return f" (it speaks protocol {major}.{minor}, this scheduler {major}.{PROTOCOL_MINOR})"


def text_error(struct: msgspec.Struct, names: tuple[str, ...], most: int) -> str | None:
    """Return why one of the texts of ``struct`` is not acceptable (too long, or not printable); None if all are."""
    for name in names:
        text = getattr(struct, name)
        if len(text) > most or not text.isprintable():
            return f"its {name} is longer than {most} characters, or has some that cannot be printed"
    return None
