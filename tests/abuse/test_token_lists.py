"""Lists of tokens that were once sent with every sequence, beside another key's stream.

A real model: the executor makes masks and tables of them.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import at_once, post
from tests.abuse.bystander import Serve, unharmed

COMPLETIONS = "/v1/completions"
VOCABULARY = 4096


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("keys"), "--no-profile") as server:
        assert post(server, COMPLETIONS, body(1)).status == 200
        yield server


def body(prompts: int, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": [f"# prompt {number}\n" for number in range(prompts)],
        "max_tokens": 4,
        "ignore_eos": True,
        **fields,
    }


def test_a_list_longer_than_the_vocabulary_is_refused_and_hurts_nobody(server: Served) -> None:
    # 4 MB of body: it was found with 5, which are over the limit by now.
    abuse = body(120, allowed_token_ids=[904] * 1_000_000)
    with unharmed(server):
        for _ in range(3):
            answer = post(server, COMPLETIONS, abuse)
            assert answer.status == 400
            assert answer.body["error"]["param"] == "allowed_token_ids"
            assert "1000000 token ids are more than the vocabulary has, which is 4096" in answer.message


LEGAL: list[dict[str, Any]] = [
    {"allowed_token_ids": list(range(VOCABULARY))},
    {"logit_bias": {str(token): -1.5 for token in range(1024)}},
    {"bad_words": [f"word {number}" for number in range(128)]},
    {"stop_token_ids": list(range(2000, 2128)), "min_tokens": 4},
    {
        "allowed_token_ids": list(range(5, VOCABULARY)),
        "logit_bias": {str(token): 1.0 for token in range(1024)},
        "bad_words": ["a" * number for number in range(1, 101)],
    },
]


def test_the_longest_lists_that_are_legal_hurt_nobody(server: Served) -> None:
    for _ in range(2):  # the first steps of that size take memory that the executor keeps, lists or not: 57 MB
        at_once(server, COMPLETIONS, body(120, n=2), 2)
    with unharmed(server):
        for fields in LEGAL:
            answers = at_once(server, COMPLETIONS, body(120, n=2, **fields), 2)
            assert [answer.status for answer in answers] == [200, 200], answers
            assert all(len(answer.body["choices"]) == 240 for answer in answers)


def different(number: int) -> dict[str, Any]:
    """A request with lists near the longest that are legal, and different from all other requests' lists."""
    draw = random.Random(number)
    return body(
        1,
        allowed_token_ids=sorted(draw.sample(range(VOCABULARY), VOCABULARY - 100)),
        logit_bias={str(token): round(draw.uniform(-2, 2), 3) for token in draw.sample(range(VOCABULARY), 1024)},
        bad_words=[f"{draw.random()} {draw.random()}" for _ in range(128)],
        stop_token_ids=draw.sample(range(VOCABULARY), 128),
        min_tokens=4,
    )


@pytest.mark.long
def test_many_requests_with_different_lists_at_once_hurt_nobody(server: Served) -> None:
    """As many as run at a time: their lists are checked and tabulated in few steps."""
    with ThreadPoolExecutor(240) as clients:
        # The processes keep memory that they have needed once; the second time they may not grow.
        for begin, growth_mb in ((0, 200), (240, 50)):
            bodies = [different(number) for number in range(begin, begin + 240)]
            with unharmed(server, growth_mb=growth_mb):
                answers = list(clients.map(lambda each: post(server, COMPLETIONS, each), bodies))
            assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers][:3]
