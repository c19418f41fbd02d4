"""How far work is, as lines of a log."""

import logging

import pytest
from pagewise_shared import progress
from pagewise_shared.progress import logged_bar, logged_progress, progress_line

LOG = logging.getLogger("test")


def test_there_is_a_line_every_few_seconds(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    done = logged_progress(LOG, "replay", 100, "requests")
    for number in range(100):
        now[0] = number * 0.2
        done.update()
    assert caplog.messages == [
        "replay: 26 of 100 requests (26%), 14 s left",
        "replay: 51 of 100 requests (51%), 10 s left",
        "replay: 76 of 100 requests (76%), 5 s left",
    ]


def test_work_that_ends_soon_is_not_mentioned(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    done = logged_progress(LOG, "replay", 3, "requests")
    for _ in range(3):
        done.update()
    assert (caplog.messages, capfd.readouterr()) == ([], ("", ""))


def test_bytes_are_told_in_gib() -> None:
    assert progress_line("loading", 2**30, 4 * 2**30, "B", 2.0) == "loading: 1.00 of 4.00 GiB (25%), 6 s left"
    assert progress_line("loading", 0, 0, "B", 0.0) == "loading: 0.00 of 0.00 GiB"


def test_a_librarys_bars_become_lines_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    kind = logged_bar(LOG, "downloading a/b")
    with kind(total=2**31, unit="B", desc="x", mininterval=0) as bar:
        bar.update(2**30)
    with kind(total=3, desc="files", mininterval=0) as bar:
        bar.update(1)
    assert any(line.startswith("downloading a/b: 1.00 of 2.00 GiB (50%)") for line in caplog.messages)
    with logged_bar(LOG, "loading a/b", counts="it", unit="weights")(range(3), mininterval=0) as bar:
        assert list(bar) == [0, 1, 2]
    assert "loading a/b: 3 of 3 weights (100%)" in caplog.messages
    assert not [line for line in caplog.messages if "files" in line]
    assert capfd.readouterr() == ("", "")
