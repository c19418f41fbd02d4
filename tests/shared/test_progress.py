"""How far work is, on a terminal and elsewhere."""

import io
import logging
import os
import pty

import pytest
from pagewise_shared import progress
from pagewise_shared.progress import Progress, draws_bars, followed, logged_bar, progress_line


def test_without_a_terminal_there_is_a_line_every_few_seconds() -> None:
    now, lines = [0.0], list[str]()
    with Progress("replay", 100, "requests", tell=lines.append, clock=lambda: now[0]) as done:
        for number in range(100):
            now[0] = number * 0.2
            done.update()
    assert lines == [
        "replay: 26 of 100 requests (26%), 14 s left",
        "replay: 51 of 100 requests (51%), 10 s left",
        "replay: 76 of 100 requests (76%), 5 s left",
    ]


def test_what_is_over_soon_is_not_mentioned(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("replay", 3, "requests") as done:
        for _ in range(3):
            done.update()
    assert capsys.readouterr() == ("", "")


def test_items_are_followed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    assert list(followed(iter("ab"), 2, "measuring", "rounds")) == ["a", "b"]
    out, err = capsys.readouterr()
    assert out == "", "standard output is for results"
    assert [line.partition(",")[0] for line in err.splitlines()] == [
        "measuring: 1 of 2 rounds (50%)",
        "measuring: 2 of 2 rounds (100%)",
    ]


def test_bytes_are_told_in_gib() -> None:
    assert progress_line("loading", 2**30, 4 * 2**30, "B", 2.0) == "loading: 1.00 of 4.00 GiB (25%), 6 s left"
    assert progress_line("loading", 0, 0, "B", 0.0) == "loading: 0.00 of 0.00 GiB"


def test_bars_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not draws_bars(io.StringIO())
    parent, child = pty.openpty()
    with os.fdopen(child, "w") as terminal, os.fdopen(parent):
        monkeypatch.setenv("TERM", "xterm")
        assert draws_bars(terminal)
        monkeypatch.setenv("TERM", "dumb")
        assert not draws_bars(terminal)


def test_a_librarys_bars_become_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    kind = logged_bar(logging.getLogger("test"), "downloading a/b")
    with kind(total=2**31, unit="B", desc="x", mininterval=0) as bar:
        bar.update(2**30)
    with kind(total=3, desc="files", mininterval=0) as bar:
        bar.update(1)
    assert any(line.startswith("downloading a/b: 1.00 of 2.00 GiB (50%)") for line in caplog.messages)
    with logged_bar(logging.getLogger("test"), "loading a/b", counts="it", unit="weights")(
        range(3), mininterval=0
    ) as bar:
        assert list(bar) == [0, 1, 2]
    assert "loading a/b: 3 of 3 weights (100%)" in caplog.messages
    assert not [line for line in caplog.messages if "files" in line]
    assert capfd.readouterr() == ("", "")
