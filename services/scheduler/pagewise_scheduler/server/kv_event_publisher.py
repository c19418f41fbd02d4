"""Publishes batches of KV events over ZeroMQ in a thread, and sends missed batches again to subscribers."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, Full, Queue
from typing import Any

import msgspec
import zmq
from pagewise_shared.config import KVEventsConfig
from pagewise_shared.logs import BoundedLog

log = logging.getLogger(__name__)

_REPLAY_SECONDS = 0.05
"""The time between two looks for subscribers that have missed batches."""
_SEQUENCE_BYTES = 8
_END = b"\xff" * _SEQUENCE_BYTES
"""The sequence number that ends an answer to a subscriber: -1."""


class KVEventPublisher:
    """Sends each batch as frames of the topic, a sequence number, and msgpack, on a PUB socket.

    A subscriber that finds a gap in the sequence numbers sends the first missing number to the ROUTER socket, and
    receives the batches from that number on, as far as they are among the last ``buffer_steps``. A batch for which the
    queue has no room is lost, and leaves a gap. ``on_dropped``: called for each lost batch.
    """

    def __init__(self, config: KVEventsConfig, on_dropped: Callable[[], None]) -> None:
        """Bind or connect the sockets, and start the thread.

        Raises:
            zmq.ZMQError: an endpoint cannot be used.
        """
        self._topic, self._on_dropped = config.topic.encode(), on_dropped
        self._queue: Queue[tuple[int, Any]] = Queue(config.max_queue_size)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._next = 0
        self._complaints = BoundedLog(log)
        self._stopping = threading.Event()
        self._context = zmq.Context()
        self._replay: zmq.Socket[bytes] | None = None
        try:
            self._publisher = self._context.socket(zmq.PUB)
            self._publisher.set_hwm(config.hwm)
            use = self._publisher.bind if _is_bound(config.endpoint) else self._publisher.connect
            use(config.endpoint)
            if config.replay_endpoint:
                self._replay = self._context.socket(zmq.ROUTER)
                self._replay.set_hwm(config.buffer_steps + 1)  # beyond it, a ROUTER drops frames silently
                self._replay.bind(config.replay_endpoint)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="KV events", daemon=True)
        self._thread.start()

    def publish(self, batch: Any) -> None:
        """Queue a batch. It takes the next sequence number also if it is dropped."""
        sequence, self._next = self._next, self._next + 1
        try:
            self._queue.put_nowait((sequence, batch))
        except Full:
            self._on_dropped()
            self._complaints.warning("a batch of KV events is lost: %d wait to be published", self._queue.maxsize)

    def close(self) -> None:
        """Stop the thread, and close the sockets."""
        self._stopping.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while not self._stopping.is_set():
            try:
                if self._replay is not None and self._replay.poll(0):
                    self._answer(self._replay)
                sequence, batch = self._queue.get(timeout=_REPLAY_SECONDS)
                number, payload = sequence.to_bytes(_SEQUENCE_BYTES, "big"), encode(batch)
                self._sent.append((number, payload))
                self._publisher.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
            except Empty:
                continue
            except Exception as error:
                self._complaints.warning("KV events are not published: %s", error)

    def _answer(self, replay: "zmq.Socket[bytes]") -> None:
        """Send a subscriber the batches from the requested number on."""
        asker, *empty, wanted = replay.recv_multipart()
        if len(wanted) != _SEQUENCE_BYTES:
            self._complaints.warning("a request for KV events has %d bytes, not %d", len(wanted), _SEQUENCE_BYTES)
            return
        for number, payload in (*(one for one in self._sent if one[0] >= wanted), (_END, b"")):
            replay.send_multipart((asker, *empty, number, payload))


def _is_bound(endpoint: str) -> bool:
    """Whether a socket is bound to an endpoint, by vLLM's rule; it is connected to any other endpoint."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
