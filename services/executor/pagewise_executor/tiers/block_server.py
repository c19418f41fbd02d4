"""Serves blocks of all tiers to other executors. The scheduler pins them, so they are read while steps run."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from pagewise_shared.curve import Authenticator, Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import BoundedLog
from pagewise_shared.protocol import Blocks, ReadBlocks, decode_from_peer, encode

from pagewise_executor.step_work import Int32s
from pagewise_executor.tiers.block_names import checksum
from pagewise_executor.tiers.tier import Rows, Tier

log = logging.getLogger(__name__)

PIECE_BYTES = 2**20
"""The size of one request; a block that is larger is requested alone."""
FRAME_BYTES = 2 * 2**20
"""A larger answer is sent in several frames, which ZeroMQ moves faster than one large frame."""
WINDOW = 4
"""The most requests that one executor has under way at a time."""

_LOCATION_BYTES = 8
_MOST_BYTES = 64 * 2**20
"""The most bytes that one request may ask for, unless a single block is larger."""
_STEP_TIMEOUT = 2.0
"""How long a request waits until this executor has begun the step it belongs to."""
_MOST_WAITING = 64 * WINDOW
"""The most requests that wait for their step, of all peers together. Of one peer it is ``WINDOW``."""
_POLL_MS = 50
_WAITING_POLL_MS = 1
_NO_SUCH_BLOCKS = "there are no such blocks"
_MOST_INT32 = 2**31

PagesOf = Callable[[int, int, Int32s], Int32s | None]
"""Returns the pages of a tier and a group that a ``ReadBlocks`` asks for; None: there are no such pages."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request of another executor, which waits until its step has begun, but no longer than ``deadline``."""

    identity: bytes
    request: ReadBlocks
    deadline: float


class BlockServer:
    """Answers other executors that fetch blocks, on a thread of its own.

    ``tiers``: the tiers of this executor, by number; ``bytes_per_block`` is the same in all. ``begun``: returns epoch
    and number of the last step whose copies have all begun; peers may read the blocks that these steps bring to a tier.
    ``endpoint``: peers connect to it. ``num_refused``: the number of connections that were refused because their keys
    are not on the allow-list. ``pages_of``: None if the model has one group of layers.
    """

    def __init__(
        self, tiers: Mapping[int, Tier], bytes_per_block: int, listen: str, advertised_host: str,
        keys: Keys | None = None, *, begun: Callable[[], tuple[int, int]],
    ) -> None:  # fmt: skip
        self._tiers, self._bytes_per_block = tiers, bytes_per_block
        self._begun = begun
        self.pages_of: PagesOf | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.SNDHWM, 4 * WINDOW)
        self._socket.setsockopt(zmq.MAXMSGSIZE, PIECE_BYTES)
        self._authenticator: Authenticator | None = None
        self.num_refused = 0
        if keys is not None:
            self._authenticator = Authenticator(self._context, keys, self._count_refused)
            self._authenticator.secure_server(self._socket)
        self._socket.bind(listen)
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = f"tcp://{advertised_host}:{bound.rsplit(':', 1)[1]}" if bound.startswith("tcp:") else bound
        self._complaints = BoundedLog(log)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="block server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and close the socket."""
        self._closed = True
        self._thread.join()
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.destroy(linger=0)

    def _count_refused(self) -> None:
        self.num_refused += 1  # by the authenticator's thread alone

    def _run(self) -> None:
        waiting: list[_Request] = []
        while not self._closed:
            if self._socket.poll(_WAITING_POLL_MS if waiting else _POLL_MS):
                self._receive(waiting)
            waiting = [pending for pending in waiting if not self._answer_if_due(pending)]

    def _receive(self, waiting: list[_Request]) -> None:
        """Receive a request and append it to ``waiting``, unless it is refused at once."""
        identity, frame = self._socket.recv(), b""
        # A message is one frame. Further frames are dropped one by one: a list of them could fill the memory.
        while self._socket.getsockopt(zmq.RCVMORE):
            frame = self._socket.recv()
        try:
            request = decode_from_peer(frame)
        except ProtocolError as error:
            self._complaints.warning("dropped a request for blocks: %s", error)
            return
        if not isinstance(request, ReadBlocks):
            return
        refusal = self._refusal(request)
        if len(waiting) >= _MOST_WAITING or sum(pending.identity == identity for pending in waiting) >= WINDOW:
            refusal = refusal or "too many requests wait for their step"
        if refusal:
            self._send(identity, Blocks(request.number, error=refusal))
        else:
            waiting.append(_Request(identity, request, time.monotonic() + _STEP_TIMEOUT))

    def _refusal(self, request: ReadBlocks) -> str:
        if len(request.blocks) % _LOCATION_BYTES:
            return "locations are pairs of tier and block"
        locations = _locations(request)
        if not len(locations) or len(locations) * self._bytes_per_block > max(_MOST_BYTES, self._bytes_per_block):
            return f"{len(locations)} blocks are none, or too many at once"
        for number in np.unique(locations[:, 0]).tolist():
            blocks, tier = locations[locations[:, 0] == number, 1], self._tiers.get(number)
            # The pages of blocks are known only once the step has begun.
            most = tier.num_blocks if tier is not None and self.pages_of is None else _MOST_INT32
            if tier is None or blocks.min() < 0 or blocks.max() >= most:
                return _NO_SUCH_BLOCKS
        return _NO_SUCH_BLOCKS if request.group and self.pages_of is None else ""

    def _answer_if_due(self, pending: _Request) -> bool:
        """Answer a request if its step has begun or its time is over; return False if it has to wait longer."""
        request, begun = pending.request, self._begun()
        wanted = request.epoch, request.step
        if begun < wanted and time.monotonic() < pending.deadline:
            return False
        if begun < wanted or begun[0] != request.epoch:
            error = f"not in step {request.step} of epoch {request.epoch}"
            self._send(pending.identity, Blocks(request.number, error=error))
        else:
            self._send(pending.identity, *self._read(request))
        return True

    def _read(self, request: ReadBlocks) -> tuple[Any, ...]:
        try:
            if (locations := self._found(request)) is None:
                return (Blocks(request.number, error=_NO_SUCH_BLOCKS),)
            rows, are_sound = self._content(locations)
        except Exception as error:
            log.exception("blocks could not be read for another executor")
            return (Blocks(request.number, error=str(error)[:200]),)
        if not are_sound:
            return (Blocks(request.number, error="a block is corrupt"),)
        # A reset may have come while the blocks were read: their content could belong to other sequences.
        if self._begun()[0] != request.epoch:
            return (Blocks(request.number, error="the blocks were freed while they were read"),)
        content = rows.data.cast("B")
        return Blocks(request.number, checksum(rows)), *(
            content[start : start + FRAME_BYTES] for start in range(0, len(content), FRAME_BYTES)
        )

    def _found(self, request: ReadBlocks) -> Int32s | None:
        """Return the tier and the block, or page, of each location of a request; None: there are no such pages."""
        locations = _locations(request)
        if self.pages_of is None:
            return locations
        found = locations.copy()
        for number in np.unique(locations[:, 0]).tolist():
            here = locations[:, 0] == number
            if (pages := self.pages_of(number, request.group, locations[here, 1])) is None:
                return None
            found[here, 1] = pages
        return found

    def _content(self, locations: Int32s) -> tuple[Rows, bool]:
        """Return the content of ``locations`` [n, 2] (tier, block), and whether all of it matches its checksums."""
        rows, are_sound = np.empty((len(locations), self._bytes_per_block), np.uint8), True
        for number in np.unique(locations[:, 0]).tolist():
            here = np.flatnonzero(locations[:, 0] == number)
            part = np.empty((len(here), self._bytes_per_block), np.uint8)
            are_sound &= all(self._tiers[number].read(locations[here, 1], part))
            rows[here] = part
        return rows, are_sound

    def _send(self, identity: bytes, header: Blocks, *content: Any) -> None:
        with contextlib.suppress(zmq.ZMQError):  # the peer has gone
            self._socket.send_multipart([identity, encode(header), *content], copy=False)


def _locations(request: ReadBlocks) -> Int32s:
    return np.frombuffer(request.blocks, np.int32).reshape(-1, 2)
