"""The console's data over real processes: the map follows load and demotions, and an operator ends a request."""

import contextlib
import http.client
import json
import socket
import threading
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes import Served, serving

PROMPTS = [
    f"# part {number}\n" + "import os\nclass Point:\n    def __init__(self, x, y):\n" * 14 for number in range(5)
]
NUM_BLOCKS = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("bob: sk-bob\nops: sk-ops operator=yes\n")
    # Each prompt takes most of the pool, so every one pushes out the one before.
    options = (f"--num-blocks={NUM_BLOCKS}", "--host-memory=32MiB", f"--api-keys-file={keys}", "--console-shows-text")
    with serving(*options) as running:
        yield running


def ask(server: Served, path: str, body: object = None, key: str = "sk-ops", method: str | None = None) -> Any:
    """An answer that is open."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(server.url + path, data, headers, method=method)
    return urllib.request.urlopen(request, timeout=60)


def complete(server: Served, prompt: str, **fields: object) -> dict[str, Any]:
    body = {"model": "pagewise-demo", "prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    with ask(server, "/v1/completions", body, "sk-bob") as answer:
        result: dict[str, Any] = json.load(answer)
        return result


class Watched:
    """A console that is open: every event that has come, by name."""

    def __init__(self, server: Served, query: str = "") -> None:
        self.events: dict[str, list[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        self._answer = ask(server, f"/console/stream?{query}")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        name = ""
        with self._answer, contextlib.suppress(OSError, http.client.HTTPException):  # when it is closed
            for line in self._answer:
                if line.startswith(b"event: "):
                    name = line[7:].decode().strip()
                elif line.startswith(b"data: "):
                    with self._changed:
                        self.events.setdefault(name, []).append(json.loads(line[6:]))
                        self._changed.notify_all()

    def until(self, name: str, holds: Any) -> dict[str, Any]:
        """The first event of a name for which something holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(holds, self.events.get(name, ()))), 30), self.events.get(name)
            return next(filter(holds, self.events[name]))

    def close(self) -> None:
        self._answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)
        self._reader.join(10)


def test_the_map_follows_load_and_demotions(server: Served) -> None:
    device, host = Watched(server), Watched(server, "parts=map&tier=host&cells=4096")
    try:
        device.until("map", lambda event: event["counts"]["free"] == NUM_BLOCKS)
        for prompt in PROMPTS:
            complete(server, prompt)
        shown = device.until("map", lambda event: event["counts"]["cached"] > 20)
        assert shown["blocks_per_cell"] == 1
        device.until("map", lambda event: event["counts"]["copying"] > 0)
        stored = host.until("map", lambda event: event["counts"]["cached"] > 20)
        assert stored["tier"] == "host"
        executor_registry = device.until("fleet", lambda event: event["executors"][0]["rates"]["demoted"] > 0)
        assert executor_registry["consoles"] == 2
        device.until("fleet", lambda event: event["executors"][0]["tiers"]["host"]["used"] > 20)
        for event in (*device.events["map"], *host.events["map"]):
            assert sum(event["counts"].values()) == event["num_blocks"]
            assert sum(colour for colour in b64decode(event["cells"])[1::2]) > 0
        (tree,) = device.until("prefixes", lambda event: event["executors"][0]["runs"])["executors"]
        assert "import os" in tree["runs"][0]["text"] or "part" in tree["runs"][0]["text"]
        assert device.until("requests", lambda event: event["ended"])["ended"][0]["finish_reason"] == "length"
    finally:
        device.close()
        host.close()
    cached = b64decode(shown["cells"])[::2].index(1)
    with ask(server, f"/console/block?executor={shown['executor_id']}&block={cached}") as answer:
        block = json.load(answer)
    assert block["state"] in ("cached", "free")
    assert block["state"] == "free" or (len(block["hash"]), block["tokens"]) == (64, 16)


def test_only_operators_see_it(server: Served) -> None:
    for path, key in (("/console/stream", "sk-bob"), ("/console/block?executor=e&block=1", "sk-bob")):
        with pytest.raises(urllib.error.HTTPError) as raised:
            ask(server, path, key=key)
        with raised.value:
            assert raised.value.code == 403
    with urllib.request.urlopen(server.url + "/", timeout=10) as page:
        assert page.url.endswith("/console")
        assert page.headers["Content-Type"].startswith("text/html")


def test_an_operator_ends_a_request(server: Served) -> None:
    body = {"model": "pagewise-demo", "prompt": "def f(", "max_tokens": 600, "ignore_eos": True, "stream": True}
    watched = Watched(server, "parts=requests")
    try:
        with ask(server, "/v1/completions", body, "sk-bob") as stream:
            name = json.loads(stream.readline().removeprefix(b"data: "))["id"]
            with ask(server, f"/console/requests/{name}/abort", method="POST") as answer:
                assert answer.status == 204
            events = [json.loads(line[6:]) for line in stream if line.startswith(b"data: {")]
        assert events[-1]["choices"][0]["finish_reason"] == "abort"
        assert len(events) < 600
        own = name.removeprefix("cmpl-")
        after = watched.until("requests", lambda event: any(one["request_id"] == own for one in event["ended"]))
        assert (after["running"], after["ended"][0]["finish_reason"]) == ([], "abort")
    finally:
        watched.close()
