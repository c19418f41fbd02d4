"""Servers that the tests of one module share, each reached directly, and, in long tests, through nginx."""

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import post
from tests.abuse.bystander import Serve, serving_two_keys
from tests.proxy import needs_nginx

_FIRST = b'{"prompt": "fox"}'
"""A process loads modules with its first request, which is not growth that a test has caused."""
_EDGES = [
    pytest.param(False, id="gateway"),
    pytest.param(True, id="nginx", marks=[needs_nginx, pytest.mark.long]),
]


@pytest.fixture(scope="module", params=_EDGES)
def serve(request: pytest.FixtureRequest) -> Serve:
    return partial(serving_two_keys, proxy=request.param)


@pytest.fixture(scope="module")
def server(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A simulated server on which the abuser may have two requests at a time."""
    with serve(tmp_path_factory.mktemp("keys"), "--simulate", abuser="concurrent=2") as server:
        assert post(server, "/v1/completions", _FIRST).status == 200
        yield server


@pytest.fixture(scope="module")
def unlimited(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A simulated server on which no key has a limit."""
    with serve(tmp_path_factory.mktemp("keys"), "--simulate") as server:
        assert post(server, "/v1/completions", _FIRST).status == 200
        yield server
