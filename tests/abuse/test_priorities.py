"""A key that asks for priorities of its own: it cannot get before others unless its line in the key file says so."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.abuse.bystander import ABUSER, BYSTANDER, serving_two_keys, unharmed

URGENT = -1_000_000
# Each request takes a whole step's tokens of prompt, so that a queue of them is long.
OPTIONS = ("--simulate", "--simulate-step=0.02", "--max-num-seqs=8", "--num-blocks=4096")


def completion(url: str, key: str, **fields: Any) -> httpx.Response:
    body = {"prompt": [1 + number % 200 for number in range(64)], "max_tokens": 100, "ignore_eos": True} | fields
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    return httpx.post(f"{url}/v1/completions", content=json.dumps(body), headers=headers, timeout=120)


def first_token_seconds(url: str, key: str) -> float:
    """How long a completion of one token takes."""
    return completion(url, key, max_tokens=1).elapsed.total_seconds()


def crowd(url: str, stop: threading.Event, priority: int) -> list[httpx.Response]:
    """64 clients with the abuser's key, one request after the other until ``stop``; their last answers."""

    def client(_: int) -> httpx.Response:
        answer = completion(url, ABUSER, priority=priority)
        while not stop.is_set():
            answer = completion(url, ABUSER, priority=priority)
        return answer

    with ThreadPoolExecutor(64) as clients:
        return list(clients.map(client, range(64)))


def beside_crowd(url: str, priority: int) -> tuple[float, list[httpx.Response]]:
    """The longest of some first tokens of the bystander beside the crowd, and the crowd's last answers."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as one:
        abuse = one.submit(crowd, url, stop, priority)
        try:
            threading.Event().wait(1.0)
            longest = max(first_token_seconds(url, BYSTANDER) for _ in range(3))
        finally:
            stop.set()
        return longest, abuse.result()


def test_nobody_gets_before_other_keys_by_a_priority(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, *OPTIONS) as server:
        with unharmed(server):
            refused = [completion(server.url, ABUSER, priority=URGENT) for _ in range(64)]
        for answer in refused:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "priority"
            assert "the lowest that the API key 'abuser' may ask for is 0" in answer.json()["error"]["message"]
        fair, answers = beside_crowd(server.url, 0)
        assert {answer.status_code for answer in answers} == {200}
        late, answers = beside_crowd(server.url, 1000)
        assert {answer.status_code for answer in answers} == {200}, "later is always allowed"
        assert completion(server.url, BYSTANDER, priority=-1).status_code == 400
        # A request of 100 tokens takes 2 s here: without turns between keys it would be eight of them, one after the
        # other. The bystander waits for one place at most, however many wait.
        assert fair < 5.0, f"{fair:.2f} s for a first token beside 64 requests of another key"
        assert late < 5.0


def test_a_grant_is_a_bound_too(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, *OPTIONS, abuser="priority=-10") as server:
        assert completion(server.url, ABUSER, max_tokens=1, priority=-10).status_code == 200
        answer = completion(server.url, ABUSER, max_tokens=1, priority=-11)
        assert answer.status_code == 400
        assert "may ask for is -10" in answer.json()["error"]["message"]
