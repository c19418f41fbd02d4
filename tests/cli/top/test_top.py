"""``pagewise top``: its screen by Textual's pilot, and as a process in a terminal, over a real server."""

import json
import os
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise.main import main
from pagewise.top.app import Top
from pagewise.top.rows import COLUMNS, STATES, bar, chosen, executors
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from benchmarks.processes import Served, serving
from tests.terminal import Terminal


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving("--simulate", "--simulate-step=0.05", "--executors=2", "--host-memory=16MiB") as running:
        yield running


@pytest.fixture
def streams(server: Served) -> Iterator[None]:
    """Three requests that run for as long as the test does."""
    opened = []
    for number in range(3):
        body = {"prompt": "import os\n" * 60, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": f"client-{number}"}
        request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
        opened.append(urllib.request.urlopen(request, timeout=60))
        opened[-1].readline()
    yield
    for stream in opened:
        stream.close()


async def until(pilot: Pilot[int], condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        await pilot.pause(0.05)


def text_of(app: Top, selector: str) -> str:
    return str(app.query_one(selector, Static).render())


def first_column(app: Top) -> list[str]:
    table = app.query_one(DataTable)
    return [str(table.get_row_at(row)[0]) for row in range(table.row_count)]


async def test_it_shows_finds_sorts_explains_and_aborts(server: Served, streams: None, tmp_path: Path) -> None:
    app = Top(server.url)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "3 running" in text_of(app, "#summary"))
        assert "2 of 2 executors ready" in text_of(app, "#summary")
        memory = text_of(app, "#memory")
        assert "executor-0" in memory
        assert "host" in memory
        assert STATES[0][2] in memory, "blocks are in use"
        await until(pilot, lambda: {"client-0", "client-1", "client-2"} <= set(first_column(app)))
        await pilot.press("s", "r")
        # By their first column, ascending.
        await until(pilot, lambda: first_column(app)[:3] == sorted(first_column(app)[:3]))
        await pilot.press("slash", *"client-1", "enter")
        await until(pilot, lambda: first_column(app) == ["client-1"])
        await pilot.press("enter")
        await until(pilot, lambda: "sequence 0: " in text_of(app, "#timeline"))
        assert "client's id client-1" in text_of(app, "#timeline")
        (tmp_path / "top.svg").write_text(app.export_screenshot())
        await pilot.press("a", "a")
        await until(pilot, lambda: str(app.query_one(DataTable).get_row_at(0)[1]) == "abort")
        await pilot.press("escape")
        await until(pilot, lambda: len(first_column(app)) >= 3)
        assert not app.query_one("#details").display
    assert app.return_value is None


async def test_a_terminal_that_is_too_small_is_told_and_may_grow() -> None:
    app = Top("http://127.0.0.1:1")
    async with app.run_test(size=(50, 10)) as pilot:
        assert "50 columns and 10 lines are too few: 60 and 16 are needed" in text_of(app, "#small")
        assert not app.query_one("#main").display
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: bool(app.query_one("#main").display))
        await until(pilot, lambda: "does not answer" in text_of(app, "#state"))


class _Console(BaseHTTPRequestHandler):
    """A stream with one event, and the end of it when the server closes."""

    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        scheduler = {"hit_rate": {}, "unplaced": 0} | dict.fromkeys(
            ("requests_running", "requests_waiting", "prompt_tokens_per_second"), 0
        )
        scheduler["tokens_per_second"] = None
        fleet = {"model": "stand-in", "scheduler": scheduler, "gateways": [], "executors": []}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"event: fleet\ndata: {json.dumps(fleet)}\n\n".encode())

    def log_message(self, *_: Any) -> None:
        pass


async def test_a_server_that_goes_is_told_and_one_that_comes_back_is_shown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    app = Top(f"http://127.0.0.1:{port}")
    async with app.run_test(size=(100, 30)) as pilot:
        await until(pilot, lambda: "does not answer" in text_of(app, "#state"))
        with ThreadingHTTPServer(("127.0.0.1", port), _Console) as console:
            thread = threading.Thread(target=console.serve_forever)
            thread.start()
            await until(pilot, lambda: "stand-in" in text_of(app, "#summary"))
            assert "- tokens/s out, 0 in" in text_of(app, "#summary")
            assert "No executor has joined" in text_of(app, "#memory")
            await until(pilot, lambda: "has ended the stream" in text_of(app, "#state"))
            console.shutdown()
            thread.join()
        await until(pilot, lambda: "does not answer" in text_of(app, "#state"))
        assert "stand-in" in text_of(app, "#summary"), "what is known stays"


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_it_runs_in_a_real_terminal(server: Served, streams: None, variables: dict[str, str]) -> None:
    """A pseudo-terminal of the kernel, keys typed into it, and its output."""
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    terminal = Terminal([sys.executable, "-m", "pagewise.main", "top", "--url", server.url], environment | variables)
    try:
        for wanted in (b"executor-1", b"client-2"):
            terminal.read_until(lambda wanted=wanted: wanted in terminal.written)
        terminal.type(b"q")
        assert terminal.wait() == 0
    finally:
        terminal.close()
    assert b"Traceback" not in terminal.written
    assert b"\x1b[?1049h" in terminal.written, "it has a screen of its own"


def test_without_a_terminal_it_says_what_to_use(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert main(["top"]) == 1
    assert "use `pagewise vmstat`" in capsys.readouterr().err


@given(st.fixed_dictionaries({key: st.integers(0, 10_000) for key, *_ in STATES}), st.integers(20, 200))
def test_a_bar_has_its_width_and_every_state_that_there_is(counts: dict[str, int], width: int) -> None:
    drawn = bar(counts, width).plain
    assert len(drawn) == width
    if any(counts.values()):
        assert {character for key, _, character, _ in STATES if counts[key]} == set(drawn)


def test_pages_and_snapshots_of_groups_of_layers_have_a_line() -> None:
    groups = [
        {"kind": "full", "window": 0, "in_use": 1000, "cached": 200, "snapshots": 0},
        {"kind": "window", "window": 1024, "in_use": 30, "cached": 4, "snapshots": 3},
        {"kind": "state", "window": 2, "in_use": 7, "cached": 70, "snapshots": 10},
    ]
    one = {
        "executor_id": "e", "state": "ready", "running": 1, "waiting": 0, "preemptions": 0, "tokens_per_second": 9.0,
        "counts": {"free": 89, "cached": 274, "in_use": 1037, "lent": 0, "copying": 0}, "rates": {},
        "device": {"num_blocks": 1400, "groups": groups}, "tiers": {"host": {"num_blocks": 9, "used": 0, "groups": []}},
    }  # fmt: skip
    lines = executors({"executors": [one]}, 100).plain.splitlines()
    assert lines[1].endswith(" 1,311 of 1,400")
    assert lines[3] == "  device  pages: full 1,200, window 1,024 34, state 77; snapshots: 13"
    assert len(lines) == 5


def test_keys_with_budgets_have_a_line() -> None:
    use = {"used": 3 << 29, "min": 1 << 30, "low": 0, "high": None}
    keys = [
        {"name": "alice", "memory": {"device": use}, "spared_by_next_gib": 90},
        {"name": "bob", "memory": {}, "spared_by_next_gib": 6},
    ]
    assert executors({"executors": [], "keys": keys}, 100).plain.splitlines() == [
        f"{'alice':<24} device 1.5 GiB (min 1.0) the next GiB would have saved 1.5 tokens/s",
        f"{'bob':<24} the next GiB would have saved 0.1 tokens/s",
    ]


def test_requests_without_a_value_come_last() -> None:
    requests: dict[str, Any] = {
        "running": [{"request_id": "a", "queue_seconds": 0.5}, {"request_id": "b", "queue_seconds": 0.1}],
        "waiting": [{"request_id": "c", "queue_seconds": None, "key": "team"}],
        "ended": [],
    }
    queue = COLUMNS[10]
    assert [one["request_id"] for one in chosen(requests, "", queue, descending=True)] == ["a", "b", "c"]
    assert [one["request_id"] for one in chosen(requests, "", queue, descending=False)] == ["b", "a", "c"]
    assert [one["request_id"] for one in chosen(requests, "team", None, descending=False)] == ["c"]
