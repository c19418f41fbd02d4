"""A further node of an executor on several: joins node 0, starts this node's ranks, and passes their frames on."""

import contextlib
import logging
import os
import signal
import subprocess  # nosec B404
import time
from multiprocessing.connection import Connection

import msgspec
import zmq
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.cpu_threads import openmp_threads, share_of_cores
from pagewise_shared.curve import Keys
from pagewise_shared.errors import RefusedError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import encode
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.version import package_version
from zmq.utils.monitor import recv_monitor_message

from pagewise_executor.kv.block_endpoint import in_brackets
from pagewise_executor.ranks.agreement import settings_of
from pagewise_executor.ranks.host import host_identity
from pagewise_executor.ranks.link import JOIN_SECONDS, NOTED_MS, OWN, SAY_SECONDS, of_rank, prepare_socket
from pagewise_executor.ranks.master_address import unresolved
from pagewise_executor.ranks.messages import (
    Admitted,
    Ended,
    Join,
    Noted,
    Seat,
    ToNode,
    TurnedAway,
    decode_to_node,
    encode_config,
)
from pagewise_executor.ranks.rank_process import start_rank

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 5.0
"""How long an attempt to join takes, if nobody answers."""
_PAUSE_SECONDS = 1.0
_END_SECONDS = 10.0

_EVENTS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class _Link:
    """One connection with node 0, or the attempt to make one."""

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
        """Send a frame; it is dropped if there is no connection."""
        with contextlib.suppress(zmq.Again):
            self.socket.send_multipart([mark, frame], flags)

    def broken(self) -> str:
        """Return why there is no connection any more, or none comes about; empty if nothing has happened."""
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
        """Receive a frame for this node; None if it is none."""
        mark, *frames = self.socket.recv_multipart()
        with contextlib.suppress(msgspec.DecodeError):
            if mark == OWN and len(frames) == 1:
                return decode_to_node.decode(frames[0])
        return None

    def close(self) -> None:
        """Send what is under way, and close."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        self.socket.close()
        self._context.term()


class Node:
    """This node, one of several. ``join_seconds``: how long it waits until all nodes are there."""

    def __init__(self, config: ExecutorConfig, keys: Keys | None = None, join_seconds: float = JOIN_SECONDS) -> None:
        self._config, self._keys, self._join_seconds = config, keys, join_seconds
        self._endpoint = f"tcp://{in_brackets(config.master_addr)}:{config.master_port}"
        self._ends: dict[int, Connection] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._leave_at = float("inf")

    def run(self) -> int:
        """Join, and run this node's ranks until node 0 ends them; returns the process's exit code.

        Raises:
            RefusedError: node 0 does not let this node in, and trying again would not help.
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
            self._end_processes()
            link.close()

    def _terminate(self) -> None:
        if not self._processes:
            raise KeyboardInterrupt
        self._leave_at = min(self._leave_at, time.monotonic() + self._config.drain_timeout)
        log.info("this node stays until node 0 has ended, for at most %g s", self._config.drain_timeout)

    def _join(self) -> tuple[_Link, Admitted] | None:
        """Try until all nodes are there; None if that takes too long."""
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
        """Connect and ask to join; returns why that has not worked, if so."""
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
        """Ask to join, and wait until all nodes are there; returns why that is not so, if so.

        Raises:
            RefusedError: node 0 says no.
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
                answer_until = now + _ANSWER_SECONDS  # not sooner: node 0 would wait for one that has gone
            if ready.get(link.socket, 0) & zmq.POLLIN:
                match link.own():
                    case Admitted() as admitted:
                        return admitted
                    case TurnedAway(reason, True):
                        raise RefusedError(f"node 0 at {self._endpoint} has turned this node away: {printable(reason)}")
                    case TurnedAway(reason):
                        return f"node 0 at {self._endpoint} says: {printable(reason)}"
                    case Noted():
                        answer_until = deadline  # it waits for other nodes
        return f"node 0 at {self._endpoint} does not answer yet"

    def _start(self, admitted: Admitted) -> None:
        """Start this node's ranks."""
        config = self._config
        if config.threads == "auto":
            threads = openmp_threads(os.environ) or share_of_cores(admitted.on_host)
            config = msgspec.structs.replace(config, threads=threads)
        count = config.tensor_parallel // config.nnodes
        for device in range(count):
            rank = count * config.node_rank + device
            self._ends[rank], self._processes[rank] = start_rank()
            seat = Seat(rank, config.tensor_parallel, "", admitted.store, device, admitted.on_host)
            self._ends[rank].send_bytes(encode(seat))
            self._ends[rank].send_bytes(encode_config(config))
        log.info("ranks %s of %d have started", ", ".join(map(str, self._ends)), config.tensor_parallel)

    def _pass_on(self, link: _Link) -> int:
        """Pass frames on until the ranks have ended, or one of them has failed, or node 0 is lost."""
        poller = zmq.Poller()
        poller.register(link.socket, zmq.POLLIN)
        poller.register(link.monitor, zmq.POLLIN)
        for end in self._ends.values():
            poller.register(end.fileno(), zmq.POLLIN)
        while self._ends:
            ready = dict(poller.poll(NOTED_MS))
            for rank in [rank for rank, end in self._ends.items() if end.fileno() in ready]:
                try:
                    link.send(of_rank(rank), self._ends[rank].recv_bytes())
                except (EOFError, OSError):
                    poller.unregister(self._ends[rank].fileno())
                    if code := self._ended(rank, link):
                        return code
            if link.socket in ready:
                mark, *frames = link.socket.recv_multipart()
                if mark != OWN and mark[0] in self._ends:
                    with contextlib.suppress(OSError):  # it has ended, as is found above
                        self._ends[mark[0]].send_bytes(frames[0])
            if link.monitor in ready and (reason := link.broken()):
                log.critical("this node ends: %s", reason)
                return 1
            if time.monotonic() > self._leave_at:
                log.warning("this node ends before node 0")
                return 1
        return 0

    def _ended(self, rank: int, link: _Link) -> int:
        """Tell node 0 that a rank has ended; returns the exit code of this node that follows from it: 0 for none."""
        self._ends.pop(rank).close()
        try:
            code = self._processes[rank].wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            code = -1
        link.send(OWN, encode(Ended(rank)))
        if code:
            log.critical("this node ends: rank %d has ended with exit code %d", rank, code)
            return CANNOT_START if code == CANNOT_START else 1
        return 0

    def _end_processes(self) -> None:
        """See to it that all ranks have ended: they do so when their connection is closed."""
        for process in self._processes.values():
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
