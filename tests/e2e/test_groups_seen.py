"""The memory of a hybrid model as operators see it: pages by kind, snapshots, and reasons for missing states."""

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.processes import Served, serving
from tests.model_builders import build_model
from tests.structured import VOCAB_SIZE, save_tokenizer

SHARED = "You are a helpful assistant of a shop for bicycles. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("hybrid")
    build_model("lfm2", path, vocab_size=VOCAB_SIZE)
    save_tokenizer(path)
    options = ("--num-blocks", "100", "--served-model-name", "hybrid", "--no-profile")
    # By cost, the first prompt would take snapshots inside of what the others share.
    with serving("--model", str(path), *options, "--eviction", "lru") as running:
        yield running


def post(server: Served, prompt: str, name: str) -> int:
    """Ask for an answer; returns the number of cached tokens."""
    body = {"model": "hybrid", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        cached: int = json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]
        return cached


def get(server: Served, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        result: dict[str, Any] = json.load(answer)
        return result


def printed(server: Served, *arguments: str) -> str:
    """The output of a command, with one blank between words."""
    whole = [sys.executable, "-m", "pagewise.main", *arguments, "--url", server.url]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=30, check=True)
    return re.sub(r"[ \n]+", " ", done.stdout)


def test_operators_see_pages_snapshots_and_lost_states(server: Served) -> None:
    begun = [post(server, SHARED + "abc"[number] * 100, f"q{number}") for number in range(3)]
    assert begun == [0, 0, 304], "the second one left the path of the first, and took a snapshot there"
    said = printed(server, "explain", "q1")
    assert "Its prefix was there, its states were not: 304 tokens" in said
    assert "So it could begin at token 0. No states are known to have been kept there." in said
    assert "This request keeps states behind token 304, where later ones can begin." in said

    (executor,) = get(server, "/debug/memory?limit=100")["executors"]
    device = executor["device"]
    full, states = device["groups"]
    assert (full["kind"], states["kind"]) == ("full", "state")
    assert device["cached"] == full["cached"] + states["cached"] > 20
    snapshots = [one for run in executor["tree"] for one in run.get("snapshots", [])]
    assert len(snapshots) == states["snapshots"]
    assert [one for one in snapshots if one.get("used")] == [
        {"kind": "state", "window": 2, "tier": "device", "depth": 19, "places": 1, "used": True}
    ]
    for group in (full, states):
        until_pages_are(server, group["kind"], group["cached"])
    shown = printed(server, "pmap")
    assert f"device state 1 0 {states['cached']} {states['snapshots']} " in shown
    assert "blocks 1-19: device 19 *19 (state, used: device)" in shown

    for number in range(12):  # others take the room
        post(server, f"{number} " * 150, f"o{number}")
    words = printed(server, "vmstat", "1", "1").split()
    assert words[-30:-22] == ["copy", "full", "state", "take", "use", "unused", "demote", "load"]
    taken, used, unused, demoted, loaded = (int(number) for number in words[-5:])
    assert taken > 10
    assert used == 1
    assert 0 < unused < taken
    assert demoted == loaded == 0


def until_pages_are(server: Served, kind: str, cached: int) -> None:
    """Wait until the metrics say so: they are refreshed once a second."""
    deadline = time.monotonic() + 20
    while server.metric("kv_pages", tier="device", kind=kind, state="cached") != cached:
        assert time.monotonic() < deadline
        time.sleep(0.2)
