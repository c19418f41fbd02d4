"""Targets that the workflows of CI call exist, and the files kept of a run are files that the tests write."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
JOBS: dict[str, Any] = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(job: str) -> str:
    return "\n".join(step.get("run", "") for step in JOBS[job]["steps"])


@pytest.mark.parametrize("job", JOBS)
def test_a_job_calls_targets_that_there_are_and_ends_in_time(job: str) -> None:
    called = set(re.findall(r"\bmake ([a-z][a-z-]*)$", commands(job), re.MULTILINE))
    assert called <= TARGETS
    assert called or ".ci/run" in commands(job)
    assert JOBS[job]["timeout-minutes"] <= 120


def test_every_suite_that_a_runner_can_run_has_a_job() -> None:
    all_commands = "\n".join(map(commands, JOBS))
    for suite in ("console", "documents", "packaging", "observability"):
        assert f"make test-{suite}" in all_commands
    assert re.search(r"^make lint types test$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_screenshots_are_kept_also_of_tests_that_fail() -> None:
    (kept,) = [step for step in JOBS["console"]["steps"] if "upload-artifact" in step.get("uses", "")]
    folder = re.search(r'"build" / "console-screenshots"', (ROOT / "tests/console/chromium.py").read_text())
    assert folder
    assert kept["with"]["path"] == "build/console-screenshots"
    assert kept["if"] == "always()"
