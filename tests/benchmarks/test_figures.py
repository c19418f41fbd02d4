"""Figures can be drawn again from results that were kept, without running the experiment, and can be read."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from tests.figures import overlapping, saved_figures

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


RESULTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "orca": ("orca", ("rows",)),
    "routing": ("routing", ("rows",)),
    "eviction": ("eviction", ("rows", "unlimited")),
    "kv_mapping": ("kv-mapping", ("granularity", "attention")),
    "recovery": ("recovery-cpu", ("rows",)),
}
"""The experiments that draw figures: the name of their results, and the drawn values."""


@pytest.mark.parametrize("name", RESULTS)
def test_no_text_of_a_figure_covers_another(name: str, tmp_path: Path) -> None:
    file, parts = RESULTS[name]
    kept = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())
    draw: Any = importlib.import_module(f"benchmarks.{name}.run").plot
    with saved_figures() as figures:
        draw(*(kept[part] for part in parts), str(tmp_path / "figure.svg"))
    (figure,) = figures
    assert overlapping(figure) == []


def test_texts_over_each_other_and_over_the_edge_are_found() -> None:
    figure = Figure(figsize=(4, 3))
    figure.text(0.5, 0.5, "one of two")
    figure.text(0.52, 0.5, "the other")
    figure.text(0.1, 0.1, "alone")
    figure.text(0.9, 0.9, "it goes on too long")
    assert sorted(overlapping(figure)) == [("it goes on too long", ""), ("one of two", "the other")]
