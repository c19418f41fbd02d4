"""The executor container's health check, outside a container."""

import os
import socket
import subprocess
import sys
from pathlib import Path

HEALTHCHECK = Path(__file__).parents[2] / "services" / "executor" / "healthcheck.py"


def check(endpoint: str) -> int:
    return subprocess.run(
        [sys.executable, HEALTHCHECK], env=os.environ | {"PAGEWISE_SCHEDULER": endpoint}, timeout=30
    ).returncode


def test_healthy_is_while_a_connection_to_the_scheduler_stands() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert check(f"tcp://127.0.0.1:{port}") == 1
        with socket.create_connection(("127.0.0.1", port)):
            assert check(f"tcp://127.0.0.1:{port}") == 0


def test_other_endpoints_are_not_judged() -> None:
    assert check("ipc:///tmp/scheduler") == 0
