"""The tiers of other executors, from which this one fetches blocks over ZeroMQ, in pieces of about a megabyte.

It keeps requests for a few pieces under way, so that the link never waits, and sends no more of them once the copies
are cancelled.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zmq
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import Blocks, ReadBlocks, decode_from_peer, encode

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.tiers.block_endpoint import block_listener
from pagewise_executor.tiers.block_names import checksum
from pagewise_executor.tiers.block_server import FRAME_BYTES, PIECE_BYTES, WINDOW, BlockServer
from pagewise_executor.tiers.tier import FarJob, FarTier, Rows, Tier

log = logging.getLogger(__name__)

_ENVELOPE_BYTES = 1024
"""An upper bound of the bytes that encryption adds to a frame."""
_SILENCE_SECONDS = 5.0
_IDLE_SECONDS = 60.0
_LOOK_UP_MS = 50


class Peers(FarTier):
    """Fetches blocks from the tiers of other executors, with a thread for each of them.

    ``server``: serves blocks of ``tiers``, the tiers of this executor by number; for ``listen`` and ``advertised_host``
    see ``BlockServer``. ``bytes_per_block``: the same for all executors. ``rank``: the rank of this process; it fetches
    from the same rank of other executors, each of which has a list of endpoints, one for each rank.
    """

    def __init__(
        self,
        tiers: Mapping[int, Tier],
        bytes_per_block: int,
        listen: str,
        advertised_host: str,
        keys: Keys | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__()
        self.server = BlockServer(tiers, bytes_per_block, listen, advertised_host, keys, begun=lambda: self.begun)
        self.bytes_per_block, self.rank = bytes_per_block, rank
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links_lock = threading.Condition()
        self._links: dict[str, _Link] = {}

    def begin(self, job: CopyJob, upper: Tier) -> None:
        """Begin a step's copies from one tier of a peer. They come after all work that the device has so far."""
        peer = job.peer
        assert peer is not None
        fetch = self.track(job, upper)
        with self._links_lock:  # ``_retire`` takes it too: a link either gets this job or has left ``_links`` before
            link = self._links.get(peer.endpoint)
            if link is None:
                link = self._links[peer.endpoint] = _Link(peer.endpoint, self)
                threading.Thread(target=link.run, name=f"fetch {peer.endpoint}", daemon=True).start()
            link.inbox.put(fetch)

    def reset(self, epoch: int, *, keep: bool) -> None:
        """Refuse the requests of peers, and void all fetches, of older epochs."""
        self.begun = epoch, 0
        super().reset(epoch, keep=keep)

    def close(self) -> None:
        """Stop serving blocks, void all fetches, and end all threads."""
        self.server.close()
        super().reset(0, keep=True)
        with self._links_lock:
            for link in self._links.values():
                link.inbox.put(None)
            self._links_lock.wait_for(lambda: not self._links)
        self._context.destroy(linger=0)

    def _retire(self, link: "_Link") -> bool:
        """End a link that has been idle, unless it has just been given a job; return whether it ended."""
        with self._links_lock:
            if not link.inbox.empty():
                return False
            link.disconnect()
            del self._links[link.peer]
            self._links_lock.notify_all()
            return True


@dataclass(slots=True, eq=False)
class _Link:
    """The connection to one peer, and the jobs of its thread."""

    peer: str
    owner: Peers
    inbox: "queue.SimpleQueue[FarJob | None]" = field(default_factory=queue.SimpleQueue)
    socket: Any = None
    number: int = 0

    def run(self) -> None:
        """Run jobs one after the other; end after some time without any."""
        while True:
            job = None
            with contextlib.suppress(queue.Empty):
                job = self.inbox.get(timeout=_IDLE_SECONDS)
            if job is None:
                if self.owner._retire(self):
                    return
                continue
            began = time.perf_counter()
            try:
                self._do(job)
            except Exception as error:  # of any kind: the scheduler has to learn that the blocks are missing
                log.warning("blocks from %s: %s", self.peer, error)
            if job.missing:
                self.disconnect()  # late answers must not reach the next job
            self.owner.end(job, time.perf_counter() - began)

    def _do(self, job: FarJob) -> None:
        """Fetch a job's blocks, until it has ended.

        Raises:
            ProtocolError: the peer refuses, sends another message, or none.
        """
        size, count = self.owner.bytes_per_block, len(job.copies.pairs)
        per_piece = max(1, PIECE_BYTES // max(1, size))
        waiting = deque(slice(start, min(count, start + per_piece)) for start in range(0, count, per_piece))
        asked: dict[int, slice] = {}  # by the number of the request
        heard = time.monotonic()
        while waiting or asked:
            if job.ended:
                return
            while waiting and len(asked) < WINDOW:
                part = waiting.popleft()
                asked[self._ask(job, part)] = part
            if not self.socket.poll(_LOOK_UP_MS):
                if time.monotonic() - heard > _SILENCE_SECONDS:
                    raise ProtocolError(f"nothing heard for {_SILENCE_SECONDS:g} s")
                continue
            heard = time.monotonic()
            part, rows = self._take(asked, size)
            if not self.owner.deliver(job, job.copies.pairs[part, 1], rows):
                return

    def _ask(self, job: FarJob, part: slice) -> int:
        peer = job.copies.peer
        assert peer is not None
        if self.socket is None:
            self.socket = self.owner._context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 0)
            self.socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES + _ENVELOPE_BYTES)
            if self.owner._keys is not None:
                self.owner._keys.secure_client(self.socket, peer.key.encode())
            self.socket.connect(self.peer.split(" ")[self.owner.rank])
        self.number += 1
        blocks = job.copies.pairs[part, 0]
        locations = np.stack([np.full_like(blocks, job.copies.source), blocks], axis=1)
        request = ReadBlocks(self.number, peer.epoch, peer.step, locations.tobytes(), job.copies.group)
        self.socket.send(encode(request))
        return self.number

    def _take(self, asked: dict[int, slice], bytes_per_block: int) -> tuple[slice, Rows]:
        """Receive the next answer; return the part of the job it belongs to, removed from ``asked``, and its blocks."""
        header, *frames = self.socket.recv_multipart(copy=False)
        answer = decode_from_peer(header.buffer)
        if not isinstance(answer, Blocks) or answer.number not in asked:
            raise ProtocolError("its answer belongs to no request")
        if answer.error:
            raise ProtocolError(answer.error)
        part = asked.pop(answer.number)
        count = part.stop - part.start
        expected, arrived = count * bytes_per_block, sum(len(frame) for frame in frames)
        if arrived != expected or len(frames) != -(-expected // FRAME_BYTES):
            raise ProtocolError(f"{arrived} bytes in {len(frames)} frames are not {count} blocks of {bytes_per_block}")
        pieces = [np.frombuffer(frame.buffer, np.uint8) for frame in frames]
        content = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        if checksum(content) != answer.checksum:
            raise ProtocolError("its blocks do not match their checksum")
        return part, content.reshape(count, bytes_per_block)

    def disconnect(self) -> None:
        """Close the socket, and with it all requests that are under way."""
        if self.socket is not None:
            self.socket.close()
            self.socket = None


MakePeers = Callable[[Mapping[int, Tier], int], Peers]
"""Makes the exchange with other executors, from this executor's tiers and the bytes of a block."""


def make_peers(
    config: ExecutorConfig, keys: Keys | None, rank: int, tiers: Mapping[int, Tier], bytes_per_block: int
) -> Peers:
    """Return the exchange with other executors that the options ask for.

    Raises:
        ConfigError: the address of the scheduler, next to which peers are served, cannot be read.
    """
    return Peers(tiers, bytes_per_block, *block_listener(config, rank), keys, rank)
