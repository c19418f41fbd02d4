"""Checks of processor, memory, disk, limits, clock and ports. ``root`` is where /proc, /sys and /dev lie."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from pagewise_shared.cpu_threads import available_cores, cpu_quota

from pagewise.ports import holder_of, next_free

_ROOT = Path("/")
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "asimd", "bf16", "i8mm")
_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_FEW_FILES = 4096
_LITTLE_MEMORY, _LITTLE_DISK, _LITTLE_SHARED = 2 * 2**30, 10 * 2**30, 64 * 2**20


Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """A property of this machine. ``level``: "problem" keeps Pagewise from running. ``advice``: a remedy."""

    name: str
    value: str
    level: Level = "ok"
    advice: str = ""


def noted(name: str, value: str, advice: str) -> Finding:
    """Return a finding, which is a note if there is advice."""
    return Finding(name, value, "note" if advice else "ok", advice)


def gib(size: float) -> str:
    """Return a number of bytes as a text in GiB."""
    return f"{size / 2**30:.1f} GiB"


def check_cpu(root: Path = _ROOT) -> Iterator[Finding]:
    """Look at the processor, how many cores of it may be used, and its clock."""
    fields = _fields(root / "proc/cpuinfo")
    flags = set((fields.get("flags") or fields.get("Features") or "").split())
    known = [name for name in _INSTRUCTIONS if name in flags]
    model, vectors = fields.get("model name", "unknown"), " ".join(known) or "no wide vectors"
    text = f"{model}, {available_cores(root)} cores, {vectors}"
    slow = flags.isdisjoint(("avx2", "asimd"))
    yield noted("cpu", text, "computing on this CPU will be slow" if slow else "")
    if (quota := cpu_quota(root)) is not None and quota < 2:
        yield Finding("cpu quota", f"{quota:g} cores", "note", "services share these: give the container 2 or more")
    clock = _text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource").strip()
    advice = "reading it is slow: see /sys/devices/system/clocksource/clocksource0/available_clocksource"
    yield noted("clock", clock or "unknown", "" if clock in ("", *_GOOD_CLOCKS) else advice)


def check_memory(root: Path = _ROOT) -> Iterator[Finding]:
    """Look at memory, the limit of the container, shared memory and huge pages."""
    table = _fields(root / "proc/meminfo")
    sizes = {name: int(value.split()[0]) * 1024 for name, value in table.items()}
    free, total, swap = (gib(sizes.get(name, 0)) for name in ("MemAvailable", "MemTotal", "SwapFree"))
    text = f"{free} of {total} available, {swap} of swap"
    if (limit := _memory_limit(root)) is not None and limit < sizes.get("MemTotal", 0):
        text += f", limited to {gib(limit)} by the cgroup"
    yield noted(
        "memory", text, "only small models fit: --kv-memory 256MiB" if available_memory(root) < _LITTLE_MEMORY else ""
    )
    shared = root / "dev/shm"
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        advice = "--tensor-parallel and --host-memory need more: docker run --shm-size 2g"
        yield noted("shared memory", gib(size), advice if size <= _LITTLE_SHARED else "")
    pages = _text(root / "sys/kernel/mm/transparent_hugepage/enabled").strip()
    chosen = pages[pages.find("[") + 1 : pages.find("]")] if "[" in pages else "unknown"
    yield Finding("huge pages", f"transparent: {chosen}, reserved: {table.get('HugePages_Total', '0')}")


def available_memory(root: Path = _ROOT) -> int:
    """Return the bytes of memory that processes can still take, within the limit of the cgroup."""
    free = int(_fields(root / "proc/meminfo").get("MemAvailable", "0").split()[0]) * 1024
    limit = _memory_limit(root)
    return free if limit is None else min(free, limit)


def check_disk(cache: Path) -> Iterator[Finding]:
    """Look at the disk of the models that are downloaded."""
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    usage = shutil.disk_usage(there)
    text = f"{gib(usage.free)} of {gib(usage.total)} free for models in {_without_home(cache)}"
    if not os.access(there, os.W_OK):
        yield Finding("disk", text, "problem", "this user may not write there: set HF_HOME to a folder of yours")
        return
    yield noted("disk", text, "set HF_HOME to a folder on a larger disk" if usage.free < _LITTLE_DISK else "")


def check_limits(root: Path = _ROOT) -> Iterator[Finding]:
    """Look at the limits of this process, and whether it is in a container."""
    files, locked = (resource.getrlimit(kind)[1] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    text = f"{_limit(files)} open files, {_limit(locked)} bytes of locked memory"
    few = files != resource.RLIM_INFINITY and files < _FEW_FILES
    advice = f"each connection takes one: ulimit -Hn {_FEW_FILES}, or --ulimit nofile={_FEW_FILES} of Docker"
    yield noted("limits", text, advice if few else "")
    marks = root / ".dockerenv", root / "run/.containerenv"
    inside = "KUBERNETES_SERVICE_HOST" in os.environ or any(mark.exists() for mark in marks)
    yield Finding("container", "yes" if inside else "no sign of one")


def check_port(port: int) -> Iterator[Finding]:
    """Look whether a server could listen on a port of this machine."""
    if next_free("127.0.0.1", port - 1) == port:
        yield Finding("port", f"{port} is free")
        return
    holder = holder_of(port)
    yield Finding(
        "port", f"{port} is taken{f' by {holder}' if holder else ''}", "note", f"--port {next_free('127.0.0.1', port)}"
    )


def _memory_limit(root: Path) -> int | None:
    """Return the limit of this process's cgroup, of version 2 or 1; None if there is none."""
    for file in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if (text := _text(root / file).strip()).isdecimal():
            return int(text)
    return None


def _limit(number: int) -> str:
    return "any number of" if number == resource.RLIM_INFINITY else str(number)


def _fields(file: Path) -> dict[str, str]:
    """Return the values in a file of the kernel by name; the last value of a repeated name."""
    pairs = (line.split(":", 1) for line in _text(file).splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""


def _without_home(path: Path) -> str:
    home = Path.home()
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
