"""Servers that speak the Redis protocol: one in Python, and the real one where it is installed."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fakeredis import TcpFakeServer

Start = Callable[..., Callable[[], None]]
"""Starts a server on a port, with options; returns a function that stops it."""


def wait_for(port: int) -> None:
    for _ in range(200):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("the server did not start")


def start_fake(folder: Path, port: int, *options: str) -> Callable[[], None]:
    server = TcpFakeServer(("127.0.0.1", port), server_type="valkey")
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def stop() -> None:
        server.shutdown()
        server.server_close()

    return stop


def start_real(folder: Path, port: int, *options: str) -> Callable[[], None]:
    command = [REAL, "--port", str(port), "--save", "", "--dir", str(folder), *options]
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.DEVNULL)
    wait_for(port)

    def stop() -> None:
        process.kill()
        process.wait()

    return stop


REAL = shutil.which("redis-server") or shutil.which("valkey-server")
real_only = pytest.mark.skipif(REAL is None, reason="neither redis-server nor valkey-server is installed")
SERVERS = [pytest.param(start_fake, id="fake"), pytest.param(start_real, id="real", marks=real_only)]
