"""The kernel reads weight files while Python imports torch."""

import subprocess
import threading
from pathlib import Path

import pytest
from pagewise_executor import read_ahead as module
from pagewise_executor.read_ahead import read_ahead

from tests.model_builders import build_model


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], int]]:
    """The processes that have read ahead, with their exit codes."""
    found: list[tuple[list[str], int]] = []
    call = subprocess.call
    monkeypatch.setattr(subprocess, "call", lambda command: found.append((command, call(command))))
    return found


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "read ahead":
            thread.join()


def test_all_weight_files_are_read_in_a_process_of_its_own(tmp_path: Path, ended: list[tuple[list[str], int]]) -> None:
    build_model("llama", tmp_path)
    (tmp_path / "a.safetensors").write_bytes(bytes(300_000))
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    read_ahead(tmp_path)
    wait()
    ((command, code),) = ended
    assert code == 0
    assert [Path(word).name for word in command[-2:]] == ["a.safetensors", "model.safetensors"]


def test_weights_that_do_not_fit_into_memory_are_not_read_ahead(
    tmp_path: Path, ended: list[tuple[list[str], int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model("llama", tmp_path)
    monkeypatch.setattr(module, "_available", lambda: 1000)
    read_ahead(tmp_path)
    wait()
    assert not ended
