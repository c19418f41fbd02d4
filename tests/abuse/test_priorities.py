"""A key that asks for priorities of its own: it cannot get before others unless its line in the key file allows
that."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from benchmarks.processes import Served
from tests.abuse.bystander import ABUSER, BYSTANDER, Serve, serving_two_keys, unharmed
from tests.free_cores import FreeCores

URGENT = -1_000_000
# Eight of the crowd's requests run at a time, for a second each.
OPTIONS = ("--simulate", "--simulate-step=0.01", "--max-num-seqs=8", "--num-blocks=4096")


class Key:
    """Completions with one key, of one client or of many at once."""

    def __init__(self, url: str, key: str) -> None:
        headers, limits = {"Authorization": f"Bearer {key}"}, httpx.Limits(max_connections=128)
        self._http = httpx.Client(base_url=url, headers=headers, limits=limits, timeout=120)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"prompt": [1 + number % 200 for number in range(64)], "max_tokens": 100, "ignore_eos": True} | fields
        return self._http.post("/v1/completions", json=body)

    def close(self) -> None:
        self._http.close()


@contextlib.contextmanager
def keys_of(server: Served) -> Iterator[tuple[Key, Key]]:
    """The abuser's and the bystander's."""
    with (
        contextlib.closing(Key(server.url, ABUSER)) as abuser,
        contextlib.closing(Key(server.url, BYSTANDER)) as bystander,
    ):
        yield abuser, bystander


def refusals(abuser: Key) -> list[httpx.Response]:
    """The answers to 64 clients that ask for an urgent priority at once, three times each."""
    with ThreadPoolExecutor(64) as clients:
        return list(clients.map(lambda _: abuser.complete(priority=URGENT), range(3 * 64)))


def beside_crowd(abuser: Key, bystander: Key, priorities: Sequence[int]) -> tuple[float, set[int]]:
    """The longest of some first tokens beside 64 clients with one request after the other, and their statuses.

    The clients have these priorities in turn. The seconds are for a machine without other work.
    """
    stop = threading.Event()

    def client(number: int) -> int:
        priority = priorities[number % len(priorities)]
        while (status := abuser.complete(priority=priority).status_code) == 200 and not stop.is_set():
            pass
        return status

    with ThreadPoolExecutor(64) as clients:
        crowd = clients.map(client, range(64))
        try:
            time.sleep(1.0)
            cores = FreeCores()
            longest = max(bystander.complete(max_tokens=1).elapsed.total_seconds() for _ in range(3))
            longest *= cores.share()
        finally:
            stop.set()
        return longest, set(crowd)


def test_nobody_gets_before_other_keys_by_a_priority(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, *OPTIONS) as server, keys_of(server) as (abuser, bystander):
        with unharmed(server):
            refused = refusals(abuser)
        for answer in refused:
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == "priority"
            assert "the lowest that the API key 'abuser' may ask for is 0" in answer.json()["error"]["message"]
        longest, statuses = beside_crowd(abuser, bystander, (0, 1000))
        assert statuses == {200}, "later is always allowed"
        assert bystander.complete(priority=-1).status_code == 400
        # The bystander waits for the next place, however many wait. With priorities that get before it, it would wait
        # until the crowd ends.
        assert longest < 5.0, f"{longest:.2f} s for a first token beside 64 requests of another key"


def test_a_grant_is_a_bound_too(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, *OPTIONS, abuser="priority=-10") as server, keys_of(server) as (abuser, _):
        assert abuser.complete(max_tokens=1, priority=-10).status_code == 200
        answer = abuser.complete(max_tokens=1, priority=-11)
        assert answer.status_code == 400
        assert "may ask for is -10" in answer.json()["error"]["message"]
