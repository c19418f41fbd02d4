"""Servers that the tests of one module share."""

from collections.abc import Iterator

import pytest

from benchmarks.processes import Served
from tests.abuse.abuser import post
from tests.abuse.bystander import serving_two_keys

_FIRST = b'{"prompt": "fox"}'
"""What a process loads with its first request is not growth that a test has caused."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A simulated server on which the abuser may have two requests at a time."""
    with serving_two_keys(tmp_path_factory.mktemp("keys"), "--simulate", abuser="concurrent=2") as server:
        assert post(server, "/v1/completions", _FIRST).status == 200
        yield server


@pytest.fixture(scope="module")
def unlimited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A simulated server on which no key has a limit."""
    with serving_two_keys(tmp_path_factory.mktemp("keys"), "--simulate") as server:
        assert post(server, "/v1/completions", _FIRST).status == 200
        yield server
