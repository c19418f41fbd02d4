"""``docs/replay.md`` names every field that ``pagewise replay`` prints, and no other."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "replay.md"


def paths(value: dict[str, Any], prefix: str = "") -> set[str]:
    """The fields of an object and of its inner objects, with dots between their names."""
    found = set()
    for name, inner in value.items():
        found |= {prefix + name}
        if isinstance(inner, dict):
            found |= paths(inner, f"{prefix}{name}.")
    return found


def test_every_field_is_told_of(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 8, "hash_ids": [1, 2]}
    trace.write_text("".join(json.dumps(line | {"timestamp": time}) + "\n" for time in (0, 500)))
    command = [sys.executable, "-m", "pagewise.main", "replay", str(trace), "--kv-tokens", "100k"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    printed = paths(json.loads(done.stdout))
    rows = re.findall(r"^\| (`.*?`) \|", DOCUMENT.read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([\w.]+)`", row)}
    assert told <= printed, "what is told of is printed"
    untold = {field for field in printed if not any(field == name or field.startswith(f"{name}.") for name in told)}
    assert all(any(name.startswith(f"{field}.") for name in told) for field in untold), "and the other way round"
