"""Benchmarks run here with tiny shapes: those that need a GPU work when there is one, the others do not rot."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["kernels", "engine"])
def test_gpu_benchmarks_run_with_tiny_shapes(name: str, tmp_path: Path) -> None:
    record = tmp_path / f"{name}.json"
    command = [sys.executable, "-m", f"benchmarks.{name}.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = [sys.executable, "-m", "benchmarks.summary", str(record)]
    shown = subprocess.run(summary, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert len(shown.splitlines()) > 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_scaling_benchmark_serves_in_all_modes(tmp_path: Path) -> None:
    record = tmp_path / "scaling.json"
    command = [sys.executable, "-m", "benchmarks.scaling.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
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
    record = tmp_path / "streams.json"
    command = [sys.executable, "-m", "benchmarks.streams.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(record.read_text())["rows"]
    assert (row["streams"], row["errors"]) == (20, 0)


@pytest.mark.timeout(180)
def test_the_benchmark_of_cpu_threads_runs(tmp_path: Path) -> None:
    record = tmp_path / "cpu-threads.json"
    command = [sys.executable, "-m", "benchmarks.cpu_threads.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert {(row["setting"], row["beside"]) for row in rows} == {
        (setting, beside) for setting in ("unset", "GOMP_SPINCOUNT=0") for beside in ("nothing", "a busy process")
    }


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_speculation_runs(tmp_path: Path) -> None:
    record = tmp_path / "speculation.json"
    command = [sys.executable, "-m", "benchmarks.speculation.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    per_step = {row["text"]: row["tokens_per_step"] for row in json.loads(record.read_text())["rows"]}
    assert per_step["rewriting"] > per_step["random"] == 1


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_benchmark_of_repeated_text_runs(tmp_path: Path) -> None:
    record = tmp_path / "repeats.json"
    command = [sys.executable, "-m", "benchmarks.repeats.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(record.read_text())
    assert all(row["new_us"] > 0 for row in numbers["alone"])
    assert {row["prompt"] for row in numbers["served"]} == {"ids", "text"}


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_routing_benchmark_runs(tmp_path: Path) -> None:
    record = tmp_path / "routing.json"
    command = [sys.executable, "-m", "benchmarks.routing.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["policy"]: row for row in json.loads(record.read_text())["rows"]}
    assert {"one", "ttft", "prefix", "least-loaded", "round-robin"} <= set(rows)
    assert rows["ttft"]["hit_rate"] > rows["round-robin"]["hit_rate"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_routing_benchmark_by_real_processes_runs(tmp_path: Path) -> None:
    record = tmp_path / "routing.json"
    command = [sys.executable, "-m", "benchmarks.routing.processes", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    # With so few prompts round robin may hit as much: what it fetches from other executors counts too.
    assert rows["ttft"]["hit_rate"] >= 0.9 * rows["round-robin"]["hit_rate"] > 0


@pytest.mark.timeout(180)
def test_the_benchmark_of_segments_runs(tmp_path: Path) -> None:
    record = tmp_path / "segments.json"
    command = [sys.executable, "-m", "benchmarks.segments.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(record.read_text())["results"]
    rows = {row["asked"]: row for row in result["rows"]}
    assert rows["boundary 0"]["computed"] < rows["boundary 32"]["computed"] < rows["cold"]["computed"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_experiments_on_the_quality_of_segments_run(tmp_path: Path) -> None:
    found = {}
    for name in ("quality", "questions"):
        record = tmp_path / f"{name}.json"
        command = [sys.executable, "-m", f"benchmarks.segments.{name}", "--smoke", "--json", str(record)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found[name] = json.loads(record.read_text())["results"]
    for result in found["quality"]:
        ways = result["ways"]
        assert 0 == ways["whole prompt"]["kl"] < ways["boundary 0"]["kl"] < ways["copied"]["kl"]
    assert [one["trained"] for one in found["questions"]] == ["full attention", "both"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_structured_output_runs(tmp_path: Path) -> None:
    record = tmp_path / "structured.json"
    command = [sys.executable, "-m", "benchmarks.structured.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    numbers = json.loads(record.read_text())
    assert [row["structured"] for row in numbers["rows"]] == [0.0, 0.2, 1.0]
    assert all(row["tokens_per_s"] > 0 for row in numbers["rows"])
    assert len(numbers["masks"]) == 2
    assert all(row["step_ms"] > 0 for row in numbers["neighbours"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_benchmark_of_roles_runs(tmp_path: Path) -> None:
    record = tmp_path / "roles.json"
    command = [sys.executable, "-m", "benchmarks.roles.run", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert all((row["moved"] > 0) == (row["layout"] != "both") for row in rows)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_benchmark_of_roles_by_real_processes_runs(tmp_path: Path) -> None:
    record = tmp_path / "roles.json"
    command = [sys.executable, "-m", "benchmarks.roles.processes", "--smoke", "--json", str(record)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(record.read_text())["rows"]
    assert rows["both"]["moved"] == 0 < rows["1:1"]["moved"]
