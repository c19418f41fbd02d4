"""A client that streams with a key of its own beside a test's load on the server, and its view of that.

It is a process of its own, because a test that makes large bodies would hold up a thread::

    python -m tests.abuse.bystander URL KEY

It streams one completion after the other. For each line on its standard input it writes its observations since the line
before, as a JSON object: the longest time in seconds without a token while it waited for one (``longest_gap``), how
many ``tokens`` came, and its ``failures``. It ends with its standard input.
"""

import contextlib
import http.client
import itertools
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.processes import EXECUTOR, Served, serving
from tests.free_cores import FreeCores
from tests.proxy import nginx

_TOKENS = 64
_PATIENCE = 120.0
_SETTLE_SECONDS = 40.0
"""Longer than a process waits until it returns freed memory between buffers in use (``tune_allocator``)."""

ABUSER, BYSTANDER = "sk-abuser", "sk-bystander"
"""API keys of two clients who do not know each other."""
_ADDRESS = "127.0.0.2"
"""The bystander's, because proxies limit the requests of an address."""

Serve = Callable[..., contextlib.AbstractContextManager[Served]]
"""``serving_two_keys`` with or without the proxy."""


@contextlib.contextmanager
def serving_two_keys(folder: Path, *options: str, abuser: str = "", proxy: bool = False) -> Iterator[Served]:
    """``pagewise serve`` with these options and both keys.

    ``abuser``: the limits of that key, as in the key file. ``proxy``: clients reach the gateway through nginx.
    """
    keys = folder / "api-keys"
    keys.write_text(f"abuser: {ABUSER} {abuser}\nbystander: {BYSTANDER}\n")
    keys.chmod(0o600)
    with serving(f"--api-keys-file={keys}", "--public-metrics", *options) as server:
        if not proxy:
            yield server
            return
        with nginx(folder, server.gateway_url.removeprefix("http://")) as port:
            server.url = f"http://127.0.0.1:{port}"
            yield server


@dataclass
class Seen:
    """The bystander's observations: seconds without a token, tokens, and failures; complete when ``beside`` ends."""

    longest_gap: float = 0.0
    tokens: int = 0
    failures: tuple[str, ...] = ()


class Bystander:
    """The process. ``look``: returns its observations since the last look."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def look(self) -> Seen:
        """Return its observations since the last look. A gap that has not ended counts as far as it has come."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("look\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        return Seen(found["longest_gap"], found["tokens"], tuple(found["failures"]))


@contextlib.contextmanager
def streaming(server: Served, key: str) -> Iterator[Bystander]:
    """A bystander that streams with ``key``, and has got its first tokens."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, server.url, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "streaming\n"
        yield Bystander(process)
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


@contextlib.contextmanager
def beside(server: Served, key: str) -> Iterator[Seen]:
    """Stream with ``key`` while the body of the ``with`` statement runs; the result is filled in when it ends.

    It ends with the next token that comes, so that a gap that has begun within the body is measured whole, and so that
    something has been seen even if the body took only a moment.
    """
    with streaming(server, key) as bystander:
        bystander.look()
        seen = Seen()
        yield seen
        _add(seen, bystander.look())
        deadline = time.monotonic() + _PATIENCE
        while (found := bystander.look()).tokens == 0 and not found.failures and time.monotonic() < deadline:
            _add(seen, found)
            time.sleep(0.02)
        _add(seen, found)


def _add(seen: Seen, more: Seen) -> None:
    seen.longest_gap = max(seen.longest_gap, more.longest_gap)
    seen.tokens += more.tokens
    seen.failures += more.failures


@contextlib.contextmanager
def unharmed(server: Served, *, longest_gap: float = 2.0, growth_mb: float = 50.0) -> Iterator[Seen]:
    """The load inside must not affect a client with the key BYSTANDER: no gap of 2 s in its streams, no failure.

    The bound of the gap is for a machine without other work (see ``FreeCores``).

    Also no executor may be lost or restarted, and the memory of each process has to come back to within ``growth_mb``
    MB (10^6 bytes) of its earlier value, within a short time.
    """
    executors, memory = server.pids(EXECUTOR), resident(server)
    cores = FreeCores()
    with beside(server, BYSTANDER) as seen:
        yield seen
    share = cores.share()
    print(f"{seen.longest_gap:.2f} s without a token, {share:.0%} of the cores free")
    assert seen.failures == ()
    assert seen.tokens > 0
    assert seen.longest_gap * share < longest_gap, f"{seen.longest_gap:.2f} s without a token, {share:.0%} of the cores"
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
    """Counts tokens, and measures how long none comes. Two threads use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = Seen()
        self._failures: list[str] = []
        self._last: float | None = None

    def waits(self) -> None:
        """A request was sent."""
        with self._lock:
            self._last = time.monotonic()

    def token(self) -> int:
        """A token has come; returns how many have."""
        with self._lock:
            self._gap(now := time.monotonic())
            self._last = now
            self._seen.tokens += 1
            return self._seen.tokens

    def failed(self, what: str) -> None:
        with self._lock:
            self._failures.append(what)
            self._last = None

    def look(self) -> str:
        """Return the observations since the last look."""
        with self._lock:
            self._gap(time.monotonic())
            seen, failures = self._seen, self._failures[:10]
            self._seen, self._failures = Seen(), []
        return json.dumps({"longest_gap": seen.longest_gap, "tokens": seen.tokens, "failures": failures})

    def _gap(self, now: float) -> None:
        if self._last is not None:
            self._seen.longest_gap = max(self._seen.longest_gap, now - self._last)


def _stream(url: str, key: str, number: int, watch: _Watch) -> None:
    """One completion, streamed."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(
        address.hostname or "", address.port, timeout=_PATIENCE, source_address=(_ADDRESS, 0)
    )
    body = {"prompt": f"# bystander {number}\n", "max_tokens": _TOKENS, "stream": True, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    watch.waits()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if answer.status != 200:
        watch.failed(f"{answer.status}: {answer.read()[:200]!r}")
        time.sleep(0.1)
        return
    events = 0
    for line in answer:
        if line.startswith(b"data: {"):
            events += 1
            watch.token()
    if not events:
        watch.failed("a stream ended without a token")
    connection.close()


def _main() -> None:
    url, key = sys.argv[1:]
    watch = _Watch()

    def stream_on() -> None:
        for number in itertools.count():
            try:
                _stream(url, key, number, watch)
            except (OSError, http.client.HTTPException) as error:
                watch.failed(repr(error))
                time.sleep(0.1)

    threading.Thread(target=stream_on, daemon=True).start()
    while not json.loads(watch.look())["tokens"]:
        time.sleep(0.1)
    print("streaming", flush=True)
    for _ in sys.stdin:
        print(watch.look(), flush=True)


if __name__ == "__main__":
    _main()
