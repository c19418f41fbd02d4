"""How many CPU threads an executor gets, by fake files of the kernel, and how they wait, by a real OpenMP runtime."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pagewise_shared import cpu_threads
from pagewise_shared.cpu_threads import (
    CpuTimes,
    available_cores,
    choose_threads,
    cpu_quota,
    openmp_threads,
    share_of_cores,
    wait_variables,
)


class Machine:
    """Files of a machine with ``cpus`` CPUs that this process may all use."""

    def __init__(self, root: Path, cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root, self.cpus = root, cpus
        self.busy = [0] * cpus
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)))
        self.load(0.0)
        self.stat()

    def file(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def load(self, last_minute: float) -> None:
        self.file("proc/loadavg", f"{last_minute} 0.50 0.40 2/200 4711\n")

    def stat(self) -> None:
        lines = [f"cpu{cpu} {busy} 0 0 1000 500 0 0 0 0 0" for cpu, busy in enumerate(self.busy)]
        self.file("proc/stat", "\n".join(["cpu  1 2 3 4 5 6 7 8 9 10", *lines, "ctxt 5"]))

    def threads(self, monkeypatch: pytest.MonkeyPatch, *, busy: int, load: float, own: float = 0.0) -> int:
        """The choice after ten seconds in which ``busy`` CPUs were used, ``own`` of them by this process."""
        before = CpuTimes.now(self.root)
        self.load(load)
        for cpu in range(busy):
            self.busy[cpu] += 10 * os.sysconf("SC_CLK_TCK")
        self.stat()
        monkeypatch.setattr(time, "monotonic", lambda: before.at + 10.0)
        monkeypatch.setattr(time, "process_time", lambda: before.own + 10.0 * own)
        return choose_threads(before, self.root)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, 8, monkeypatch)


def test_threads_do_not_spin_unless_the_user_wants_them_to() -> None:
    assert wait_variables({"PATH": "/bin"}) == {"GOMP_SPINCOUNT": "0"}
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        assert wait_variables({name: "whatever"}) == {}


@pytest.mark.parametrize(
    ("value", "threads"), [("4", 4), ("4,2", 4), (" 3 ", 3), ("", None), ("0", None), ("many", None), (None, None)]
)
def test_the_user_s_number_of_openmp_threads(value: str | None, threads: int | None) -> None:
    assert openmp_threads({} if value is None else {"OMP_NUM_THREADS": value}) == threads


def test_hyper_threads_of_a_core_count_once(machine: Machine) -> None:
    assert available_cores(machine.root) == 8
    for cpu in range(8):
        machine.file(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{cpu % 4},{cpu % 4 + 4}\n")
    assert available_cores(machine.root) == 4
    assert share_of_cores(3, machine.root) == 1
    assert share_of_cores(2, machine.root) == 2
    assert share_of_cores(9, machine.root) == 1


@pytest.mark.parametrize(
    ("cpu_max", "quota", "cores"),
    [("max 100000", None, 8), ("250000 100000", 2.5, 2), ("50000 100000", 0.5, 1), ("1600000 100000", 16.0, 8)],
)
def test_a_quota_of_cgroup_v2(machine: Machine, cpu_max: str, quota: float | None, cores: int) -> None:
    machine.file("proc/self/cgroup", "0::/\n")
    machine.file("sys/fs/cgroup/cpu.max", cpu_max + "\n")
    assert cpu_quota(machine.root) == quota
    assert available_cores(machine.root) == cores


def test_the_smallest_quota_of_all_cgroups_above_counts(machine: Machine) -> None:
    machine.file("proc/self/cgroup", "0::/kubepods/pod7/executor\n")
    machine.file("sys/fs/cgroup/kubepods/pod7/executor/cpu.max", "max 100000\n")
    machine.file("sys/fs/cgroup/kubepods/pod7/cpu.max", "300000 100000\n")
    machine.file("sys/fs/cgroup/kubepods/cpu.max", "600000 100000\n")
    assert cpu_quota(machine.root) == 3.0


def test_the_path_on_the_host_does_not_hide_the_quota_of_a_container(machine: Machine) -> None:
    machine.file("proc/self/cgroup", "0::/system.slice/docker-4711.scope\n")
    machine.file("sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert cpu_quota(machine.root) == 2.0


@pytest.mark.parametrize("folder", ["cpu,cpuacct/docker/4711", "cpu/docker/4711", "cpu,cpuacct", "cpu"])
def test_a_quota_of_cgroup_v1(machine: Machine, folder: str) -> None:
    machine.file("proc/self/cgroup", "5:memory:/docker/4711\n4:cpu,cpuacct:/docker/4711\n3:cpuset:/\n0::/\n")
    machine.file(f"sys/fs/cgroup/{folder}/cpu.cfs_quota_us", "350000\n")
    machine.file(f"sys/fs/cgroup/{folder}/cpu.cfs_period_us", "100000\n")
    assert cpu_quota(machine.root) == 3.5
    assert available_cores(machine.root) == 3


def test_no_quota_and_none_that_can_be_read(machine: Machine) -> None:
    assert cpu_quota(machine.root) is None
    machine.file("proc/self/cgroup", "1:cpu:/\n0::/\n")
    machine.file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    machine.file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    machine.file("sys/fs/cgroup/cpu.max", "rubbish\n")
    assert cpu_quota(machine.root) is None


def test_cores_that_others_keep_busy_are_left_to_them(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.threads(monkeypatch, busy=3, load=3.2) == 5


def test_what_this_process_uses_itself_does_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.threads(monkeypatch, busy=3, load=3.2, own=2.0) == 7


def test_what_has_just_begun_or_just_ended_does_not_count(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.threads(monkeypatch, busy=3, load=0.3) == 8, "services that start beside it"
    assert machine.threads(monkeypatch, busy=0, load=8.0) == 8, "the executor whose place it takes"


def test_where_others_use_half_of_the_cores_it_competes_for_all(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert machine.threads(monkeypatch, busy=4, load=9.0) == 8


def test_others_use_cores_outside_of_the_quota_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.file("proc/self/cgroup", "0::/\n")
    machine.file("sys/fs/cgroup/cpu.max", "300000 100000\n")
    assert machine.threads(monkeypatch, busy=3, load=4.0) == 3


def test_this_machine_can_be_read() -> None:
    before = CpuTimes.now()
    time.sleep(0.05)
    assert 0.0 <= CpuTimes.now().used_by_others(before) < 1024
    assert 1 <= choose_threads(before) <= len(os.sched_getaffinity(0))


_SPINNING = """
import os, sys, time
from pagewise_shared.cpu_threads import wait_variables
if sys.argv[1] == "set":
    os.environ.update(wait_variables(os.environ))
import torch
torch.set_num_threads(2)
x = torch.ones(200_000)
for _ in range(10):
    x.add_(1)
before = time.process_time()
for _ in range(20):
    x.add_(1)
    time.sleep(0.005)
print(time.process_time() - before)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a team of two threads needs two cores")
def test_variables_that_are_set_before_torch_is_imported_take_effect() -> None:
    environ = {k: v for k, v in os.environ.items() if k not in cpu_threads._CHOSEN_BY_USER}

    def cpu_seconds(how: str) -> float:
        command = [sys.executable, "-c", _SPINNING, how]
        return float(subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout)

    # By itself the runtime spins for milliseconds after each of the twenty operations, if it gets the cores.
    assert any(cpu_seconds("set") < 0.5 * cpu_seconds("unset") for _ in range(5))
