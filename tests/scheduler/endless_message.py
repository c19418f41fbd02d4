"""A peer with a key that sends the scheduler messages of very many parts.

    python endless_message.py ENDPOINT KEYS NAME SIZE PARTS

ZeroMQ sends no part of a message before it has the last one. So each has an end, but one that is not to come through.
If one does, because the scheduler looked too late, another follows. Prints a line when one begins to be sent.
"""

import sys
import time
from pathlib import Path

import zmq
from pagewise_shared.curve import Keys


def main(endpoint: str, folder: str, name: str, size: int, parts: int) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.sndhwm = 0
    Keys(Path(folder), name).secure_client(socket)
    socket.connect(endpoint)
    part = b"x" * size
    while True:
        for _ in range(parts):
            socket.send(part, zmq.SNDMORE)
        print("sending", flush=True)
        socket.send(b"end")
        time.sleep(3)


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:]))
