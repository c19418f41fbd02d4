"""The sources of a model's files, and the errors when there are none. No network: the hub is faked."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that would have been sent to the hub."""
    asked: list[dict[str, Any]] = []

    def download(model: str, **options: Any) -> str:
        asked.append({"model": model, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def hub_fails_with(monkeypatch: pytest.MonkeyPatch, kind: type[Exception], text: str) -> None:
    error = kind.__new__(kind, text)  # their constructors want an HTTP response
    error.args = (text,)

    def fail(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


def test_the_demo_model_is_bundled() -> None:
    directory = resolve_model("pagewise-demo")
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {path.name for path in directory.iterdir()}
    assert (directory / "model.safetensors").stat().st_size <= 8 * 2**20


def test_a_directory_is_itself(tmp_path: Path, downloads: list[dict[str, Any]]) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert not downloads


@pytest.mark.parametrize("name", ["/no/such/model", "./models/none", "~/none", "a/b/c", "word"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(name: str, downloads: list[dict[str, Any]]) -> None:
    with pytest.raises(ModelError, match=name):
        resolve_model(name)
    assert not downloads


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_only_what_is_needed_is_downloaded(downloads: list[dict[str, Any]]) -> None:
    resolve_model("owner/name", "v1")
    resolve_model("owner/name", tokenizer_only=True)
    resolve_model("owner/name", remote_code=True)
    assert [asked["model"] for asked in downloads] == ["owner/name"] * 3
    assert [asked["revision"] for asked in downloads] == ["v1", None, None]
    weights, tokenizer, code = (set(asked["allow_patterns"]) for asked in downloads)
    assert weights - tokenizer == {"*.safetensors"}
    assert code - weights == {"*.py"}
    assert not {"*.bin", "*.pt", "*"} & code


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (errors.GatedRepoError, "gated"),
        (errors.RepositoryNotFoundError, "the hub has no model owner/name"),
        (errors.RevisionNotFoundError, "no revision v9 of owner/name"),
        (errors.LocalEntryNotFoundError, r"could not be reached \(first line\): run `hf download owner/name`"),
        (ConnectionError, r"could not be reached \(first line\): run `hf download owner/name`"),
    ],
)
def test_the_hubs_errors_become_one_plain_line(
    kind: type[Exception], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    hub_fails_with(monkeypatch, kind, "first line\nsecond line")
    with pytest.raises(ModelError, match=reason) as failure:
        resolve_model("owner/name", "v9")
    assert "\n" not in str(failure.value)
