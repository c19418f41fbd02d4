"""A scheduler's socket whose peer floods it, pings it and leaves without any reader; ends well unless libzmq aborts."""

import asyncio
import sys
import threading
import time

import zmq
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server import router_socket
from pagewise_shared.protocol import decode_from_executor

_PING_MS = 300


async def main(endpoint: str) -> None:
    router_socket._PING_MS = _PING_MS
    metrics = Metrics("m")
    sockets = router_socket.SocketContext(None, metrics)
    socket = router_socket.RouterSocket("executor", endpoint, decode_from_executor, metrics, sockets, timeout=2)

    def read() -> None:
        if socket.receive([]):
            asyncio.get_running_loop().call_soon(read)

    reading = asyncio.create_task(socket.run(read))
    sent = threading.Event()

    def flood() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
            peer.setsockopt(zmq.SNDTIMEO, 100)
            peer.connect(socket.endpoint)
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                try:
                    peer.send(b"x")
                except zmq.Again:
                    break
        sent.set()

    threading.Thread(target=flood).start()
    await asyncio.sleep(0.2)
    while not sent.is_set():  # the event loop is blocked, as if it computed
        time.sleep(0.01)  # noqa: ASYNC251
    time.sleep(3 * _PING_MS / 1000)  # noqa: ASYNC251
    await asyncio.sleep(0.5)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    sockets.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
