"""``pagewise serve`` as its users start it: real processes, real sockets, a free port."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path


class Server:
    """A running ``pagewise serve``; ``output`` collects everything it prints."""

    def __init__(self, *arguments: str, ready_seconds: float = 90.0) -> None:
        self.output: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewise.main", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
        )
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(ready_seconds) or not self.url:
            self.close()
            raise RuntimeError("pagewise serve did not become ready:\n" + "".join(self.output))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line)
            if line.startswith("Serving "):
                self.url = line.split(" at ")[1].split(" ")[0]
                self._ready.set()
        self._ready.set()

    def pids(self, module: str) -> list[int]:
        """Processes below this server that run ``module``."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                if parent == self.process.pid and module.encode() in command:
                    found.append(int(entry.name))
        return found

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.split("{")[0].split(" ")[0] == f"pagewise_{name}"]
        assert values, f"there is no metric pagewise_{name}"
        return sum(map(float, values))

    def wait_for_metric(self, name: str, value: float, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while (now := self.metric(name)) != value:
            assert time.monotonic() < deadline, f"{name} is {now}, not {value}"
            time.sleep(0.2)

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(timeout=10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.close()


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False
