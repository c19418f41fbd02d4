"""Node 0's side of an executor whose ranks are on several nodes: admits the other nodes, and forwards frames to them.

Rank 0 talks to every other rank through a socket pair. For a rank on node 0, the other end belongs to the process of
that rank. For a rank on another node, the other end belongs to a thread of this module, which forwards each frame
through the ZeroMQ connection with that node (``link``). The rest of rank 0 does not see the difference. If a connection
with a node breaks, or brings nothing for some seconds, the executor ends, as it does when a rank ends.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import zmq
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Authenticator, Keys
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.protocol import encode
from pagewise_shared.version import package_version

from pagewise_executor.ranks.agreement import difference, settings_of
from pagewise_executor.ranks.host import host_identity, own_address
from pagewise_executor.ranks.link import HEARTBEAT_MS, JOIN_SECONDS, OWN, of_rank, prepare_socket
from pagewise_executor.ranks.messages import Admitted, Ended, Heartbeat, Join, Rejected, ToNode, decode_from_node
from pagewise_executor.tiers.block_endpoint import in_brackets

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Node:
    """A node that has joined. ``identity``: the ZeroMQ identity of its connection. ``host``: see ``Join``."""

    number: int
    identity: bytes
    host: str


class _LostError(Exception):
    """A node has ended, or cannot be reached."""

    def __init__(self, node: int) -> None:
        super().__init__(f"node {node} has ended, or cannot be reached")


class Nodes:
    """The other nodes of an executor, as node 0 sees them. The constructor binds the port on which they join.

    ``endpoint``: the ZeroMQ endpoint by which other nodes reach that port. ``listener``: a listening TCP socket for the
    store through which torch.distributed connects all ranks, once all nodes have joined.

    Raises:
        ConfigError: the port cannot be bound.
        TimeoutError: ``--master-addr`` is a name that did not resolve in time.
    """

    def __init__(self, config: ExecutorConfig, keys: Keys | None = None) -> None:
        address = own_address(config.master_addr)
        self.size, self.count = config.tensor_parallel, config.nnodes
        self.per_node = self.size // self.count
        self._settings, self._keys = settings_of(config), keys
        self._joined: dict[int, _Node] = {}
        self._complaints = BoundedLog(log)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys, lambda: None) if keys is not None else None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        prepare_socket(self._socket)
        if self._authenticator is not None:
            self._authenticator.secure_server(self._socket)
        self._address = address
        try:
            self._socket.bind(f"tcp://{in_brackets(self._address)}:{config.master_port or '*'}")
        except zmq.ZMQError as error:
            self._close_socket()
            raise ConfigError(
                f"--master-addr {config.master_addr} --master-port {config.master_port}: node 0 cannot listen on "
                f"{self._address}: {error}"
            ) from error
        port = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        self.endpoint = f"tcp://{in_brackets(config.master_addr)}:{port}"
        self._master = config.master_addr
        self.listener = socket.create_server(
            (self._address, 0), family=socket.AF_INET6 if ":" in self._address else socket.AF_INET
        )
        self._ends: dict[int, Connection] = {}
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def on_host(self) -> int:
        """The number of ranks on this host, which is known once all nodes have joined."""
        return self._on_host(host_identity())

    @property
    def store(self) -> str:
        """HOST:PORT at which rank 0 itself reaches the store that it keeps for all ranks."""
        return f"{self._address}:{self.listener.getsockname()[1]}"

    def gather(self, seconds: float = JOIN_SECONDS) -> None:
        """Wait until all nodes have joined and are still connected.

        Raises:
            TimeoutError: some nodes have not joined in time; the text names them.
        """
        log.info("waiting for %d more nodes at %s", self.count - 1, self.endpoint)
        deadline = time.monotonic() + seconds
        look_at = 0.0
        while True:
            now = time.monotonic()
            if len(self._joined) == self.count - 1 or now >= look_at:
                look_at = now + HEARTBEAT_MS / 1000
                self._forget_lost()
                if len(self._joined) == self.count - 1:
                    return
            if now > deadline:
                missing = ", ".join(str(number) for number in range(1, self.count) if number not in self._joined)
                raise TimeoutError(f"nodes have not joined within {seconds:g} s: {missing}")
            if self._socket.poll(HEARTBEAT_MS):
                self._receive(self._receive_join)

    def _forget_lost(self) -> None:
        """Forget nodes whose connections have ended, so that they can join again."""
        for node in list(self._joined.values()):
            if not self._reaches(node):
                log.warning("node %d has gone before all were there", node.number)
                del self._joined[node.number]

    def admit(self, lost: Callable[[str, int], None]) -> dict[int, Connection]:
        """Tell the other nodes to start their ranks, and return rank 0's end of the socket pair of each of these ranks.

        ``lost``: called on a thread when a node is lost, with the reason and the exit code for this process.
        """
        links = {}
        for rank in range(self.per_node, self.size):
            own, theirs = socket.socketpair()
            self._ends[rank], links[rank] = Connection(theirs.detach()), Connection(own.detach())
            self._poller.register(self._ends[rank].fileno(), zmq.POLLIN)
        port = self.listener.getsockname()[1]
        for node in self._joined.values():
            self._answer(node.identity, Admitted(f"{in_brackets(self._master)}:{port}", self._on_host(node.host)))
        self._thread = threading.Thread(target=self._run, args=(lost,), name="nodes", daemon=True)
        self._thread.start()
        return links

    def close(self) -> None:
        """Close the connections with the other nodes, which end when they notice."""
        self._closing = True
        if self._thread is not None:
            self._thread.join()
        else:
            self._close_socket()

    def _on_host(self, host: str) -> int:
        nodes = [host_identity(), *(node.host for node in self._joined.values())]
        return self.per_node * nodes.count(host)

    def _close_socket(self) -> None:
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def _receive(self, take: "Callable[[bytes, bytes, zmq.Frame], None]") -> None:
        """Receive a message and call ``take`` with the identity of its sender, its first part and its second part.

        A message with another number of parts is dropped.
        """
        parts = self._socket.recv_multipart(copy=False)
        if len(parts) == 3:
            take(parts[0].bytes, parts[1].bytes, parts[2])
        else:
            self._complaints.warning("dropped a message of %d parts where other nodes join", len(parts))

    def _receive_join(self, identity: bytes, mark: bytes, frame: zmq.Frame) -> None:
        if (join := self._decode(mark, frame)) is None or not isinstance(join, Join):
            return
        if (reason := self._join_error(join, frame)) is not None:
            log.error("node %d is turned away: %s", join.node, reason)
            self._answer(identity, Rejected(reason, True))
            return
        before = self._joined.get(join.node)
        if before is not None and before.identity != identity and self._reaches(before):
            self._answer(identity, Rejected(f"there is a node {join.node} already", False))
            return
        if not self._answer(identity, Heartbeat()):
            return  # the node has closed this connection since, and will join through another one
        self._joined[join.node] = _Node(join.node, identity, join.host)
        log.info("node %d of %d has joined", join.node, self.count)

    def _join_error(self, join: Join, frame: zmq.Frame) -> str | None:
        """Return why this node may never join; None if it may join."""
        if join.version != package_version():
            return f"it has Pagewise {printable(join.version, 50)}, node 0 has {package_version()}"
        if not 0 < join.node < self.count:
            return f"--node-rank {join.node} is not one of the {self.count} nodes of this executor, or that of node 0"
        if found := difference(join.node, self._settings, join.settings):
            return f"the nodes of an executor need the same options: {printable(found, 1000)}"
        if self._keys is not None and _user(frame) != self._keys.public.decode():
            return "its key is another one than that of node 0: the nodes of an executor have one key (--key-name)"
        return None

    def _decode(self, mark: bytes, frame: zmq.Frame) -> Join | Ended | None:
        try:
            if mark == OWN:
                return decode_from_node.decode(frame.buffer)
        except msgspec.DecodeError as error:
            self._complaints.warning("dropped a frame where other nodes join: %s", error)
        return None

    def _answer(self, identity: bytes, message: ToNode) -> bool:
        """Send a message to a node. Returns False if the connection with it has ended."""
        try:
            self._socket.send_multipart([identity, OWN, encode(message)])
        except zmq.ZMQError:
            return False
        return True

    def _reaches(self, node: _Node) -> bool:
        return self._answer(node.identity, Heartbeat())

    # ---- while the executor runs ---------------------------------------------------------------------

    def _run(self, lost: Callable[[str, int], None]) -> None:
        """Forward frames until ``close`` is called or a node is lost. This is the thread's function."""
        look_at, reason = 0.0, ""

        def take(identity: bytes, mark: bytes, frame: zmq.Frame) -> None:
            node = next((node for node in self._joined.values() if node.identity == identity), None)
            if node is None:
                if isinstance(join := self._decode(mark, frame), Join):
                    refusal = f"there is a node {join.node} already, or its former executor is about to end"
                    self._answer(identity, Rejected(refusal, False))
            elif mark == OWN:
                if isinstance(ended := self._decode(mark, frame), Ended):
                    self._close_rank(ended.rank)
            elif len(mark) == 1 and mark[0] // self.per_node == node.number and mark[0] in self._ends:
                self._ends[mark[0]].send_bytes(frame.buffer)

        try:
            while not self._closing:
                ready = dict(self._poller.poll(HEARTBEAT_MS))
                if self._socket in ready:
                    self._receive(take)
                for rank in [rank for rank, end in self._ends.items() if end.fileno() in ready]:
                    self._forward(rank)
                if (now := time.monotonic()) >= look_at:
                    look_at = now + HEARTBEAT_MS / 1000
                    self._check_all()
        except (_LostError, OSError) as error:  # the latter if rank 0 has closed its end of a socket pair
            reason = str(error)
        finally:
            self._close_socket()
        if reason and not self._closing:
            lost(reason, 1)
        for end in self._ends.values():
            end.close()

    def _check_all(self) -> None:
        for node in self._joined.values():
            if not self._reaches(node):
                raise _LostError(node.number)

    def _forward(self, rank: int) -> None:
        """Forward a frame from rank 0 to a rank. Raises _LostError if the node of that rank cannot be reached."""
        try:
            frame = self._ends[rank].recv_bytes()
        except (EOFError, OSError):
            self._close_rank(rank)
            return
        node = self._joined[rank // self.per_node]
        try:
            self._socket.send_multipart([node.identity, of_rank(rank), frame])
        except zmq.ZMQError:
            raise _LostError(node.number) from None

    def _close_rank(self, rank: int) -> None:
        """Close this end of the socket pair of a rank that has ended, so that the other end reads an end of file."""
        if (end := self._ends.pop(rank, None)) is not None:
            self._poller.unregister(end.fileno())
            end.close()


def _user(frame: Any) -> str:
    """Return the public key with which the sender of a frame has connected; empty if there is none."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""
