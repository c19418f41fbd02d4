"""``pagewise doctor``: its findings, and the secrets that it keeps."""

import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pagewise.doctor.command import report
from pagewise.doctor.machine import Finding, check_cpu, check_disk, check_limits, check_memory, check_port
from pagewise.doctor.software import check_environment, check_packages, read_constraints, torch_findings

TORCH: dict[str, Any] = {
    "torch": "2.13.0+cpu",
    "cuda": None,
    "capability": "AVX2",
    "bfloat16": False,
    "no_gpu": "",
    "devices": [],
    "operations": {"file": "_cpu_8.so", "narrower": False},
    "no_operations": "",
}


def doctor(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pagewise.main", "doctor", *arguments]
    environment = os.environ | environ
    environment.pop("TRITON_INTERPRET", None)  # tests/executor/test_kernel_checks.py lets it check kernels, for seconds
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_what_is_pasted_has_no_secrets_and_no_host_names() -> None:
    secret = {"PAGEWISE_API_KEY": "sk-secret", "HF_TOKEN": "hf_secret", "PAGEWISE_API_KEYS": "sk-others"}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        done = doctor(url, **secret)
    assert done.returncode == 1, done.stdout
    assert "PROBLEM server" in done.stdout
    assert "torch " in done.stdout
    assert "HF_TOKEN is set" in done.stdout
    assert done.stdout.rstrip().endswith("Paste all of this into a bug report.")
    assert "secret" not in done.stdout + done.stderr
    assert platform.node() not in done.stdout
    assert str(Path.home()) not in done.stdout


def test_findings_as_json() -> None:
    done = doctor("--json", "--host-name")
    found = json.loads(done.stdout)
    assert done.returncode == (found["problems"] > 0)
    assert {"name", "value", "level", "advice"} == set(found["findings"][0])
    assert found["findings"][0]["value"] == platform.node()
    assert all(finding["advice"] for finding in found["findings"] if finding["level"] != "ok")


def levels(findings: Any) -> dict[str, tuple[str, str]]:
    return {finding.name: (finding.level, finding.advice) for finding in findings}


def test_torch_and_its_devices() -> None:
    assert {level for level, _ in levels(torch_findings(TORCH)).values()} == {"ok"}
    unused = {"no_gpu": "the NVIDIA driver 550 is too old for CUDA 13: install driver 580"}
    assert levels(torch_findings(TORCH | unused))["gpu"] == ("problem", "install driver 580")
    slow = {"operations": {"file": "_cpu_8.so", "narrower": True}}
    assert levels(torch_findings(TORCH | slow))["cpu operations"][0] == "note"
    gpu = {"name": "H100", "capability": "9.0", "free": 2**30, "memory": 80 * 2**30}
    assert "another process uses it" in levels(torch_findings(TORCH | {"cuda": "13.0", "devices": [gpu]}))["gpu"][1]


def test_a_small_machine(tmp_path: Path) -> None:
    for file, text in {
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapFree: 0 kB\nHugePages_Total: 0\n",
        "proc/cpuinfo": "model name : Old\nflags : sse4_2\n",
        "sys/fs/cgroup/memory.max": f"{2**30}\n",
        "sys/devices/system/clocksource/clocksource0/current_clocksource": "hpet\n",
    }.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    memory = levels(check_memory(tmp_path))["memory"]
    assert memory == ("note", "only small models fit: --kv-memory 256MiB")
    found = levels(check_cpu(tmp_path))
    assert found["cpu"][0] == "note"
    assert "reading it is slow" in found["clock"][1]
    (tmp_path / ".dockerenv").touch()
    assert next(each.value for each in check_limits(tmp_path) if each.name == "container") == "yes"


def test_versions_that_were_not_tested(tmp_path: Path) -> None:
    assert read_constraints()["torch"] == "2.13.0"
    file = tmp_path / "constraints.txt"
    file.write_text("aiohttp==0.1\n")
    others = [finding for finding in check_packages(file) if finding.level == "note"]
    assert ["aiohttp" in finding.value and "tested: 0.1" in finding.value for finding in others] == [True]


def test_ports_disks_and_variables(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (finding,) = check_port(taken.getsockname()[1])
        assert finding.level == "note"
        assert f"(pid {os.getpid()})" in finding.value
        assert finding.advice.startswith("--port ")
    (finding,) = check_disk(tmp_path / "not" / "there")
    assert "free for models in" in finding.value
    shown, wrong = check_environment({"PAGEWISE_API_KEY": "secret", "PAGEWISE_PRT": "1", "OMP_NUM_THREADS": "3"})
    assert shown.value == "OMP_NUM_THREADS=3, PAGEWISE_API_KEY is set, PAGEWISE_PRT is set"
    assert "did you mean PAGEWISE_PORT?" in wrong.value


@pytest.mark.parametrize(("level", "said"), [("ok", "Nothing is wrong"), ("note", "1 note"), ("problem", "1 problem")])
def test_the_report_says_what_to_do(level: Any, said: str) -> None:
    text = report([Finding("disk", "full", level, "empty it")])
    assert "-> empty it" in text
    assert said in text
