"""The index of requests by their names finds the request that looking at all of them would find."""

import time
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from pagewise_scheduler.server.ended_requests import RequestNames

NAMES = st.sampled_from(["", "a", "b", "c", "d"])
KEYS = st.sampled_from(["", "alice", "bob"])


class Request(NamedTuple):
    request_id: str
    client_request_id: str
    key: str
    arrived: float


ADDED = st.builds(Request, st.sampled_from("abcd"), NAMES, st.sampled_from(["alice", "bob"]), st.floats(0, 9))


@given(st.lists(st.one_of(ADDED, st.integers(0, 9)), max_size=20))
def test_the_newest_is_found_among_all(changes: list[Request | int]) -> None:
    """A number removes the one that was added so many before, which another one may have replaced."""
    index: RequestNames[Request] = RequestNames()
    added: list[Request] = []
    known: dict[str, Request] = {}
    for change in changes:
        if isinstance(change, Request):
            index.add(change, change.client_request_id, change.key, change.arrived)
            added.append(change)
            known[change.request_id] = change
        elif change < len(added):
            removed = added[-1 - change]
            index.remove(removed)
            if known.get(removed.request_id) is removed:
                del known[removed.request_id]
    for name in ("a", "b", "c", "d"):
        assert (name in index) == (name in known)
        for key in ("", "alice", "bob"):
            found = [
                one
                for one in known.values()
                if name in (one.request_id, one.client_request_id) and key in ("", one.key)
            ]
            newest = index.newest(name, key)
            assert (newest is None) == (not found)
            if newest is not None:
                own = [one for one in found if one.request_id == name]
                assert newest.arrived == max(one.arrived for one in own or found)


def test_a_lookup_does_not_take_longer_among_many() -> None:
    def seconds(count: int) -> float:
        index: RequestNames[Request] = RequestNames()
        for number in range(count):
            request = Request(f"r-{number}", "the same", f"key-{number % 3}", float(number))
            index.add(request, request.client_request_id, request.key, request.arrived)
        began = time.thread_time()
        for number in range(2000):
            assert index.newest(f"r-{number % count}", "") is not None
            assert index.newest("the same", "key-1") is not None
            assert index.newest("unknown", "") is None
        return time.thread_time() - began

    assert seconds(10_000) < 10 * seconds(10) + 0.05
