"""Figures can be drawn again from results that were kept, without running the experiment."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "told"),
    [("orca", ["vLLM, in the paper", "Pagewise, here", "free, or lost"]), ("routing", ["ttft, fetching (default)"])],
)
def test_a_figure_is_drawn_from_its_results(name: str, told: list[str], tmp_path: Path) -> None:
    target = tmp_path / "figure.svg"
    results = ROOT / "benchmarks" / "results" / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}.run", "--redraw", str(results), "--plot", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    drawn = target.read_text()
    assert all(f"<!-- {text}" in drawn for text in told), "each text of an SVG of matplotlib is also a comment"
