"""Log lines."""

import json
import logging
import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from pagewise_shared.logs import about, configure_logging, relayed


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


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_a_line_of_json_tells_the_same_and_what_it_is_about(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "gateway", "json")
    log = logging.getLogger("some.module")
    log.info("it is %s\nand\u2028running", "up")
    log.warning("request %s failed", "r1", extra=about("r1", f"00-{'ab' * 16}-{'cd' * 8}-01", status=500))
    log.info("request %s", "id=r2", extra=about("r2", message="request ended", queue=None))
    first, second, third = json_lines(capsys)
    when = datetime.fromisoformat(str(first.pop("time")))
    assert abs(when - datetime.now(UTC)) < timedelta(seconds=10)
    assert first == {
        "level": "info", "service": "gateway", "logger": "some.module", "message": "it is up\nand\u2028running",
    }  # fmt: skip
    assert second["message"] == "request r1 failed"
    assert (second["request_id"], second["trace_id"], second["span_id"]) == ("r1", "ab" * 16, "cd" * 8)
    assert (second["status"], second["level"]) == (500, "warning")
    assert (third["message"], third["request_id"], third["queue"]) == ("request ended", "r2", None)
    assert "trace_id" not in third


def test_what_was_raised_is_a_field_of_the_same_line(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "gateway", "json")
    try:
        raise ValueError("no such thing")
    except ValueError:
        logging.getLogger("a").exception("it failed")
    (line,) = json_lines(capsys)
    assert line["message"] == "it failed"
    assert str(line["exception"]).endswith("ValueError: no such thing")


def test_lines_of_other_processes_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "serve")
    assert relayed("executor-0", "it is up") == "executor-0 | it is up"
    configure_logging("info", "serve", "json")
    assert json.loads(relayed("executor-0", '{"message": "it is up", "level": "error"}')) == {
        "process": "executor-0", "message": "it is up", "level": "error",
    }  # fmt: skip
    for text in ("Segmentation fault", "[1, 2]", "17"):
        told = json.loads(relayed("executor-0", text))
        assert (told["process"], told["message"]) == ("executor-0", text)
