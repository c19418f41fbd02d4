"""What prompts of one ``prompt_cache_key`` have in common."""

from itertools import chain

import pytest
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_scheduler.server import shared_beginnings
from pagewise_scheduler.server.shared_beginnings import SharedBeginnings
from pagewise_shared.protocol import RequestParams, ReuseHints
from pagewise_shared.sampling import SamplingParams

from tests.core_requests import make_request
from tests.scheduler.core.arenas import create
from tests.scheduler.core.driving import executor_for, run

GREEDY = SamplingParams(temperature=0)
SHARED = [*range(203)]


def asked(number: int, *, key: str = "shop", client: str = "", salt: str | None = None) -> Request:
    """A request whose prompt has a message of its own behind the shared beginning."""
    request = make_request(f"r{number}", SHARED + [1000 * number + index for index in range(100)], 3, GREEDY)
    request.params = RequestParams(GREEDY, key=client, cache_salt=salt, reuse=ReuseHints(cache_key=key))
    return request


def places(beginnings: SharedBeginnings, *requests: Request) -> list[int]:
    beginnings.declare(requests)
    return [*chain.from_iterable(request.places for request in requests)]


@pytest.mark.parametrize(("declared", "hits"), [(True, [0, 200]), (False, [0, 0])])
def test_an_executor_that_has_none_of_the_prompts_keeps_states_where_they_part(declared: bool, hits: list[int]) -> None:
    beginnings, found = SharedBeginnings(), list[int]()
    if declared:
        assert places(beginnings, asked(1)) == []
    scheduler = create(2000, 1, (WindowShape(2, 7, state=True),))
    executor = executor_for(scheduler)
    for number in (2, 3):
        request = asked(number)
        if declared:
            assert places(beginnings, request) == [203]
        scheduler.add(request)
        run(scheduler, executor)
        found.append(request.num_cached_tokens)
    assert found == hits


def test_prompts_of_other_keys_clients_and_salts_have_nothing_in_common() -> None:
    beginnings = SharedBeginnings()
    others = asked(2, key="another"), asked(3, client="another"), asked(4, salt="another")
    assert places(beginnings, asked(1), *others) == []
    assert places(beginnings, asked(5), *others) == [203, *(len(SHARED) + 100,) * 3]


def test_the_keys_that_were_not_used_for_the_longest_time_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_beginnings, "_MOST_TOKENS", 2 * (303 + 256))
    beginnings = SharedBeginnings()
    beginnings.declare([asked(1, key="a"), asked(2, key="b"), asked(3, key="a"), asked(4, key="c")])
    assert places(beginnings, asked(5, key="b")) == []
    assert places(beginnings, asked(6, key="c")) == [203]
