"""Small processes in the place of the services, which ``pagewise serve`` starts without knowing the difference.

Each writes a line ``NAME EVENT DETAILS`` to a file when it starts, gets a signal to stop, and ends. The gateway answers
every GET with 200 (with 503 if STAND_IN_UNREADY is set) on the port that it is given.
"""

import os
from collections.abc import Iterator
from pathlib import Path

_BEGIN = """
import json, os, signal, socket, sys, threading, time
name = next((a.split("=")[1] for a in sys.argv if a.startswith(("--gateway-id=", "--executor-id="))), "scheduler")

def tell(what, details=""):
    with open(os.environ["STAND_IN_LOG"], "a") as log:
        log.write(f"{name} {what} {details}\\n")

def end(number, frame):
    tell("told", signal.Signals(number).name)
    print("a last word", file=sys.stderr)
    time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0.2")))
    tell("ended")
    sys.exit(0)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN if name in os.environ.get("STAND_IN_DEAF", "") else end)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
tell("started", json.dumps([os.getpid(), *sys.argv[1:]]))
if name in os.environ.get("STAND_IN_BROKEN", ""):
    print("no such model", file=sys.stderr)
    sys.exit(2)
"""
_WAIT = "while True:\n    time.sleep(0.1)\n"
_ANSWER = """
port = int(next(a for a in sys.argv if a.startswith("--port=")).split("=")[1])
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if "--reuse-port" in sys.argv:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listener.bind(("127.0.0.1", port))
listener.listen()
while True:
    connection, _ = listener.accept()
    connection.recv(10000)
    body = name.encode()
    status = b"503 Not Ready" if "STAND_IN_UNREADY" in os.environ else b"200 OK"
    head = b"HTTP/1.1 %s\\r\\nConnection: close\\r\\nContent-Length: %d\\r\\n\\r\\n" % (status, len(body))
    connection.sendall(head + body)
    connection.close()
"""


class StandIns:
    """The three services in a folder at the front of ``PYTHONPATH``, and their lines."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log"
        self.log.touch()
        for service, work in (("scheduler", _WAIT), ("executor", _WAIT), ("gateway", _ANSWER)):
            package = folder / f"pagewise_{service}"
            package.mkdir()
            (package / "__init__.py").touch()
            (package / "main.py").write_text(_BEGIN + work)
        path = os.environ.get("PYTHONPATH", "")
        self.environment = {"PYTHONPATH": f"{folder}{os.pathsep}{path}", "STAND_IN_LOG": str(self.log)}

    def told(self, what: str) -> Iterator[tuple[str, str]]:
        """Name and details of each line of this kind, in order."""
        for line in self.log.read_text().splitlines():
            name, kind, details = line.split(" ", 2)
            if kind == what:
                yield name, details
