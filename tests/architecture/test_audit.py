"""``make lint`` fails for a known vulnerability, and reports a look-up that failed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / ".ci" / "audit.py"
CLEAN = {"name": "a", "version": "1", "vulns": []}
BROKEN = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"], "aliases": []}]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found"}


def audit(answer: str, error: str = "", *options: str) -> tuple[int, str]:
    """Exit code and output beside a pip-audit with this output."""
    fake = f"import sys; print({answer!r}); print({error!r}, file=sys.stderr); sys.exit(1)"
    done = subprocess.run(
        [sys.executable, AUDIT, *options, sys.executable, "-c", fake], capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("packages", "code", "said"),
    [
        ([CLEAN], 0, "1 of 1 packages audited, 0 vulnerabilities"),
        ([CLEAN, BROKEN], 1, "b 2 has CVE-1; fixed in: 3"),
        ([CLEAN, SKIPPED], 0, "1 WERE NOT AUDITED"),
        ([SKIPPED, BROKEN], 1, "b 2 has CVE-1"),
    ],
)
def test_vulnerabilities_fail_and_gaps_are_said(packages: list[dict[str, object]], code: int, said: str) -> None:
    found, output = audit(json.dumps({"dependencies": packages, "fixes": []}))
    assert found == code
    assert said in output


def test_no_network_is_said_and_anything_else_fails() -> None:
    code, output = audit("", "Traceback ...\nrequests.exceptions.ConnectionError: no such host")
    assert code == 0
    assert "NOTHING WAS AUDITED" in output
    code, output = audit("", "pip-audit: error: unrecognized arguments")
    assert code == 1
    assert "unrecognized arguments" in output


def test_what_could_not_be_looked_up_fails_where_it_must_be() -> None:
    code, output = audit("", "requests.exceptions.ConnectionError: no such host", "--strict")
    assert code == 1
    assert "NOTHING WAS AUDITED" in output
    assert audit(json.dumps({"dependencies": [CLEAN, SKIPPED], "fixes": []}), "", "--strict")[0] == 1
    assert audit(json.dumps({"dependencies": [CLEAN], "fixes": []}), "", "--strict")[0] == 0
