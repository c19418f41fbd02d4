"""KV memory as its users see it: a host tier behind real processes, its metrics, /debug, vmstat and pmap."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pagewise_shared.protocol import POOL_TIERS

from benchmarks.processes import SCHEDULER, Served, free_port, serving

PROMPTS = [
    f"# part {number}\n" + "import os\nclass Point:\n    def __init__(self, x, y):\n" * 14 for number in range(6)
]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    # Each prompt takes most of the pool, so every one pushes out the one before.
    options = ("--num-blocks", "40", "--host-memory", "32MiB", "--verify-copies", "--log-level", "debug")
    with serving(*options) as running:
        yield running


def post(server: Served, prompt: str, **fields: object) -> dict[str, Any]:
    body = json.dumps({"model": "pagewise-demo", "prompt": prompt, "max_tokens": 12, "temperature": 0} | fields)
    request = urllib.request.Request(
        f"{server.url}/v1/completions", body.encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        result: dict[str, Any] = json.loads(answer.read())
        return result


def get(server: Served, path: str) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + path, timeout=10) as answer:
        result: dict[str, Any] = json.loads(answer.read())
        return result


def command(server: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, "-m", "pagewise.main", *arguments, "--url", server.url]
    return subprocess.run(whole, capture_output=True, text=True, timeout=30, check=False)


def test_prompts_that_were_evicted_come_back_with_the_same_answer(server: Served) -> None:
    first = [post(server, prompt) for prompt in PROMPTS]
    again = [post(server, prompt) for prompt in PROMPTS]
    assert [a["choices"] for a in again] == [f["choices"] for f in first]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in again]
    assert min(cached) >= 0
    assert max(cached) > 100, "some of it came from the host"
    assert server.metric("kv_block_events_total") > 0
    assert server.metric("cached_tokens_total") > 100
    assert server.metric("recovery_actual_seconds_count") > 0
    assert any("predicted load" in line and "tokens loaded" in line for line in server.output)
    report = get(server, "/debug/requests/" + again[-1]["id"])
    started = report["events"][0]
    assert started["kind"] == "started"
    assert started["predicted_seconds"].keys() == {"load", "recompute", "both"}
    assert started["seconds"] > 0
    shown = command(server, "pmap", again[-1]["id"])
    assert shown.returncode == 0
    assert "predicted load" in shown.stdout
    assert "took" in shown.stdout


def test_debug_memory_adds_up_and_is_bounded(server: Served) -> None:
    post(server, PROMPTS[0])
    (executor,) = get(server, "/debug/memory?limit=2")["executors"]
    device, host = executor["device"], executor["tiers"]["host"]
    assert device["num_blocks"] == 40 == device["free"] + device["cached"] + device["in_use"]
    assert 0 < host["used"] <= host["num_blocks"]
    assert len(executor["tree"]) <= 2
    assert executor["truncated"] is True
    whole = get(server, "/debug/memory?limit=1000")["executors"][0]
    assert sum(run["num_blocks"] for run in whole["tree"]) == whole["tree_blocks"]
    assert sum(run["tiers"].get("host", 0) for run in whole["tree"]) == host["used"]
    assert whole["costs"]["token"] > 0
    assert whole["costs"]["tiers"]["host"]["block"] > 0
    endless = f"/debug/memory?limit={'9' * 5000}"
    for path, status in (
        ("/debug/memory?limit=0", 400),
        ("/debug/memory?limit=x", 400),
        (endless, 400),
        ("/debug/requests/no", 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as raised:
            get(server, path)
        assert raised.value.code == status
        assert json.loads(raised.value.read())["error"]["message"]


def test_a_running_request_shows_what_it_shares(server: Served) -> None:
    body = {"model": "pagewise-demo", "prompt": PROMPTS[1][:300], "max_tokens": 180, "n": 3, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body | {"stream": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as stream:
        name = json.loads(stream.readline().removeprefix(b"data: "))["id"]
        for _ in range(10):
            stream.readline()
        report = get(server, f"/debug/requests/{name}")
        shown = command(server, "pmap", name).stdout
        for _ in stream:
            pass
    assert len(report["sequences"]) == 3
    assert any(block["references"] > 1 for sequence in report["sequences"] for block in sequence.get("blocks", []))
    assert "sequence 2: " in shown


def test_pmap_knows_a_client_s_own_id_and_tells_times(server: Served) -> None:
    body = json.dumps({"model": "pagewise-demo", "prompt": PROMPTS[2], "max_tokens": 4}).encode()
    headers = {"Content-Type": "application/json", "X-Request-Id": "batch/7 of 9".replace(" ", "-")}
    for _ in range(2):
        with urllib.request.urlopen(urllib.request.Request(f"{server.url}/v1/completions", body, headers)) as answer:
            newest = json.loads(answer.read())["id"]
    shown = command(server, "pmap", "batch/7-of-9")
    assert shown.returncode == 0, shown.stderr
    first, times, where, cached = shown.stdout.splitlines()[:4]
    assert first == f"request {newest.removeprefix('cmpl-')}  client's id batch/7-of-9"
    assert re.fullmatch(r"  arrived \d+\.\d{3} s ago, \d+\.\d ms in the queue, first token after \d+\.\d ms", times)
    assert re.fullmatch(r"  placed on \S+ \d+\.\d{3} s ago", where)
    assert cached.startswith("  cached tokens: ")


def test_vmstat_prints_lines_and_says_when_nobody_answers(server: Served) -> None:
    shown = command(server, "vmstat", "0.1", "3")
    lines = shown.stdout.splitlines()
    assert shown.returncode == 0
    assert len(lines) == 5
    assert lines[1].split()[:4] == ["run", "wait", "free", "cached"]
    assert all(len(line.split()) == 13 + 2 * len(POOL_TIERS[1:]) for line in lines[2:])
    absent = [sys.executable, "-m", "pagewise.main", "vmstat", "--url", "http://127.0.0.1:1"]
    done = subprocess.run(absent, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert command(server, "pmap", "nobody").returncode == 1


def test_explain_says_where_a_prefix_was_lost_and_for_whom(server: Served) -> None:
    prompt = "# explained\n" + PROMPTS[3]
    cached = post(server, prompt)["id"].removeprefix("cmpl-")
    for number in range(12):  # until neither the device nor the host has room for the first one
        taker = post(server, f"# {number} {'pushes it out ' * 3}\n" + PROMPTS[4])["id"].removeprefix("cmpl-")
    assert taker
    again = post(server, prompt)["id"]
    told = get(server, f"/debug/explain/{again}")
    shown = command(server, "explain", again)
    assert shown.returncode == 0, shown.stderr
    text = " ".join(shown.stdout.split())
    assert all(" ".join(sentence.split()) in text for sentence in told["sentences"])
    # It was in the host, or it was lost: either is named, with the request that it belongs to.
    lost = told.get("lost", [])
    assert lost or any(one.get("source") == "host" for one in told["events"])
    if lost:
        assert f"were cached by request {cached}" in text
    assert told["client"]["known"]
    assert command(server, "explain", "nobody").returncode == 1
    assert json.loads(command(server, "explain", again, "--json").stdout)["request_id"] == told["request_id"]


def test_a_conversation_is_sent_again_and_found_in_the_cache(server: Served) -> None:
    whole = [sys.executable, "-m", "pagewise.main", "chat", "--url", server.url, "--max-tokens=8", "--temperature=0"]
    done = subprocess.run(
        [*whole, "--system=" + "Answer in Python. " * 8],
        input="First.\n\nSecond.\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    first, second = re.findall(r"\[(\d+) of (\d+) prompt tokens were cached, .*; \d+ tokens", done.stderr)
    assert int(second[1]) > int(first[1])
    assert int(second[0]) >= int(first[1]) // 16 * 16 > 0
    assert len(done.stdout) > 10

    done = subprocess.run([*whole, "--model=none"], input="First.\n", capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the model 'none' does not exist" in done.stderr


def test_a_reader_that_ends_ends_the_command_quietly(server: Served) -> None:
    for arguments in (f"vmstat 0.2 --url {server.url}", "size pagewise-demo --gpu-memory 80GiB"):
        line = f"{sys.executable} -m pagewise.main {arguments} | head -n 1"
        done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
        assert done.stdout.count("\n") == 1
        assert not done.stderr


def test_a_gateway_that_is_not_there_is_named_with_the_option_for_it() -> None:
    for arguments in (["pmap", "x"], ["explain", "x"], ["vmstat"], ["chat"]):
        url = f"http://127.0.0.1:{free_port()}"
        environ = os.environ | {"PAGEWISE_URL": url}
        whole = [sys.executable, "-m", "pagewise.main", *arguments]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=30, env=environ, input="")
        assert done.returncode == 1
        assert f"{url} does not answer (Connection refused): --url or PAGEWISE_URL names another" in done.stderr


def test_the_cache_is_listed_and_released(server: Served) -> None:
    post(server, PROMPTS[0][:400], cache_salt="mine")
    report = json.loads(command(server, "cache", "list", "--salt", "all/mine", "--json").stdout)
    (mine,) = report["executors"][0]["prefixes"]
    assert mine["salt"] == "all/mine"
    assert mine["bytes"]["device"] == mine["tiers"]["device"] * report["executors"][0]["bytes_per_block"] > 0
    shown = command(server, "cache", "list")
    assert shown.returncode == 0
    assert "all/mine" in shown.stdout
    assert " KiB" in shown.stdout
    assert command(server, "cache", "drop").returncode == 2
    dropped = command(server, "cache", "drop", "--salt", "all/mine")
    assert f"blocks released: {mine['tiers']['device']} on the device" in dropped.stdout
    assert "all/mine" not in command(server, "cache", "list").stdout
    assert command(server, "cache", "drop", "--all", "--external").returncode == 0
    executor = get(server, "/debug/memory")["executors"][0]
    assert executor["device"]["free"] == 40
    assert executor["tiers"]["host"]["used"] == executor["tree_blocks"] == 0


def test_a_session_ends(server: Served) -> None:
    prompt = PROMPTS[0]
    for _ in range(2):  # two turns
        answer = post(server, prompt, session_id="s-1", cache_hints={"returns_in": 5})
        prompt += answer["choices"][0]["text"] + " and then"
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    before = server.metric("advice_accepted_total")
    done = command(server, "cache", "end", "s-1")
    assert (done.returncode, done.stdout[:14]) == (0, "s-1: accepted,"), done.stderr + done.stdout
    assert server.metric("advice_accepted_total") == before + 1
    unknown = command(server, "cache", "end", "s-2")
    assert (unknown.returncode, unknown.stdout) == (1, "s-2: refused: nothing of it is cached\n")


def test_a_session_comes_back_to_the_device_ahead_of_its_next_turn(server: Served) -> None:
    def grown(name: str, before: float) -> bool:
        deadline = time.monotonic() + 60
        while server.metric(name) <= before and time.monotonic() < deadline:
            time.sleep(0.05)
        return server.metric(name) > before

    prompt = "# away\n" + PROMPTS[3]
    answer = post(server, prompt, session_id="away")
    loaded, used = (server.metric(name) for name in ("advice_loaded_blocks_total", "advice_used_blocks_total"))
    for verb in ("cold", "prefetch"):
        told = command(server, "cache", verb, "away")
        assert told.stdout.startswith("away: accepted,"), told.stderr + told.stdout
    assert grown("advice_loaded_blocks_total", loaded)
    again = post(server, prompt + answer["choices"][0]["text"] + " and then", session_id="away")
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 100
    assert grown("advice_used_blocks_total", used)


def test_sessions_and_pins_are_lost_with_the_scheduler(server: Served) -> None:
    """The last test of this server: requests go on, and advice on a lost session is refused, not an error."""
    asked: Any = {"model": "pagewise-demo", "prompt": PROMPTS[1][:600], "temperature": 0}
    session = {"session_id": "lost", "ignore_eos": True}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=20) as client:
        before = client.completions.create(**asked, max_tokens=160, extra_body=session).choices[0].text
        assert command(server, "cache", "pin", "lost", "--ttl", "1h").returncode == 0
        stream = client.completions.create(**asked, max_tokens=160, stream=True, extra_body=session)
        texts = [next(stream).choices[0].text]
        killed = server.pids(SCHEDULER)
        os.kill(killed[0], signal.SIGKILL)
        texts += [chunk.choices[0].text for chunk in stream if chunk.choices]
        assert "".join(texts) == before
        while server.pids(SCHEDULER) in ([], killed):
            time.sleep(0.05)
        client.completions.create(**asked, max_tokens=1)  # it answers
        # Whether the stream has ended at the new scheduler, and so is a turn of the session, depends on its speed.
        for verb in ("unpin", "cold"):
            told = command(server, "cache", verb, "lost")
            assert told.stdout.startswith(("lost: accepted", "lost: clipped", "lost: refused: ")), told.stderr
        unknown = command(server, "cache", "pin", "never")
        assert (unknown.returncode, unknown.stdout) == (1, "never: refused: nothing of it is cached\n")
        client.completions.create(**asked, max_tokens=1, extra_body=session)
    pinned = command(server, "cache", "pin", "lost")
    assert (pinned.returncode, pinned.stdout[:14]) == (0, "lost: clipped,"), pinned.stderr + pinned.stdout
    blocks = re.search(r"([\d,]+) blocks", pinned.stdout)
    assert blocks is not None
    server.wait_for_metric("kv_blocks_pinned", int(blocks[1].replace(",", "")))
    server.wait_for_metric("num_requests_running", 0)
    assert server.metric("kv_blocks", tier="device", state="in_use") == server.metric("kv_blocks_pinned")
    assert command(server, "cache", "pin", "lost", "--ttl", "1s").returncode == 0
    server.wait_for_metric("kv_blocks_pinned", 0)  # without a request
