"""Servers for clients and agents."""

from collections.abc import Iterator

import pytest

from tests.agents.scripted_server import Scripted, scripted_server


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    """A running server with a scripted model; requests leave nothing behind in it."""
    with scripted_server(tmp_path_factory.mktemp("agents")) as running:
        yield running
