"""Stop strings that take long to prepare, of a request with very many outputs, beside another key's stream."""

from pathlib import Path

from tests.abuse.abuser import at_once, post
from tests.abuse.bystander import Serve, unharmed

COMPLETIONS = "/v1/completions"
MOST = {
    "prompt": [f"# prompt {number}\n" for number in range(32)],
    "n": 128,
    "max_tokens": 8,
    "ignore_eos": True,
    "stop": [chr(97 + number) * 1023 + "b" for number in range(16)],
}
ROOM = "--max-waiting=8192"
"""For such a request, also while one of the bystander waits."""


def test_the_longest_stop_strings_of_the_most_outputs_hurt_nobody(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, "--simulate", ROOM) as server, unharmed(server):
        for _ in range(2):
            answer = post(server, COMPLETIONS, MOST)
            assert answer.status == 200, answer.body
            assert len(answer.body["choices"]) == 32 * 128


def test_refused_requests_with_them_cost_nothing(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, "--simulate", ROOM, abuser="concurrent=1") as server, unharmed(server):
        answers = at_once(server, COMPLETIONS, MOST, 8)
        assert {answer.status for answer in answers} == {200, 429}, {answer.message for answer in answers}
        refused = next(answer.message for answer in answers if answer.status == 429)
        assert "abuser" in refused or "concurrent" in refused, refused
