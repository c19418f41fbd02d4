"""A client that streams with a key of its own beside what a test does to the server, and what it sees of that.

It is a process of its own, because a test that makes large bodies would hold up a thread::

    python -m tests.abuse.bystander URL KEY

It streams one completion after the other until its standard input ends. Then it writes a JSON object: the longest time
in seconds without a token while it waited for one (``longest_gap``), how many ``tokens`` came, and its ``failures``.
"""

import contextlib
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.processes import EXECUTOR, Served, serving

_TOKENS = 64
_PATIENCE = 120.0
_SETTLE_SECONDS = 20.0
_WARM_UP_TOKENS = 2 * _TOKENS


ABUSER, BYSTANDER = "sk-abuser", "sk-bystander"
"""API keys of two clients who do not know each other."""


@contextlib.contextmanager
def serving_two_keys(folder: Path, *options: str, abuser: str = "") -> Iterator[Served]:
    """``pagewise serve`` with these options and both keys. ``abuser``: the limits of that key, as in the key file."""
    keys = folder / "api-keys"
    keys.write_text(f"abuser: {ABUSER} {abuser}\nbystander: {BYSTANDER}\n")
    keys.chmod(0o600)
    with serving(f"--api-keys-file={keys}", "--public-metrics", *options) as server:
        yield server


@dataclass
class Seen:
    """What the bystander has seen. Seconds without a token, tokens, and what failed; complete when ``beside`` ends."""

    longest_gap: float = 0.0
    tokens: int = 0
    failures: tuple[str, ...] = ()


@contextlib.contextmanager
def beside(server: Served, key: str) -> Iterator[Seen]:
    """Stream with ``key`` while the body of the ``with`` statement runs; the result is filled in when it ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, server.url, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    seen = Seen()
    try:
        assert process.stdout.readline() == "streaming\n"
        yield seen
    finally:
        process.stdin.close()
        try:
            text = process.stdout.read()
            process.wait(_PATIENCE)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
    found = json.loads(text)
    seen.longest_gap, seen.tokens, seen.failures = found["longest_gap"], found["tokens"], tuple(found["failures"])


@contextlib.contextmanager
def unharmed(server: Served, *, longest_gap: float = 1.0, growth_mb: float = 50.0) -> Iterator[Seen]:
    """What happens inside must not hurt a client with the key BYSTANDER: no gap of a second in its streams, no failure.

    Also no executor may be lost or restarted, and the memory of each process has to come back to within ``growth_mb``
    MB (10^6 bytes) of what it was, within a short time.
    """
    executors, memory = server.pids(EXECUTOR), resident(server)
    with beside(server, BYSTANDER) as seen:
        yield seen
    assert seen.failures == ()
    assert seen.tokens > 0
    assert seen.longest_gap < longest_gap, f"{seen.longest_gap:.2f} s without a token"
    assert server.pids(EXECUTOR) == executors, "an executor was started again"
    gone = [line for line in server.output if "executor" in line and "is gone" in line]
    assert not gone, gone
    deadline = time.monotonic() + _SETTLE_SECONDS
    while grown := {
        name: (memory[name], now) for name, now in resident(server).items() if now - memory.get(name, now) > growth_mb
    }:
        assert time.monotonic() < deadline, f"MB before and after: {grown}"
        time.sleep(0.2)


def resident(server: Served) -> dict[str, float]:
    """Resident MB (10^6 bytes) of each process below ``pagewise serve``, by its process id and command."""
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            module = next((word for word in process.cmdline() if word.startswith("pagewise_")), "other")
            found[f"{module} {process.pid}"] = process.memory_info().rss / 1e6
    return found


class _Watch:
    """Counts tokens, and measures how long none comes."""

    def __init__(self) -> None:
        self.seen = Seen()
        self.failures: list[str] = []
        self._last: float | None = None

    def sent(self) -> None:
        self._last = time.monotonic()

    def token(self) -> None:
        now = time.monotonic()
        if self._last is not None and self.seen.tokens >= _WARM_UP_TOKENS:
            self.seen.longest_gap = max(self.seen.longest_gap, now - self._last)
        self._last = now
        self.seen.tokens += 1
        if self.seen.tokens == _WARM_UP_TOKENS:
            print("streaming", flush=True)

    def stream(self, url: str, key: str, number: int) -> None:
        """One completion, streamed."""
        address = urlsplit(url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_PATIENCE)
        body = {"prompt": f"# bystander {number}\n", "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        self.sent()
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            self.failures.append(f"{answer.status}: {answer.read()[:200]!r}")
            time.sleep(0.1)
            return
        events = 0
        for line in answer:
            if line.startswith(b"data: {"):
                events += 1
                self.token()
        if not events:
            self.failures.append("a stream ended without a token")
        connection.close()


def _main() -> None:
    url, key = sys.argv[1:]
    watch, ends, number = _Watch(), threading.Event(), 0
    threading.Thread(target=lambda: (sys.stdin.read(), ends.set()), daemon=True).start()
    while not ends.is_set():
        try:
            watch.stream(url, key, number)
        except (OSError, http.client.HTTPException) as error:
            watch.failures.append(repr(error))
            time.sleep(0.1)
        number += 1
    seen = watch.seen
    print(json.dumps({"longest_gap": seen.longest_gap, "tokens": seen.tokens, "failures": watch.failures[:10]}))


if __name__ == "__main__":
    _main()
