"""Stop strings that take long to prepare, of a request with very many outputs, beside another key's stream."""

from pathlib import Path

from tests.abuse.abuser import at_once, post
from tests.abuse.bystander import serving_two_keys, unharmed

COMPLETIONS = "/v1/completions"
MOST = {
    "prompt": [f"# prompt {number}\n" for number in range(32)],
    "n": 128,
    "max_tokens": 8,
    "ignore_eos": True,
    "stop": [chr(97 + number) * 1023 + "b" for number in range(16)],
}


def test_the_longest_stop_strings_of_the_most_outputs_hurt_nobody(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, "--simulate") as server, unharmed(server):
        for _ in range(2):
            status, answer = post(server.url, COMPLETIONS, MOST)
            assert status == 200, answer
            assert len(answer["choices"]) == 32 * 128


def test_refused_requests_with_them_cost_nothing(tmp_path: Path) -> None:
    with serving_two_keys(tmp_path, "--simulate", abuser="concurrent=1") as server, unharmed(server):
        answers = at_once(server.url, COMPLETIONS, MOST, 8)
        assert {status for status, _ in answers} == {200, 429}
        refused = next(answer for status, answer in answers if status == 429)
        assert "abuser" in refused["error"]["message"] or "concurrent" in refused["error"]["message"], refused
