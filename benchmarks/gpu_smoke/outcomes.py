"""A plugin of pytest that writes the outcome of each test to a record, as soon as it is known.

python -m pytest -p benchmarks.gpu_smoke.outcomes --outcomes FILE ...
"""

from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from benchmarks.record import record_file, shown, write_record

_MOST_CHARACTERS = 500


@dataclass
class Row:
    """``outcome``: passed, failed, skipped, or error (it could not be collected). ``why``: for all but the first."""

    test: str
    outcome: str
    seconds: float
    why: str = ""


class Outcomes:
    """Collects rows in the process that was started; workers of pytest-xdist report to it."""

    def __init__(self, path: str, command: str) -> None:
        self._path, self._command = path, command
        self._rows: dict[str, Row] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was collected, or not."""
        if report.failed:
            self._add(Row(report.nodeid, "error", 0.0, _why(report)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test was set up, has run, or was cleaned up after."""
        before = self._rows.get(report.nodeid)
        seconds = report.duration + (before.seconds if before is not None else 0.0)
        if report.passed and before is not None:
            before.seconds = seconds
        elif report.when == "call" or not report.passed:
            self._add(Row(report.nodeid, report.outcome, seconds, "" if report.passed else _why(report)))

    def _add(self, row: Row) -> None:
        import torch

        self._rows[row.test] = row
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        numbers = {"rows": [asdict(each) for each in self._rows.values()]}
        write_record(self._path, numbers, command=self._command, device=name, torch=torch.__version__)


def _why(report: pytest.CollectReport | pytest.TestReport) -> str:
    """The message, without the folders of this machine that a traceback names."""
    found = report.longrepr
    if isinstance(found, tuple):  # a test that was skipped: file, line, reason
        return str(found[2])[:_MOST_CHARACTERS]
    crash = getattr(found, "reprcrash", None)
    text = crash.message if crash is not None else str(found)
    return str(text).replace(str(Path.cwd()), ".")[:_MOST_CHARACTERS]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.addoption("--outcomes", type=record_file, help="file to write the outcome of each test to")


def pytest_configure(config: pytest.Config) -> None:
    """Collect in the process that was started alone."""
    path = config.getoption("--outcomes")
    if path and not hasattr(config, "workerinput"):
        command = " ".join(["python -m pytest", *map(shown, map(str, config.invocation_params.args))])
        config.pluginmanager.register(Outcomes(path, command))
