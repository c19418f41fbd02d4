"""An executor one of whose threads has ended by an exception ends too, with a sentence about the reason."""

import re
import signal
import subprocess
import sys

import pytest

from benchmarks.processes import EXECUTOR, free_port, spawn
from tests.executor.broken_threads import KINDS, outcomes


@pytest.fixture(scope="module")
def ended() -> dict[str, tuple[int, str]]:
    return outcomes()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("begin", "other")])
def test_a_process_ends_when_one_of_its_threads_does(ended: dict[str, tuple[int, str]], kind: str) -> None:
    code, log = ended[kind]
    assert code == 1, log
    assert log.endswith(f"this executor ends: its thread '{kind}' failed: _Fault: the device is on fire\n")
    assert "Traceback" in log


def test_a_thread_that_breaks_before_its_first_job_ends_it_too(ended: dict[str, tuple[int, str]]) -> None:
    code, log = ended["begin"]
    assert code == 1, log
    assert re.search(r"this executor ends: its thread '(store|load)' failed: _Fault: the device is on fire\n", log)


def test_threads_of_other_packages_end_by_themselves(ended: dict[str, tuple[int, str]]) -> None:
    code, log = ended["other"]
    assert code == 7
    assert "this executor ends" not in log
    assert "_Fault" in log


NODE = ("--tensor-parallel=2", "--nnodes=2", "--node-rank=1", "--master-addr=127.0.0.1", f"--master-port={free_port()}")


@pytest.mark.parametrize(
    ("moment", "options", "number", "code"),
    [
        ("starting torch", (), signal.SIGTERM, 0),
        ("KV pool", (), signal.SIGINT, 130),
        ("joining node 0", NODE, signal.SIGTERM, 0),
    ],
)
def test_a_signal_during_the_start_ends_it_at_once(
    moment: str, options: tuple[str, ...], number: signal.Signals, code: int
) -> None:
    """The thread that loads the model cannot be asked to end."""
    command = [sys.executable, "-m", EXECUTOR, "pagewise-demo", "--scheduler=ipc:///nowhere/at/all", *options]
    with spawn(command, stderr=subprocess.PIPE, text=True) as process:
        said = next(line for line in process.stderr if moment in line)
        process.send_signal(number)
        said += process.communicate(timeout=30)[1]
    assert process.returncode == code, said
    assert "Traceback" not in said
