"""Runs the checks and prints their findings, as text or JSON."""

import argparse
import json
import os
import platform
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

from pagewise.doctor.machine import Finding, check_cpu, check_disk, check_limits, check_memory, check_port
from pagewise.doctor.software import check_environment, check_packages, check_python, check_torch
from pagewise.ports import text_of

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(arguments: Sequence[str]) -> int:
    """Check this machine; returns 1 if there is a problem, otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="pagewise doctor",
        description="Check whether this machine can run Pagewise. The output can be pasted into a bug report: "
        "there are no secrets in it, and no host names unless --host-name is given. The exit code is 1 if there is a "
        "problem.",
    )
    parser.add_argument("url", nargs="?", help="also ask a server that runs; PAGEWISE_API_KEY is sent")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--port", type=int, default=8000, help="which port to look at (default: 8000)")
    parser.add_argument("--hub", action="store_true", help="also see whether the model hub can be reached")
    parser.add_argument("--host-name", action="store_true", help="also say what this machine is called")
    options = parser.parse_args(arguments)
    findings = list(_all(options))
    problems = sum(finding.level == "problem" for finding in findings)
    if options.json:
        print(json.dumps({"problems": problems, "findings": [finding._asdict() for finding in findings]}, indent=1))
    else:
        print(report(findings))
    return 1 if problems else 0


def report(findings: Sequence[Finding]) -> str:
    """Return the findings as text: a line for each, and its advice below."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for name, value, level, advice in findings:
        lines.append(f"{_MARKS[level]:<8}{name:<{width}}  {value}")
        if advice:
            lines.append(f"{'':<8}{'':<{width}}  -> {advice}")
    counts = {level: sum(finding.level == level for finding in findings) for level in ("problem", "note")}
    parts = [f"{count} {level}{'s' * (count != 1)}" for level, count in counts.items() if count]
    return "\n".join([*lines, "", f"{', '.join(parts) or 'Nothing is wrong'}. Paste all of this into a bug report."])


def _all(options: argparse.Namespace) -> Iterator[Finding]:
    if options.host_name:
        yield Finding("host", platform.node())
    yield from check_python()
    yield from check_packages()
    yield from check_torch()
    yield from check_cpu()
    yield from check_memory()
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    yield from check_disk(Path(os.environ.get("HF_HUB_CACHE") or home).expanduser())
    yield from check_limits()
    yield from check_port(options.port)
    yield from check_environment()
    if options.hub:
        yield _hub()
    if options.url:
        yield _server(options.url.rstrip("/"))


def _hub() -> Finding:
    """Ask the hub for a model's name, without the user's token."""
    base = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    try:
        with urllib.request.urlopen(f"{base}/api/models?limit=1", timeout=10):  # noqa: S310  # nosec B310 # the user's own
            return Finding("hub", "can be reached")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        advice = "set HTTPS_PROXY or HF_ENDPOINT, or copy models here and give their paths"
        return Finding("hub", f"cannot be reached: {reason}", "problem", advice)


def _server(url: str) -> Finding:
    key = os.environ.get("PAGEWISE_API_KEY", "")
    version = text_of(f"{url}/version", key)
    if version is None:
        advice = "is the address right? If it wants a key, set PAGEWISE_API_KEY; its log says why it ended"
        return Finding("server", "does not answer", "problem", advice)
    health = text_of(f"{url}/health", key)
    if health is None:
        return Finding("server", f"{version.strip()}, not ready", "problem", "no executor has joined: see their logs")
    return Finding("server", f"{version.strip()}, {health.strip()}")
