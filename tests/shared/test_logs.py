"""Log lines."""

import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from pagewise_shared.logs import configure_logging


@pytest.fixture(autouse=True)
def _keep_the_handlers() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_a_line_tells_time_level_service_and_module(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "scheduler")
    logging.getLogger("some.module").info("it is %s", "up")
    logging.getLogger("some.module").debug("not this")
    logging.getLogger("httpx").info("nor this")
    said = capsys.readouterr().err
    when, rest = said.split(" ", 1)
    assert rest == "INFO    scheduler some.module: it is up\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d", when)
    assert abs(datetime.fromisoformat(when) - datetime.now(UTC)) < timedelta(seconds=10)


def test_errors_are_always_logged(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("error", "executor")
    logging.getLogger("a").warning("not this")
    logging.getLogger("httpx").error("but this")
    assert capsys.readouterr().err.endswith("ERROR   executor httpx: but this\n")
