"""Goals for an H200, predictions from compiled code, and their measurements in the records of the first hour.

Predictions are from docs/performance.md. Only the standard library is imported here.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Row = Mapping[str, Any]


class Goal(NamedTuple):
    """``value``: to be reached or exceeded; with ``less``, not to be exceeded. ``predicted``: None if nothing is.

    ``step``: whose record has the row, which has the values ``row``. ``field``: the measured value; with ``beside``, as
    a part of the same field of the row with these values.
    """

    what: str
    unit: str
    value: float
    predicted: float | None
    step: str
    row: Mapping[str, Any]
    field: str
    less: bool = False
    beside: Mapping[str, Any] | None = None


def _engine(work: str, value: float, predicted: float | None = None, who: str = "pagewise") -> Goal:
    weights = "FP8 weights" if who.endswith("fp8") else "bfloat16"
    field = "rate" if work.startswith("prefill") else "decoding"
    row = {"work": work, "who": who}
    return Goal(f"Llama-3-8B, {weights}, {work}", "tokens/s", value, predicted, "engine-llama-3-8b", row, field)


def _kernel(name: str, what: str, unit: str, value: float, field: str = "rate", **more: Any) -> Goal:
    row = {"name": name, "who": "pagewise"}
    return Goal(what, unit, value, None, f"kernels-{name.partition(' ')[0]}", row, field, **more)


_FP8 = "pagewise, fp8"
_DECODE = "decode 64 x 2048"

GOALS = (
    _engine("decode 1", 240, 223),
    _engine("decode 64", 9_900, 9_990),
    _engine("decode 256", 17_300, 16_300),
    _engine("prefill 4096", 46_000, 42_900),
    _engine("prefill 32768", 33_000, 30_100),
    _engine("decode 1", 350, 341, _FP8),
    _engine("decode 64", 13_000, 12_800, _FP8),
    _engine("decode 256", 21_000, 19_000, _FP8),
    Goal(
        "Llama-3-8B, start, nothing compiled before", "s", 12, None, "engine-llama-3-8b",
        {"work": "decode 1", "who": "pagewise"}, "start_seconds", less=True,
    ),
    _kernel("decode 1 x 1024", "decode attention, batch 1, 1k", "µs", 6.5, "microseconds", less=True),
    _kernel(f"{_DECODE}, float8 KV", "decode attention, float8 KV", "GB/s", 3_500),
    _kernel(
        f"{_DECODE}, deterministic", "deterministic decode attention of plain", "times", 0.8,
        beside={"name": _DECODE, "who": "pagewise"},
    ),
    _kernel("prefill 4096", "prefill attention, 4k", "TFLOP/s", 550),
    _kernel("prefill 32768", "prefill attention, 32k", "TFLOP/s", 550),
    *(
        Goal(
            f"recovery of {tokens:,} tokens, auto over the best", "times", 1.05, None, "recovery", {"tokens": tokens},
            "auto_over_best", less=True,
        )
        for tokens in (256, 4096, 32_768)
    ),
)  # fmt: skip


class Result(NamedTuple):
    """A goal beside the measured value, None if there is none."""

    what: str
    unit: str
    goal: float
    measured: float | None
    predicted: float | None
    reached: bool | None


def results(folder: Path, label: str, commit: str) -> list[Result]:
    """Compare the goals with the records in a folder that are of the device ``label`` and of this commit."""
    found = []
    for goal in GOALS:
        path = folder / f"{goal.step}-{label}.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        rows: list[Row] = record.get("rows", []) if record.get("commit") == commit else []
        measured = _value(rows, goal.row, goal.field)
        if goal.beside is not None and measured is not None:
            other = _value(rows, goal.beside, goal.field)
            measured = measured / other if other else None
        reached = None if measured is None else measured <= goal.value if goal.less else measured >= goal.value
        found.append(Result(goal.what, goal.unit, goal.value, measured, goal.predicted, reached))
    return found


def _value(rows: Iterable[Row], wanted: Row, field: str) -> float | None:
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()) and row.get(field) is not None:
            return float(row[field])
    return None


def table(found: Iterable[Result]) -> str:
    """Return the results as text: name, goal, measured, predicted."""
    lines = [f"{'':<52}{'goal':>10}{'measured':>11}{'predicted':>11}"]
    for result in found:
        values = [_shown(result.goal), _shown(result.measured), _shown(result.predicted)]
        mark = {True: "reached", False: "missed", None: ""}[result.reached]
        lines.append(f"{result.what:<52}{values[0]:>10}{values[1]:>11}{values[2]:>11} {result.unit:<9}{mark}".rstrip())
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
