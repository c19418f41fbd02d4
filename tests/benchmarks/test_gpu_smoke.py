"""The first hour on a GPU, as far as that is possible without one: its plan, and that no measurement is lost."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.gpu_smoke import run
from benchmarks.gpu_smoke.goals import GOALS, results, table
from benchmarks.gpu_smoke.plan import CALL_SECONDS, PARTS, Step, device_label

ROOT = Path(__file__).parents[2]
SMOKE = ("-m", "benchmarks.gpu_smoke.run")


def python(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def test_the_plan_needs_nothing_that_is_installed() -> None:
    done = python("-S", "-E", *SMOKE, "--dry-run")
    assert done.returncode == 0, done.stderr
    for steps in PARTS.values():
        for step in steps:
            assert f"{step.name}, {step.seconds} s: python -m {step.arguments[0]}" in done.stdout
    one = python("-S", "-E", *SMOKE, "--dry-run", "--part", "3").stdout
    assert [line for line in one.splitlines() if line.endswith(":")] == ["part 3, at most 220 s:", "goals:"]


def test_each_call_ends_before_whoever_lends_the_device_ends_it() -> None:
    assert sorted(PARTS) == [1, 2, 3, 4, 5]
    assert all(sum(step.seconds for step in steps) < CALL_SECONDS == 240 for steps in PARTS.values())
    names = [step.name for steps in PARTS.values() for step in steps]
    assert len(names) == len(set(names)), "each has a file of its own"


def test_all_groups_of_kernels_are_measured() -> None:
    """``--only`` takes the groups whose name contains it."""
    asked = [step.arguments[-1] for steps in PARTS.values() for step in steps if "--only" in step.arguments]
    code = "from benchmarks.kernels.run import groups; print(*(name for name, _ in groups()))"
    names = python("-c", code).stdout.split()
    assert len(names) > 4
    assert not [name for name in names if not any(only in name for only in asked)]


@pytest.mark.parametrize(
    ("target", "arguments"),
    [("gpu-smoke", ["PART=2", "WHEELS=.whl"]), ("gpu-smoke", []), ("test-gpu", []), ("bench-gpu", [])],
)
def test_make_installs_nothing_for_it(target: str, arguments: list[str]) -> None:
    command = ["make", "-n", target, "VENV=/nowhere", "PYTHON=some-python", *arguments]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip" not in shown
    assert "some-python -m " in shown
    if arguments:
        assert "benchmarks.gpu_smoke.run --part 2 --wheels .whl" in shown


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("GPU (unknown)", "GPU-unknown"),
    ],
)
def test_files_are_named_after_the_device(name: str, label: str) -> None:
    assert device_label(name) == label


@pytest.fixture
def torch(tmp_path: Path) -> Path:
    """A folder with something that is imported in place of torch, in less time; it sees no device."""
    (folder := tmp_path / "stand-in").mkdir()
    text = "class cuda:\n    is_available = staticmethod(lambda: False)\n__version__ = '0'\n"
    (folder / "torch.py").write_text(text)
    return folder


def test_without_a_gpu_it_says_so(tmp_path: Path, torch: Path) -> None:
    out = tmp_path / "out"
    done = python(*SMOKE, "--out", str(out), PYTHONPATH=f"{torch}:{ROOT}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "gpu-smoke: there is no GPU here: torch sees no CUDA device\n"
    (torch / "torch.py").write_text("raise ImportError('libcudart.so is missing')")
    done = python(*SMOKE, "--out", str(out), PYTHONPATH=f"{torch}:{ROOT}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith("ImportError: libcudart.so is missing\n")
    assert not out.exists()


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(run, "CARRIED", {"such-a-package": "such_a_module"})
    with pytest.raises(run.SmokeError, match="packages are missing: such-a-package"):
        run.prepared(None)
    with pytest.raises(run.SmokeError, match="lacks wheels for this Python of such-a-package"):
        run.prepared(tmp_path)


def test_packages_are_installed_from_wheels_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(run, "CARRIED", {"carried": "carried_module"})
    wheel(tmp_path / "carried-1.0-py3-none-any.whl")
    environment = run.prepared(tmp_path)
    assert run.prepared(None)["PYTHONPATH"] == environment["PYTHONPATH"]
    show = "import carried_module, pagewise_executor, pagewise_kernels, benchmarks; print(carried_module.VALUE)"
    done = subprocess.run([sys.executable, "-c", show], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "7\n", done.stderr


def wheel(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("carried_module/__init__.py", "VALUE = 7\n")
        info = "carried-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


def test_records_name_the_commit_that_is_given_where_there_is_no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_output", lambda *_: "")
    monkeypatch.setenv(record.COMMIT_VARIABLE, "abc1234")
    assert record._commit.__wrapped__() == "abc1234"


MEASURES = """
import sys, time
from benchmarks.record import write_record
rows = []
for number in range(3):
    rows.append(number)
    write_record(sys.argv[-1], {"rows": rows}, command="three rows", device="none")
    print("row", number, flush=True)
    if number == 1 and "hangs" in sys.argv:
        time.sleep(600)
    if number == 1 and "fails" in sys.argv:
        raise SystemExit("no third one")
"""
"""A benchmark that is cut short after two rows."""


@pytest.fixture
def measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "measures.py").write_text(MEASURES)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}:{os.environ.get('PYTHONPATH', '')}")
    (out := tmp_path / "out").mkdir()
    return out


def test_rows_stay_whatever_becomes_of_a_step(measures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = (Step("cut", 123, ("measures", "hangs")), Step("broken", 60, ("measures", "fails")))
    wait = subprocess.Popen.wait

    def time_is_over(process: "subprocess.Popen[str]", timeout: float | None = None) -> int:
        if timeout != 123:
            return wait(process, timeout)
        while not (path := measures / "cut-H200.json").exists() or json.loads(path.read_text())["rows"] != [0, 1]:
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("cut", timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", time_is_over)
    assert run.run_parts({1: steps}, "NVIDIA H200", measures, os.environ) == 1
    for name in ("cut", "broken"):
        assert json.loads((measures / f"{name}-H200.json").read_text())["rows"] == [0, 1]
    rows = json.loads((measures / "gpu-smoke-H200.json").read_text())["rows"]
    assert [(row["step"], row["outcome"]) for row in rows] == [("cut", "cut off"), ("broken", "failed (1)")]
    assert rows[1]["last_lines"][-1] == "no third one"


def test_a_later_call_adds_to_what_is_there(measures: Path) -> None:
    assert run.run_parts({1: (Step("first", 60, ("measures", "fails")),)}, "NVIDIA H200", measures, os.environ) == 1
    assert run.run_parts({2: (Step("second", 60, ("measures",)),)}, "NVIDIA H200", measures, os.environ) == 0
    assert run.run_parts({1: (Step("first", 60, ("measures",)),)}, "NVIDIA H200", measures, os.environ) == 0
    rows = json.loads((measures / "gpu-smoke-H200.json").read_text())["rows"]
    assert [(row["part"], row["step"], row["outcome"]) for row in rows] == [(2, "second", "done"), (1, "first", "done")]


def test_a_step_whose_modules_are_missing_is_left_out(measures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = (Step("served", 60, ("measures",), needs=("json", "no_such_module")), Step("next", 60, ("measures",)))
    assert run.run_parts({1: steps}, "NVIDIA H200", measures, os.environ) == 1
    rows = json.loads((measures / "gpu-smoke-H200.json").read_text())["rows"]
    assert [row["outcome"] for row in rows] == ["left out: no_such_module missing", "done"]
    assert "goal   measured  predicted" in capsys.readouterr().out


def test_a_step_that_needs_memory_waits_until_it_is_free(
    measures: Path, torch: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (torch / "torch.py").write_text(
        "import time\nbegan = time.monotonic()\n"
        "class cuda:\n"
        "    mem_get_info = staticmethod(lambda: ((2**33 if time.monotonic() < began + 0.5 else 2**37), 2**37))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{torch}:{os.environ['PYTHONPATH']}")
    step = Step("big", 60, ("measures",), waits=True)
    assert run.run_parts({1: (step,)}, "NVIDIA H200", measures, os.environ) == 0
    assert "128.0 of 128.0 GiB of the device are free" in capfd.readouterr().out


def test_goals_are_compared_with_what_the_records_say(tmp_path: Path) -> None:
    """The kept records of one device reach some goals, and an invented record of a step reaches another."""
    kept = {result.what: result for result in results(ROOT / "benchmarks" / "results", "H200", "9b521233")}
    assert kept["decode attention, batch 1, 1k"].measured == pytest.approx(7.56, abs=0.01)
    assert kept["deterministic decode attention of plain"].measured == pytest.approx(0.927, abs=0.001)
    assert kept["decode attention, float8 KV"].reached is False
    rows = [{"work": "decode 64", "who": "pagewise", "decoding": 10_000.0, "start_seconds": 11.0}]
    rows += [{"work": "decode 1", "who": "pagewise", "decoding": 200.0, "start_seconds": 11.0}]
    record.write_record(str(tmp_path / "engine-llama-3-8b-H100.json"), {"rows": rows}, command="made up", device="none")
    assert all(result.measured is None for result in results(tmp_path, "H100", "another"))
    commit = json.loads((tmp_path / "engine-llama-3-8b-H100.json").read_text())["commit"]
    found = {result.what: result for result in results(tmp_path, "H100", commit)}
    assert found["Llama-3-8B, bfloat16, decode 64"].reached
    assert found["Llama-3-8B, bfloat16, decode 1"].reached is False
    assert found["Llama-3-8B, start, nothing compiled before"].reached
    assert found["Llama-3-8B, FP8 weights, decode 64"].measured is None
    assert "Llama-3-8B, bfloat16, decode 64" in table(found.values())
    (line,) = [each for each in table(found.values()).splitlines() if "bfloat16, decode 64" in each]
    assert line.split()[-5:] == ["9,900", "10,000", "9,990", "tokens/s", "reached"]


def test_every_goal_is_of_a_step_that_runs() -> None:
    names = {step.name for steps in PARTS.values() for step in steps}
    assert {goal.step for goal in GOALS} <= names


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_rows_stay_if_all_of_it_is_killed(measures: Path, number: signal.Signals) -> None:
    code = (
        "import os, pathlib, sys; from benchmarks.gpu_smoke import run; from benchmarks.gpu_smoke.plan import Step\n"
        "step = Step('killed', 600, ('measures', 'hangs'))\n"
        "run.run_parts({1: (step,)}, 'NVIDIA H100 80GB HBM3', pathlib.Path(sys.argv[1]), os.environ)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(measures)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    printed = [process.stdout.readline() for _ in range(3)]
    assert printed[-1] == "row 1\n"
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()
    assert json.loads((measures / "killed-H100.json").read_text())["rows"] == [0, 1]
    if number == signal.SIGTERM:  # it has ended its child processes
        deadline = time.monotonic() + 20
        while running(str(measures)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    else:
        for pid in running(str(measures)):
            os.kill(pid, signal.SIGKILL)


def running(text: str) -> list[int]:
    """Processes with this in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_text():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_outcomes_of_tests_are_written_one_by_one(tmp_path: Path, torch: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(
        "import os, signal, pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'they differ'\n"
        "@pytest.mark.skip(reason='not here')\ndef test_skipped(): pass\n"
        "def test_deadly(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "benchmarks.gpu_smoke.outcomes")
    written_to = tmp_path / "tests-H200.json"
    paths = ("-c", "/dev/null", "--outcomes", str(written_to), str(tests))
    done = python("-m", "pytest", *options, *paths, PYTHONPATH=f"{torch}:{ROOT}")
    assert done.returncode == -signal.SIGKILL
    written = json.loads(written_to.read_text())
    found = {row["test"].rpartition("::")[2]: (row["outcome"], row["why"]) for row in written["rows"]}
    assert found["test_good"] == ("passed", "")
    assert found["test_bad"][0] == "failed"
    assert "they differ" in found["test_bad"][1]
    assert found["test_skipped"] == ("skipped", "Skipped: not here")
    assert "test_deadly" not in found
    assert str(tmp_path) not in written["command"]


def test_the_gpu_tests_can_be_collected_where_little_is_installed() -> None:
    """With such a machine's packages, and the files that are carried there."""
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.gpu_machine", "-m", "gpu", "--collect-only")
    done = python("-m", "pytest", *options, "tests/kernels", "tests/executor")
    assert done.returncode == 0, done.stdout[-3000:]
    found = [line for line in done.stdout.splitlines() if "::" in line]
    for name in ("tests/kernels/test_attention.py", "tests/kernels/test_sampling.py", "tests/executor/test_triton.py"):
        assert [line for line in found if line.startswith(name)], name


def test_tests_that_need_a_gpu_are_where_make_looks_for_them() -> None:
    rooms = ("kernels", "executor")
    for path in (ROOT / "tests").rglob("test_*.py"):
        if path.relative_to(ROOT / "tests").parts[0] not in rooms and path != Path(__file__):
            text = path.read_text()
            assert "mark.gpu" not in text, path
            assert "device: torch.device" not in text, path
