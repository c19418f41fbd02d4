"""The dashboard against the types that Grafana publishes: npm's ``@grafana/schema``."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.dashboard import DASHBOARD

PACKAGES = ("@grafana/schema@10.4.19", "typescript@5.9.3")
"""The oldest Grafana that deploy/observability/README.md names: later ones convert its dashboards."""

TYPES = Path(__file__).with_name("dashboard.ts")
pytestmark = [
    pytest.mark.observability,
    pytest.mark.skipif(shutil.which("npm") is None, reason="npm is missing: apt install npm"),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with TypeScript and the types."""
    folder = tmp_path_factory.mktemp("types")
    npm = ["npm", "install", "--prefix", folder, "--ignore-scripts", "--no-audit", "--no-fund", *PACKAGES]
    subprocess.run(npm, check=True, capture_output=True, timeout=300)
    return folder


def errors(project: Path, dashboard: dict[str, Any]) -> list[str]:
    """TypeScript's errors for a dashboard."""
    top = {key: value for key, value in dashboard.items() if key != "panels"}
    lines = [TYPES.read_text(), f"export const top: Top = {json.dumps(top)};"]
    for number, panel in enumerate(dashboard["panels"]):
        lines.append(f"export const panel{number}: PanelTypes[{json.dumps(panel['type'])}] = {json.dumps(panel)};")
    (project / "dashboard.ts").write_text("\n".join(lines))
    options = ["--noEmit", "--strict", "--skipLibCheck", "--moduleResolution", "node", "dashboard.ts"]
    command = ["node", "node_modules/typescript/bin/tsc", *options]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=300)
    found = [line for line in done.stdout.splitlines() if "error TS" in line]
    assert bool(found) == (done.returncode != 0), done.stdout + done.stderr
    return found


def test_the_dashboard_is_one_to_grafana(project: Path) -> None:
    assert errors(project, DASHBOARD) == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ('"showPoints": "never"', '"showPoints": "nevr"'),
        ('"calcs": [', '"calc": ['),
        ('"legendFormat": "p50"', '"legend": "p50"'),
        ('"mode": "absolute"', '"mode": "abs"'),
        ('"refresh": 2', '"refresh": "on time"'),
    ],
)
def test_what_grafana_does_not_know_is_found(project: Path, right: str, wrong: str) -> None:
    text = json.dumps(DASHBOARD)
    assert right in text
    assert errors(project, json.loads(text.replace(right, wrong))) != []
