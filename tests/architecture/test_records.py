"""The results that are kept say where they come from."""

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import record

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def test_kept_results_are_of_a_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept, elsewhere = str(RESULTS / "new.json"), str(tmp_path / "new.json")
    monkeypatch.setattr(record, "_is_changed", lambda: True)
    assert record.record_file(elsewhere) == elsewhere
    with pytest.raises(argparse.ArgumentTypeError, match="commit"):
        record.record_file(kept)
    monkeypatch.setattr(record, "_is_changed", lambda: False)
    assert record.record_file(kept) == kept


def test_a_record_says_the_command_without_folders_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "new.json"
    script = RESULTS.parent / "start" / "run.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--rounds", "3", "--json", str(file), f"--model={tmp_path}/model"])
    record.write_record(str(file), {"rows": []}, device="cpu")
    written = json.loads(file.read_text())
    assert written["command"] == "python -m benchmarks.start.run --rounds 3 --json new.json --model=model"
    assert written["machine"]["device"] == "cpu"


@pytest.mark.parametrize("name", sorted(path.name for path in RESULTS.glob("*.json")))
def test_kept_results_name_no_folder_of_a_machine(name: str) -> None:
    command = json.loads((RESULTS / name).read_text())["command"]
    assert not [argument for argument in command.split() if argument.startswith("/")]
