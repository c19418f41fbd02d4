"""Benchmarks run here with tiny shapes: GPU benchmarks run where there is a GPU, and the others keep working."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def smoke(module: str, folder: Path) -> dict[str, Any]:
    """Run ``benchmarks.<module>`` with tiny shapes; return its record, which is then in ``folder``."""
    record = folder / f"{module}.json"
    command = [sys.executable, "-m", f"benchmarks.{module}", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers: dict[str, Any] = json.loads(record.read_text())
    return numbers


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["kernels", "engine"])
def test_gpu_benchmarks_run_with_tiny_shapes(name: str, tmp_path: Path) -> None:
    smoke(f"{name}.run", tmp_path)
    summary = [sys.executable, "-m", "benchmarks.summary", str(tmp_path / f"{name}.run.json")]
    shown = subprocess.run(summary, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(shown.splitlines()) > 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_scaling_benchmark_serves_in_all_modes(tmp_path: Path) -> None:
    rows = smoke("scaling.run", tmp_path)["rows"]
    assert {(row["mode"], row["gateways"], row["executors"]) for row in rows} == {
        (mode, gateways, count)
        for mode, gateways in (
            ("wire", 0),
            *(("answer", count) for count in (1, 2)),
            *(("stream", count) for count in (1, 2)),
        )
        for count in (1, 2)
    }
    assert all(row["tokens_per_s"] > 0 for row in rows)


@pytest.mark.timeout(180)
def test_streams(tmp_path: Path) -> None:
    (row,) = smoke("streams.run", tmp_path)["rows"]
    assert (row["streams"], row["errors"]) == (20, 0)


@pytest.mark.timeout(180)
@pytest.mark.long
def test_what_consoles_cost_is_measured(tmp_path: Path) -> None:
    numbers = smoke("console.run", tmp_path)
    loaded = numbers["served"]["loaded"]
    assert [row["consoles"] for row in loaded["medians"]] == [0, 4]
    assert all(ratio["from"] <= ratio["median"] <= ratio["to"] for ratio in loaded["ratio_of_4_to_0"].values())
    assert len(numbers["core"]) == 3


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_cpu_threads_runs(tmp_path: Path) -> None:
    rows = smoke("cpu_threads.run", tmp_path)["rows"]
    assert {(row["setting"], row["beside"]) for row in rows} == {
        (setting, beside) for setting in ("unset", "GOMP_SPINCOUNT=0") for beside in ("nothing", "a busy process")
    }


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_speculation_runs(tmp_path: Path) -> None:
    per_step = {row["text"]: row["tokens_per_step"] for row in smoke("speculation.run", tmp_path)["rows"]}
    assert per_step["rewriting"] > per_step["random"] == 1


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_repeated_text_runs(tmp_path: Path) -> None:
    numbers = smoke("repeats.run", tmp_path)
    assert all(row["new_us"] > 0 for row in numbers["alone"])
    assert {row["prompt"] for row in numbers["served"]} == {"ids", "text"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_routing_benchmark_runs(tmp_path: Path) -> None:
    rows = {row["policy"]: row for row in smoke("routing.run", tmp_path)["rows"]}
    assert {"one", "ttft", "prefix", "least-loaded", "round-robin"} <= set(rows)
    assert rows["ttft"]["hit_rate"] > rows["round-robin"]["hit_rate"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_routing_benchmark_by_real_processes_runs(tmp_path: Path) -> None:
    rows = smoke("routing.processes", tmp_path)["rows"]
    # With so few prompts round robin may hit as much: blocks fetched from other executors count too.
    assert rows["ttft"]["hit_rate"] >= 0.9 * rows["round-robin"]["hit_rate"] > 0


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_segments_runs(tmp_path: Path) -> None:
    (result,) = smoke("segments.run", tmp_path)["results"]
    rows = {row["asked"]: row for row in result["rows"]}
    assert rows["boundary 0"]["computed"] < rows["boundary 32"]["computed"] < rows["cold"]["computed"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_experiments_on_the_quality_of_segments_run(tmp_path: Path) -> None:
    found = {}
    for name in ("quality", "questions"):
        found[name] = smoke(f"segments.{name}", tmp_path)["results"]
    for result in found["quality"]:
        ways = result["ways"]
        assert 0 == ways["whole prompt"]["kl"] < ways["boundary 0"]["kl"] < ways["copied"]["kl"]
    assert [one["trained"] for one in found["questions"]] == ["full attention", "both"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_structured_output_runs(tmp_path: Path) -> None:
    numbers = smoke("structured.run", tmp_path)
    assert [row["structured"] for row in numbers["rows"]] == [0.0, 0.2, 1.0]
    assert all(row["tokens_per_s"] > 0 for row in numbers["rows"])
    assert len(numbers["masks"]) == 2
    assert all(row["step_ms"] > 0 for row in numbers["neighbours"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_roles_runs(tmp_path: Path) -> None:
    rows = smoke("roles.run", tmp_path)["rows"]
    assert all((row["moved"] > 0) == (row["layout"] != "both") for row in rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_benchmark_of_roles_by_real_processes_runs(tmp_path: Path) -> None:
    rows = smoke("roles.processes", tmp_path)["rows"]
    assert rows["both"]["moved"] == 0 < rows["1:1"]["moved"]
