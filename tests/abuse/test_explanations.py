"""Very many questions about requests, which the one scheduler answers: they count against the limits of their key."""

import http.client
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import charged, post
from tests.abuse.bystander import ABUSER, Serve, unharmed

BODY = {"prompt": "fox", "max_tokens": 4}


def asked(server: Served, path: str, count: int) -> list[int]:
    """The statuses of so many answers on one connection."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    statuses = []
    try:
        for _ in range(count):
            connection.request("GET", path, headers={"Authorization": f"Bearer {ABUSER}"})
            answer = connection.getresponse()
            json.loads(answer.read())
            statuses.append(answer.status)
    finally:
        connection.close()
    return statuses


@pytest.mark.parametrize("kind", ["explain", "requests"])
def test_questions_about_requests_count_against_the_limits_of_their_key(
    serve: Serve, tmp_path: Path, kind: str
) -> None:
    with serve(tmp_path, "--simulate", abuser="requests-per-minute=20") as server, unharmed(server):
        named = post(server, "/v1/completions", BODY)
        assert named.status == 200, named.body
        before = charged(server)
        statuses = asked(server, f"/debug/{kind}/{named.body['id']}", 200)
        assert statuses[0] == 200
        # The limit is refilled while they are asked: one in three seconds.
        assert 10 <= statuses.count(200) <= 40
        assert set(statuses) == {200, 429}
        assert charged(server) - before == statuses.count(200)
        assert asked(server, f"/debug/{kind}/unknown", 3) == [429] * 3, "unknown ones are no cheaper"
