"""A node other than node 0 of an executor whose ranks are on several nodes.

It joins node 0, starts the ranks of this node as processes, and forwards frames between them and rank 0.
"""

import contextlib
import logging
import signal
import subprocess  # nosec B404
import sys
import time
from multiprocessing.connection import Connection

import msgspec
import zmq
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.cpu_threads import share_of_cores
from pagewise_shared.curve import Keys
from pagewise_shared.errors import RefusedError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import encode
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.version import package_version
from zmq.utils.monitor import recv_monitor_message

from pagewise_executor.device_defaults import with_threads
from pagewise_executor.ranks.agreement import settings_of
from pagewise_executor.ranks.host import host_identity, unresolved
from pagewise_executor.ranks.link import (
    END_SECONDS,
    HEARTBEAT_MS,
    JOIN_SECONDS,
    OWN,
    SAY_SECONDS,
    end_rank,
    of_rank,
    prepare_socket,
    start_rank,
)
from pagewise_executor.ranks.messages import (
    Admitted,
    Ended,
    Heartbeat,
    Join,
    RankSpec,
    Rejected,
    ToNode,
    decode_to_node,
)
from pagewise_executor.tiers.block_endpoint import in_brackets

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
"""How long an attempt to join waits for an answer."""
_PAUSE_SECONDS = 1.0
"""The pause between two attempts to join."""

_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Link:
    """One ZeroMQ connection with node 0. If it breaks, this attempt to join is over; later, this node ends."""

    def __init__(self, endpoint: str, keys: Keys | None) -> None:
        self._endpoint, self._keys = endpoint, keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        prepare_socket(self.socket)
        self.socket.setsockopt(zmq.IMMEDIATE, 1)
        if keys is not None:
            keys.secure_client(self.socket, keys.public)
        self.monitor = self.socket.get_monitor_socket(_EVENTS)
        self.socket.connect(endpoint)

    def send(self, mark: bytes, frame: bytes, flags: int = zmq.NOBLOCK) -> None:
        """Send a frame. ``mark``: see ``link``. The frame is dropped if there is no connection."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([mark, frame], flags)

    def broken(self) -> str:
        """Return why the connection has ended, or why it could not be established; empty if neither has happened."""
        if not self.monitor.poll(0):
            return ""
        event = recv_monitor_message(self.monitor)
        match event["event"]:
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                name = self._keys.name if self._keys is not None else "none"
                return f"node 0 at {self._endpoint} does not accept the key {name!r}"
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return f"no handshake with node 0 at {self._endpoint}: it has no keys, or another one than this node"
            case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                return f"node 0 at {self._endpoint} has ended the handshake: it has keys, or other ones than this node"
        return f"node 0 at {self._endpoint} has ended, or cannot be reached"

    def own(self) -> ToNode | None:
        """Receive a message. Returns None if it is not one for this node itself."""
        mark, *frames = self.socket.recv_multipart()
        with contextlib.suppress(msgspec.DecodeError):
            if mark == OWN and len(frames) == 1:
                return decode_to_node.decode(frames[0])
        return None

    def close(self) -> None:
        """Send the queued messages, within the socket's linger time, and close."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
        self._context.term()


class Node:
    """A node other than node 0. ``join_seconds``: how long it may take until all nodes have joined."""

    def __init__(self, config: ExecutorConfig, keys: Keys | None = None, join_seconds: float = JOIN_SECONDS) -> None:
        self._config, self._keys, self._join_seconds = config, keys, join_seconds
        self._endpoint = f"tcp://{in_brackets(config.master_addr)}:{config.master_port}"
        self._ends: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._leave_at = float("inf")
        self._poller = zmq.Poller()

    def run(self) -> int:
        """Join node 0, run the ranks of this node until node 0 ends them, and return the process's exit code.

        Raises:
            RefusedError: node 0 does not admit this node, and trying again would not help.
        """
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        joined = self._join()
        if joined is None:
            return 1
        link, admitted = joined
        try:
            self._start(admitted)
            return self._pass_on(link)
        finally:
            for end in self._ends.values():
                end.close()
            for process in self._processes.values():
                end_rank(process)  # it ends because its connection is closed
            link.close()

    def _terminate(self) -> None:
        if not self._processes:
            sys.exit()
        self._leave_at = min(self._leave_at, time.monotonic() + self._config.drain_timeout)
        log.info("this node stays until node 0 has ended, for at most %g s", self._config.drain_timeout)

    def _join(self) -> tuple[_Link, Admitted] | None:
        """Try to join until node 0 admits this node, once all nodes have joined. Returns None if it takes too long."""
        deadline = time.monotonic() + self._join_seconds
        complaints = BoundedLog(log, burst=1, seconds=SAY_SECONDS)
        log.info("joining node 0 at %s", self._endpoint)
        attempts, reason = 0, ""
        while time.monotonic() < deadline:
            attempts += 1
            answer = self._attempt(deadline)
            if not isinstance(answer, str):
                return answer
            reason, left = answer, max(0, deadline - time.monotonic())
            complaints.warning("%s; trying again for up to %d s (attempt %d)", reason, left, attempts)
            time.sleep(_PAUSE_SECONDS)
        log.error(
            "not all nodes have come together within %g s (%d attempts): %s", self._join_seconds, attempts, reason
        )
        return None

    def _attempt(self, deadline: float) -> tuple[_Link, Admitted] | str:
        """Make one attempt to join. Returns the connection and the admission, or why the attempt has failed."""
        if (reason := unresolved(self._config.master_addr)) is not None:
            return reason
        link = _Link(self._endpoint, self._keys)
        try:
            answer = self._ask(link, deadline)
        except BaseException:
            link.close()
            raise
        if isinstance(answer, Admitted):
            return link, answer
        link.close()
        return answer

    def _ask(self, link: _Link, deadline: float) -> Admitted | str:
        """Ask to join, and wait until all nodes have joined. Returns the admission, or why there is none.

        Raises:
            RefusedError: node 0 does not admit this node, and trying again would not help.
        """
        config = self._config
        join = encode(Join(config.node_rank, package_version(), host_identity(), settings_of(config)))
        poller = zmq.Poller()
        poller.register(link.monitor, zmq.POLLIN)
        poller.register(link.socket, zmq.POLLIN | zmq.POLLOUT)
        answer_until = time.monotonic() + _ANSWER_SECONDS
        while (now := time.monotonic()) < min(deadline, answer_until):
            ready = dict(poller.poll(int(1000 * min(_ANSWER_SECONDS, answer_until - now))))
            if reason := link.broken():
                return reason
            if ready.get(link.socket, 0) & zmq.POLLOUT:
                poller.modify(link.socket, zmq.POLLIN)
                link.send(OWN, join)
                answer_until = now + _ANSWER_SECONDS  # node 0 needs time to read it
            if ready.get(link.socket, 0) & zmq.POLLIN:
                match link.own():
                    case Admitted() as admitted:
                        return admitted
                    case Rejected(reason, True):
                        raise RefusedError(f"node 0 at {self._endpoint} has turned this node away: {printable(reason)}")
                    case Rejected(reason):
                        return f"node 0 at {self._endpoint} says: {printable(reason)}"
                    case Heartbeat():
                        answer_until = deadline  # node 0 waits for other nodes, and so does this one
        return f"node 0 at {self._endpoint} does not answer yet"

    def _start(self, admitted: Admitted) -> None:
        """Start the processes of this node's ranks, on one device each."""
        config = with_threads(self._config, lambda: share_of_cores(admitted.on_host))
        count = config.tensor_parallel // config.nnodes
        for device in range(count):
            rank = count * config.node_rank + device
            spec = RankSpec(rank, config.tensor_parallel, "", admitted.store, device, admitted.on_host)
            self._ends[rank], self._processes[rank] = start_rank(spec, config)
            self._poller.register(self._ends[rank].fileno(), zmq.POLLIN)
        log.info("ranks %s of %d have started", ", ".join(map(str, self._ends)), config.tensor_parallel)

    def _pass_on(self, link: _Link) -> int:
        """Forward frames until all ranks have ended, one has failed, or node 0 is lost; returns the exit code."""
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)
        while self._ends:
            ready = dict(self._poller.poll(HEARTBEAT_MS))
            for rank in [rank for rank, end in self._ends.items() if end.fileno() in ready]:
                if code := self._forward(rank, link):
                    return code
            if link.socket in ready:
                self._receive(link)
            if link.monitor in ready and (reason := link.broken()):
                log.critical("this node ends: %s", reason)
                return 1
            if time.monotonic() > self._leave_at:
                log.warning("this node ends before node 0")
                return 1
        return 0

    def _forward(self, rank: int, link: _Link) -> int:
        """Forward a frame from a rank to node 0. Returns the exit code for this node if the rank has ended, else 0."""
        try:
            link.send(of_rank(rank), self._ends[rank].recv_bytes())
        except (EOFError, OSError):
            self._poller.unregister(self._ends[rank].fileno())
            return self._ended(rank, link)
        return 0

    def _receive(self, link: _Link) -> None:
        mark, *frames = link.socket.recv_multipart()
        if mark != OWN and mark[0] in self._ends:
            with contextlib.suppress(OSError):  # the rank has ended; its end of file is read next
                self._ends[mark[0]].send_bytes(frames[0])

    def _ended(self, rank: int, link: _Link) -> int:
        """Tell node 0 that a rank has ended. Returns the exit code for this node; 0 if other ranks still run."""
        self._ends.pop(rank).close()
        try:
            code = self._processes[rank].wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        link.send(OWN, encode(Ended(rank)))
        if code:
            log.critical("this node ends: rank %d has ended with exit code %d", rank, code)
            return CANNOT_START if code == CANNOT_START else 1
        return 0
