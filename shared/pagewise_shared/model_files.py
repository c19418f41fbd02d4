"""Where a model's files are: the bundled model, a directory, or a copy of a hub repository."""

import difflib
import errno
import logging
import os
import shutil
from pathlib import Path

from pagewise_shared.config import DEMO_MODEL, size_text
from pagewise_shared.errors import ModelError
from pagewise_shared.progress import logged_bar

log = logging.getLogger(__name__)

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB = "https://huggingface.co"


def resolve_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, remote_code: bool = False
) -> Path:
    """Return the directory with the model's files. A hub repository is downloaded first, unless it is in the cache.

    ``tokenizer_only`` leaves the weights out, which are downloaded as safetensors only. ``remote_code`` includes Python
    files.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached or refuses it.
    """
    if (path := local_model(model)) is not None:
        return path
    return _download(model, revision, _patterns(tokenizer_only, remote_code))


def local_model(model: str) -> Path | None:
    """Return the directory of a model that is on this machine, or None if ``model`` is a hub id.

    Raises:
        ModelError: it is neither.
    """
    if model == DEMO_MODEL:
        return Path(__file__).parent / "demo_model"
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model} is a file: a model is a directory with config.json, or a hub id; try {path.parent}")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or "/" not in model:
        raise ModelError(
            f"no such model: {model} is neither a directory nor a hub id (owner/name){_neighbour(path)}; without a "
            "model, `pagewise serve` serves the one that it brings"
        )
    return None


def fetch_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, remote_code: bool = False, bars: bool
) -> Path:
    """Do what ``resolve_model`` does, but look first whether the disk has room. ``bars``: draw how far the download is.

    Raises:
        ModelError: there is no such model, the hub cannot be reached or refuses it, or the disk has no room.
    """
    if (path := local_model(model)) is not None:
        return path
    patterns = _patterns(tokenizer_only, remote_code)
    _check_disk(model, revision, patterns)
    return _download(model, revision, patterns, bars=bars)


def _patterns(tokenizer_only: bool, remote_code: bool) -> list[str]:
    return [*_TEXT_FILES, *["*.safetensors"] * (not tokenizer_only), *["*.py"] * remote_code]


def _neighbour(path: Path) -> str:
    """Return a question that names the model directory beside ``path`` whose name is the most like its own."""
    try:
        names = [each.name for each in path.parent.iterdir() if (each / "config.json").is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, n=1)
    return f", did you mean {path.parent / near[0]}?" if near else ""


def _download(model: str, revision: str | None, patterns: list[str], *, bars: bool = False) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    bar = None if bars else logged_bar(log, f"downloading {model}")  # None: the library's own
    try:
        return Path(
            huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns, tqdm_class=bar)
        )
    except Exception as error:  # the client raises whatever its HTTP library raises
        token = huggingface_hub.get_token() is not None
        if isinstance(error, errors.GatedRepoError):
            raise ModelError(_gated(model, token)) from error
        if isinstance(error, errors.RevisionNotFoundError):
            raise ModelError(f"the hub has no revision {revision} of {model}: see {_HUB}/{model}/tree/main") from error
        if isinstance(error, errors.RepositoryNotFoundError):
            private = "" if token else "; if it is private, run `hf auth login`, or set HF_TOKEN"
            raise ModelError(
                f"the hub has no model {model}: look for its name at {_HUB}/models?search="
                f"{model.rpartition('/')[2]}{private}"
            ) from error
        if isinstance(error, errors.HFValidationError):
            raise ModelError(f"no such model: {model} is neither a directory nor a hub id (owner/name)") from error
        cache = huggingface_hub.constants.HF_HUB_CACHE
        match error.errno if isinstance(error, OSError) else None:
            case errno.ENOSPC | errno.EDQUOT:
                raise ModelError(
                    f"the disk of {cache} is full: set HF_HOME to a folder on a disk with room for {model}, or remove "
                    "models with `hf cache rm`"
                ) from error
            case errno.EACCES | errno.EPERM | errno.EROFS:
                raise ModelError(
                    f"{model} cannot be downloaded to {cache}, where this user may not write: set HF_HOME to a folder "
                    "of yours"
                ) from error
        raise ModelError(_unreachable(model, error)) from error


def _gated(model: str, token: bool) -> str:
    if token:
        return f"the hub keeps {model} gated, and your token has no access to it: ask for it at {_HUB}/{model}"
    return (
        f"the hub keeps {model} gated: ask for access at {_HUB}/{model}, then run `hf auth login`, or set HF_TOKEN to "
        "a token of yours"
    )


def _unreachable(model: str, error: Exception) -> str:
    cause = error.__cause__ or error
    reason = str(cause).strip().splitlines()[0] if str(cause).strip() else type(cause).__name__
    if os.environ.get("HF_HUB_OFFLINE"):
        return (
            f"{model} is no directory here, it is not in the cache, and the hub could not be reached (HF_HUB_OFFLINE "
            f"is set): unset it, or run `hf download {model}` where there is a network and copy the folder"
        )
    return (
        f"{model} is no directory here, it is not in the cache, and the hub could not be reached ({reason}): run "
        f"`hf download {model}` where there is a network, copy the folder, and give its path"
    )


def _check_disk(model: str, revision: str | None, patterns: list[str]) -> None:
    """Look whether the cache's disk has room for what is not in it yet.

    Raises:
        ModelError: it has not.
    """
    import huggingface_hub

    try:
        files = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=patterns, dry_run=True, tqdm_class=logged_bar(log, "looking")
        )
    except Exception:  # the download says what is wrong
        return
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if missing > (free := shutil.disk_usage(there).free):
        raise ModelError(
            f"the disk is too full for {model}: {size_text(missing)} are to be downloaded to {cache}, and "
            f"{size_text(free)} are free: set HF_HOME to a folder on a larger disk, or remove models with `hf cache rm`"
        )
