"""The memory map of executors in a terminal: pages by tier and group of layers, and the prefix tree with snapshots."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

_MOST_SNAPSHOTS = 6
"""Places with snapshots that are named for each run of the tree, the last ones."""


def kind_of(group: dict[str, Any]) -> str:
    """Return the name of a group of layers: its kind, and the tokens of a window or chunk."""
    return f"{group['kind']} {group['window']:,}" if group["kind"] in ("window", "chunk") else str(group["kind"])


def memory_map(executor: dict[str, Any]) -> Iterator[str]:
    """Yield the lines about the memory of an executor. ``executor``: its report in the answer of /debug/memory."""
    yield (
        f"{executor['executor_id']}: {executor['running']} running, {executor['waiting']} waiting, "
        f"blocks of {executor['block_size']} tokens"
    )
    yield "  tier     layers           pages each    in use    cached      free  snapshots"
    device = executor["device"]
    yield from _tier_lines("device", device, device["free"], device["in_use"], device["cached"])
    for name, tier in executor["tiers"].items():
        yield from _tier_lines(name, tier, tier["num_blocks"] - tier["used"], 0, tier["used"])
    yield f"  prefix tree: {executor['tree_blocks']:,} blocks; * snapshots"
    yield from _tree_lines(executor["tree"])
    if executor.get("truncated"):
        yield "  ... (more with --limit)"


def _tier_lines(name: str, tier: dict[str, Any], free: int, in_use: int, cached: int) -> Iterator[str]:
    groups = tier.get("groups", [])
    for group in groups:
        line = f"  {name:<8} {kind_of(group):<16} {group['pages_per_block']:>10,}{group['in_use']:>10,}"
        with_snapshots = group["kind"] in ("window", "chunk", "state")
        yield f"{line}{group['cached']:>10,}" + (f"{group['snapshots']:>21,}" if with_snapshots else "")
    if groups:
        yield f"  {name:<8} {'none':<46} {free:>10,}"
    else:
        yield f"  {name:<8} {'all':<16} {1:>10}{in_use:>10,}{cached:>10,}{free:>10,}"


def _tree_lines(runs: list[dict[str, Any]]) -> Iterator[str]:
    children: dict[int, list[dict[str, Any]]] = {}
    for run in runs:
        children.setdefault(run["parent"], []).append(run)
    open_runs = [(run, "", run is children[-1][-1]) for run in reversed(children.get(-1, []))]
    while open_runs:
        run, indent, is_last = open_runs.pop()
        yield f"  {indent}{'`' if is_last else '|'}-- {_run_text(run)}"
        below = children.get(run["id"], [])
        inner = indent + ("    " if is_last else "|   ")
        open_runs += [(one, inner, one is below[-1]) for one in reversed(below)]


def _run_text(run: dict[str, Any]) -> str:
    first, last = run["depth"], run["depth"] + run["num_blocks"] - 1
    tiers = ", ".join(f"{name} {number:,}" for name, number in run["tiers"].items())
    held = f", held by {run['references']:,}" if run["references"] else ""
    text = f"{f'blocks {first:,}-{last:,}' if last > first else f'block {first:,}'}: {tiers or 'nowhere'}{held}"
    return text + "".join(f"  {one}" for one in _snapshot_texts(run.get("snapshots", [])))


def _snapshot_texts(snapshots: list[dict[str, Any]]) -> list[str]:
    """Return a text for each block behind which snapshots lie."""
    texts = []
    for depth, at in groupby(snapshots, lambda one: one["depth"]):
        kinds: dict[str, list[str]] = {}
        for one in at:
            kinds.setdefault(kind_of(one) + (", used" if one.get("used") else ""), []).append(one["tier"])
        found = "; ".join(f"{kind}: {' and '.join(tiers)}" for kind, tiers in kinds.items())
        texts.append(f"*{depth:,} ({found})")
    more = len(texts) - _MOST_SNAPSHOTS
    return [f"* {more:,} more", *texts[-_MOST_SNAPSHOTS:]] if more > 0 else texts
