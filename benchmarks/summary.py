"""A short table of the GPU benchmarks' results: ours, the best peer, and the bar.

python -m benchmarks.summary benchmarks/results/kernels-gpu.json benchmarks/results/engine-gpu.json
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def kernel_lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["name"], {})[row["who"]] = row
    for name, found in by_name.items():
        if (ours := found.get("pagewise")) is None:
            continue
        peers = [row for who, row in found.items() if who != "pagewise"]
        best = min(peers, key=lambda row: float(row["microseconds"]), default=None)
        beside = f"{best['microseconds'] / ours['microseconds']:.2f}x {best['who']}" if best else ""
        yield (
            f"{name:<42}{ours['microseconds']:>10.1f} µs{ours['rate']:>9.1f} {ours['unit']:<8}{ours['share']:>6.0%}  "
            f"{beside:<20}{ours['bar']}"
        )


def engine_lines(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    by_work: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_work.setdefault((row["model"], row["work"]), {})[row["who"]] = row
    for (model, work), found in by_work.items():
        if (ours := found.get("pagewise")) is None:
            continue
        others = [f"{ours['rate'] / row['rate']:.2f}x {who}" for who, row in found.items() if who != "pagewise"]
        share = f"{ours['share']:.0%} of the limit" if ours["share"] else ""
        yield f"{model:<12}{work:<16}{ours['rate']:>10.0f} tokens/s  {share:<20}{', '.join(others)}"


def main() -> None:
    for name in sys.argv[1:]:
        record = json.loads(Path(name).read_text())
        print(f"{Path(name).stem}: commit {record['commit']}, {record['machine'].get('device', '')}")
        lines = engine_lines if "model" in record["rows"][0] else kernel_lines
        print("\n".join(lines(record["rows"])))


if __name__ == "__main__":
    main()
