"""nginx with ``deploy/proxy/nginx.conf`` in front of a gateway, for the tests of the proxy and of abuse."""

import contextlib
import getpass
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.processes import Process, free_port, wait_until

CONFIGURATION = Path(__file__).parents[1] / "deploy" / "proxy" / "nginx.conf"
NGINX = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or ""  # Debian's place is not in every PATH
needs_nginx = pytest.mark.skipif(not NGINX, reason="nginx is not installed")


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextlib.contextmanager
def nginx(folder: Path, gateway: str, **changes: str) -> Iterator[int]:
    """Run nginx in front of ``gateway``, HOST:PORT. Yields its port on 127.0.0.1.

    ``changes``: texts of the configuration and their replacements.
    """
    port, text = free_port(), CONFIGURATION.read_text()
    places = {"gateway:8000": gateway, "listen 8080": f"listen 127.0.0.1:{port}", "/tmp/": f"{folder}/"}
    for before, after in {**places, **changes}.items():
        assert before in text
        text = text.replace(before, after)
    configuration = folder / "nginx.conf"
    configuration.write_text(text)
    # As root, nginx would run its workers as a user that may not enter pytest's folder, where large bodies are kept.
    user = f"user {getpass.getuser()};" if os.geteuid() == 0 else ""
    command = [NGINX, "-c", str(configuration), "-p", str(folder), "-g", f"daemon off; {user}"]
    process = Process("nginx", command, folder)
    try:
        wait_until(lambda: listens(port), 20.0, "nginx listens", process)
        yield port
        assert process.exit_code is None, process.tail()
    finally:
        if process.exit_code is None:
            process.signal(signal.SIGTERM)  # which ends its workers too
        process.wait()
