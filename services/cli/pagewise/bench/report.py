"""Prints results as tables, and writes them as JSON."""

import json
import math
import os
import platform
import shlex
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagewise_shared.version import package_version

from pagewise.bench.comparison import NEEDED_ROUNDS

_ROWS = (
    ("requests/s", "request_throughput"),
    ("requests/s within SLOs", "goodput"),
    ("input tokens/s", "input_throughput"),
    ("output tokens/s", "output_throughput"),
    ("prompt tokens from cache", "cached_share"),
)
_LATENCIES = (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms"), ("E2E", "e2el_ms"))
_COUNTS = (
    ("requests completed", "completed"),
    ("requests failed", "failed"),
    ("seconds", "duration_seconds"),
    ("input tokens", "input_tokens"),
    ("output tokens", "output_tokens"),
    ("most requests at once", "most_in_flight"),
)


def tables(result: dict[str, Any]) -> str:
    """Return the text that is printed: counts, rates, latencies, ratios to the first server, errors and caveats."""
    servers: list[dict[str, Any]] = result["servers"]
    rows: list[list[str]] = [["", *(server["name"] for server in servers)]]
    for title, key in _COUNTS:
        rows.append([title, *(_sum([one[key] for one in server["rounds"]], key) for server in servers)])
    names = list(_ROWS)
    for title, key in _LATENCIES:
        known = dict.fromkeys(name for server in servers for name in server["medians"] if name.startswith(f"{key}."))
        names += [(f"{title} {name.split('.', 1)[1]}, ms", name) for name in known]
    for title, key in names:
        if any(key in server["medians"] for server in servers):
            rows.append([title, *(_cell(server, key) for server in servers)])
    parts = [_aligned(rows)]
    if len(servers) > 1:
        parts.append(
            f"In parentheses: {servers[0]['name']} over that server, the median of the ratios of "
            f"{len(servers[0]['rounds'])} rounds.\n~: noise may be all there is, as rounds do not agree which is "
            f"larger, or are fewer than {NEEDED_ROUNDS}."
        )
    parts += [
        f"{server['name']}: {of['count']} times {kind}, for instance: {of['examples'][0]}"
        for server in servers
        for kind, of in _errors(server).items()
    ]
    if result["caveats"]:
        parts.append("\n".join(["Note:", *(f"- {caveat}" for caveat in result["caveats"])]))
    return "\n\n".join(parts)


def machine() -> dict[str, Any]:
    """Return a description of the machine on which the load generator runs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "pagewise": package_version(),
    }


def command(arguments: Sequence[str]) -> str:
    """Return the command line, without the values of headers, which may be secret."""
    shown, hides = [], False
    for argument in arguments:
        if hides or argument.startswith("--header="):
            name = argument.removeprefix("--header=").partition("=")[0]
            argument = f"{'' if hides else '--header='}{name}=..."
        hides = argument == "--header"
        shown.append(argument)
    return shlex.join(["pagewise", "bench", *shown])


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result; the file is never there in part."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)


def settings(options: Namespace) -> dict[str, Any]:
    """Return the options that make a workload and a load."""
    left_out = {
        "header",
        "plot",
        "disable_tqdm",
        "save_result",
        "result_filename",
        "result_dir",
        "base_url",
        "api_key_env",
    }
    plain = {name: value for name, value in vars(options).items() if name not in left_out}
    plain["dataset_path"] = options.dataset_path and options.dataset_path.name
    plain["goodput"] = dict(options.goodput)
    return {name: "inf" if isinstance(value, float) and math.isinf(value) else value for name, value in plain.items()}


def _errors(server: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for one in server["rounds"]:
        for kind, of in one["errors"].items():
            known = merged.setdefault(kind, {"count": 0, "examples": []})
            known["count"] += of["count"]
            known["examples"] += of["examples"]
    return merged


def _sum(values: list[Any], key: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    total = max(known) if key == "most_in_flight" else sum(known)
    return f"{total:,.1f}" if isinstance(total, float) else f"{total:,}"


def _cell(server: dict[str, Any], key: str) -> str:
    """Return the median of a metric, with the ratio of the first server's to it."""
    value: float | None = server["medians"].get(key)
    if value is None:
        return "-"
    shown = f"{value:.1%}" if key == "cached_share" else f"{value:,.2f}"
    ratio = server.get("first_over_this", {}).get(key)
    return shown if ratio is None else f"{shown} ({'' if ratio['differs'] else '~'}{ratio['median']:.2f}x)"


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in rows
    )
