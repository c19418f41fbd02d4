"""The facts that one API key can learn of another: no prompts from the cache, no requests from /debug."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.processes import Served, serving
from tests.abuse.abuser import proxied
from tests.abuse.bystander import ABUSER, BYSTANDER, Serve, unharmed

PROMPT = [1 + number % 200 for number in range(100)]
KEYS = """
abuser: sk-abuser
bystander: sk-bystander
a-1: sk-a-1 share=a
a-2: sk-a-2 share=a
b: sk-b share=b
b: sk-b-next
key: sk-key
ops: sk-ops operator=yes
"""


def keys_of(folder: Path) -> Path:
    path = folder / "api-keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    keys = keys_of(tmp_path_factory.mktemp("isolation"))
    # Two gateways and two executors: the separation of keys must be the same everywhere.
    options = ("--simulate", "--gateways=2", "--executors=2", "--simulate-step=0.001", "--num-blocks=512")
    with serving(f"--api-keys-file={keys}", *options) as running:
        yield running


def complete(server: Served, key: str, request_id: str = "", **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 1, "ignore_eos": True} | fields
    headers = {"Authorization": f"Bearer {key}"} | ({"X-Request-Id": request_id} if request_id else {})
    answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def cached(server: Served, key: str, prompt: list[int], salt: str | None = None) -> int:
    """The number of cached tokens of a prompt in the usage report for a key."""
    answer = complete(server, key, prompt=prompt, cache_salt=salt)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def get(server: Served, key: str, path: str) -> httpx.Response:
    return httpx.get(server.url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60)


_firsts = count(201)


def new_prompt() -> list[int]:
    """A prompt that begins like no other."""
    return [next(_firsts), *PROMPT]


GUESSES = (
    None,
    "bystander",
    "key:bystander",
    "key:bystander/",
    "key:bystander/mine",
    "/key:bystander",
    "../key:bystander",
    "group:a",
    "group:a/mine",
    "all",
    "all/mine",
    "mine",
    "\0",
    "key:bystander\0",
    "None",
    "x" * 256,
)


@pytest.mark.parametrize("victim", ["sk-bystander", "sk-a-1"])
@pytest.mark.parametrize("salt", [None, "mine"])
def test_no_choice_of_a_salt_tells_of_another_key_s_prompt(server: Served, victim: str, salt: str | None) -> None:
    prompt = new_prompt()
    assert cached(server, victim, prompt, salt) == 0
    assert cached(server, victim, prompt, salt) > 64, "its own key is told"
    for guess in GUESSES:
        for stranger in ("sk-abuser", "sk-b", "sk-key"):
            assert cached(server, stranger, prompt, guess) == 0, (stranger, guess)


def test_the_keys_of_a_name_and_of_a_group_share(server: Served) -> None:
    for one, other in (("sk-a-1", "sk-a-2"), ("sk-b", "sk-b-next")):
        prompt = new_prompt()
        assert cached(server, one, prompt) == 0
        assert cached(server, other, prompt) > 64
        assert cached(server, other, prompt, "mine") == 0
        assert cached(server, one, prompt, "mine") > 64, "a salt separates within the group, for all of the group alike"
    assert cached(server, "sk-a-1", prompt) == 0


def test_share_cache_lets_all_keys_share(tmp_path: Path) -> None:
    with serving(f"--api-keys-file={keys_of(tmp_path)}", "--simulate", "--share-cache") as shared:
        assert cached(shared, "sk-abuser", PROMPT) == 0
        for key in ("sk-bystander", "sk-a-1", "sk-b"):
            assert cached(shared, key, PROMPT) > 64
        assert cached(shared, "sk-b", PROMPT, "mine") == 0
        assert cached(shared, "sk-abuser", PROMPT, "mine") > 64


def test_debug_shows_one_s_own_requests_only(server: Served) -> None:
    ours = complete(server, BYSTANDER, "payroll-7", max_tokens=4)["id"]
    theirs = complete(server, ABUSER, "payroll-7", max_tokens=4)["id"]
    unknown = get(server, ABUSER, "/debug/requests/cmpl-0123456789abcdef0123456789abcdef")
    assert unknown.status_code == 404
    stranger = get(server, ABUSER, f"/debug/requests/{ours}")
    assert stranger.status_code == 404
    assert stranger.json()["error"]["message"] == f"no request {ours} is known"
    assert stranger.json()["error"] | {"message": ""} == unknown.json()["error"] | {"message": ""}
    for key, name in ((BYSTANDER, ours), (ABUSER, theirs)):
        for path in (name, "payroll-7"):
            seen = get(server, key, f"/debug/requests/{path}").json()
            assert f"cmpl-{seen['request_id']}" == name
    seen = get(server, "sk-ops", f"/debug/requests/{ours}").json()
    assert (seen["key"], seen["client_request_id"]) == ("bystander", "payroll-7")


def test_hashes_totals_and_metrics_are_for_operators(server: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
    headers = {"Authorization": f"Bearer {BYSTANDER}"}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=60) as stream:
        lines = stream.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        mine = get(server, BYSTANDER, f"/debug/requests/{name}")
        whole = get(server, "sk-ops", f"/debug/requests/{name}")
        memory = get(server, "sk-ops", "/debug/memory")
    blocks = [block for sequence in mine.json()["sequences"] for block in sequence.get("blocks", [])]
    assert any(block.get("cached") for block in blocks)
    assert "hash" not in mine.text
    assert '"hash":"' in whole.text
    assert "bystander" in memory.text
    for path in ("/debug/memory", "/debug/cache", "/metrics"):
        refused = get(server, BYSTANDER, path)
        assert refused.status_code == 403
        assert "operator=yes" in refused.json()["error"]["message"]
        assert "bystander" in refused.text
        assert "abuser" not in refused.text
    assert 'key="bystander"' in get(server, "sk-ops", "/metrics").text


def test_commands_say_which_key_they_need(server: Served) -> None:
    name = complete(server, BYSTANDER, "once", max_tokens=4)["id"]
    for key, command, good in (
        (BYSTANDER, ["vmstat", "0.1", "1"], False),
        ("sk-ops", ["vmstat", "0.1", "1"], True),
        (BYSTANDER, ["cache", "list"], False),
        (BYSTANDER, ["cache", "drop", "--all"], False),
        ("sk-ops", ["cache", "list", "--key", "bystander"], True),
        (BYSTANDER, ["pmap", "once"], True),
        ("sk-ops", ["pmap", name], True),
        (ABUSER, ["pmap", name], False),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pagewise.main", *command, "--url", server.url],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            env={"PAGEWISE_API_KEY": key, "PATH": "", "PYTHONPATH": ":".join(sys.path)},
        )
        assert (done.returncode == 0) == good, done.stderr
        if not good:
            assert ("operator=yes" in done.stderr) == (command[0] != "pmap")


def test_asking_for_reports_all_the_time_hurts_nobody(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, "--simulate", "--simulate-step=0.01") as server:
        body = {"prompt": PROMPT * 4, "max_tokens": 3000, "ignore_eos": True, "stream": True, "n": 16}
        headers = {"Authorization": f"Bearer {ABUSER}", "X-Request-Id": "long"}

        def ask(_: int) -> set[int]:
            with httpx.Client(headers=headers, timeout=60) as client:
                url = f"{server.url}/debug/requests/long?limit=1000"
                return {client.get(url).status_code for _ in range(100)}

        with (
            unharmed(server),
            httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=headers) as stream,
        ):
            chunks = stream.iter_raw()
            next(chunks)
            with ThreadPoolExecutor(16) as clients:
                statuses = set[int]().union(*clients.map(ask, range(16)))
        assert statuses - ({429} if proxied(server) else set()) == {200}
