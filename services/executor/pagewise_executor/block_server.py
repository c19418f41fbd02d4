"""Blocks for other executors: what is lent is pinned by the scheduler, so it is read beside the steps."""

import contextlib
import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from pagewise_shared.curve import Gate, Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import Blocks, ReadBlocks, decode_from_peer, encode

from pagewise_executor.block_store import BlockStore
from pagewise_executor.checksum import checksum
from pagewise_executor.rows import Int32s

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
"""What is asked for at a time, or a block if that is more."""
FRAME_BYTES = 2 * 2**20
"""A block that is larger comes in several frames: ZeroMQ moves them faster than one."""
WINDOW = 4
"""Pieces that one executor asks for at a time."""

_PLACE_BYTES = 8
_MOST_BYTES = 64 * 2**20
"""Most that one request may ask for."""
_BEHIND_SECONDS = 2.0
"""How long a request waits for the step it was asked about."""
_MOST_PARKED = 64 * WINDOW
"""Requests that wait so, of all who ask; of one it is the window, more than which nobody has reason to ask for."""
_LOOK_UP_MS = 50
_PARKED_MS = 1


@dataclass(slots=True, eq=False)
class _Asked:
    """A request of another executor, which waits there until its step has begun: until ``deadline`` at most."""

    identity: bytes
    request: ReadBlocks
    deadline: float


class BlockServer:
    """Answers other executors that fetch blocks, on a thread of its own. ``endpoint``: where they find it.

    ``num_refused``: connections that were refused, because their keys are not on the allow-list.
    """

    def __init__(self, store: BlockStore, listen: str, advertised_host: str, keys: Keys | None = None) -> None:
        self._store = store
        self._begun = (-1, -1)  # epoch and step
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.SNDHWM, 4 * WINDOW)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES)
        self._gate: Gate | None = None
        self.num_refused = 0
        if keys is not None:
            self._gate = Gate(self._context, keys, self._refused)
            self._gate.secure_server(self._socket)
        self._socket.bind(listen)
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = f"tcp://{advertised_host}:{bound.rsplit(':', 1)[1]}" if bound.startswith("tcp:") else bound
        self._complaints = BoundedLog(log)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="block server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer nobody any more."""
        self._closed = True
        self._thread.join()
        self._socket.close()
        if self._gate is not None:
            self._gate.close()
        self._context.destroy(linger=0)

    def _refused(self) -> None:
        self.num_refused += 1  # by the gate's thread alone

    def begun(self, epoch: int, step: int) -> None:
        """This step has been issued, so what it stores is on its way."""
        self._begun = epoch, step

    def _run(self) -> None:
        parked: list[_Asked] = []
        while not self._closed:
            if self._socket.poll(_PARKED_MS if parked else _LOOK_UP_MS):
                self._receive(parked)
            parked = [asked for asked in parked if not self._settle(asked)]

    def _receive(self, parked: list[_Asked]) -> None:
        """Take in a request: into ``parked``, unless it can be refused at once."""
        identity, *frames = self._socket.recv_multipart()
        try:
            request = decode_from_peer(frames[-1]) if frames else None
        except ProtocolError as error:
            self._complaints.warning("dropped a request for blocks: %s", error)
            return
        if not isinstance(request, ReadBlocks):
            return
        refusal = self._what_is_wrong_with(request)
        if len(parked) >= _MOST_PARKED or sum(asked.identity == identity for asked in parked) >= WINDOW:
            refusal = refusal or "too many requests wait for their step"
        if refusal:
            self._send(identity, Blocks(request.number, error=refusal))
        else:
            parked.append(_Asked(identity, request, time.monotonic() + _BEHIND_SECONDS))

    def _what_is_wrong_with(self, request: ReadBlocks) -> str:
        if len(request.blocks) % _PLACE_BYTES:
            return "places come in pairs of tier and block"
        places = _places(request)
        if not len(places) or len(places) * self._store.bytes_per_block > max(_MOST_BYTES, self._store.bytes_per_block):
            return f"{len(places)} blocks are none, or too many at once"
        return "" if self._store.has(places) else "there are no such blocks"

    def _settle(self, asked: _Asked) -> bool:
        """Answer a request whose step has begun, or comes too late; False: it waits on, and others are answered."""
        request, begun = asked.request, self._begun
        wanted = request.epoch, request.step
        if begun < wanted and time.monotonic() < asked.deadline:
            return False
        if begun < wanted or begun[0] != request.epoch:
            error = f"not in step {request.step} of epoch {request.epoch}"
            self._send(asked.identity, Blocks(request.number, error=error))
        else:
            self._send(asked.identity, *self._read(request))
        return True

    def _read(self, request: ReadBlocks) -> tuple[Any, ...]:
        try:
            rows = self._store.read(_places(request))
        except Exception as error:
            log.exception("blocks could not be read for another executor")
            return (Blocks(request.number, error=str(error)[:200]),)
        if self._begun[0] != request.epoch:
            return (Blocks(request.number, error="they were given up while they were read"),)
        content = rows.data.cast("B")
        return Blocks(request.number, checksum(rows)), *(
            content[start : start + FRAME_BYTES] for start in range(0, len(content), FRAME_BYTES)
        )

    def _send(self, identity: bytes, header: Blocks, *content: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it has gone
            self._socket.send_multipart([identity, encode(header), *content], copy=False)


def _places(request: ReadBlocks) -> Int32s:
    return np.frombuffer(request.blocks, np.int32).reshape(-1, 2)
