"""The files of a model: finding or downloading their directory, and reading its special tokens."""

import difflib
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from pagewise_shared.config import DEMO_MODEL, size_text
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_model import gguf_files, gguf_folder, make_folder
from pagewise_shared.json_errors import why_not_json
from pagewise_shared.progress import logged_bar

log = logging.getLogger(__name__)

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]
_HUB = "https://huggingface.co"


def resolve_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, remote_code: bool = False
) -> Path:
    """Return the directory with the model's files. A hub repository is downloaded first, unless it is in the cache.

    ``tokenizer_only``: without the weights, of which only safetensors are downloaded. ``remote_code``: with Python
    files.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached or refuses it.
    """
    if local_model(model) is not None:
        return _with_folder(_path(model))
    return _of_hub(model, _download(model, revision, _patterns(model, tokenizer_only, remote_code)))


def local_model(model: str) -> Path | None:
    """Return the directory of a model that is on this machine, or None if ``model`` is a hub id.

    The directory of a GGUF model need not be there before ``resolve_model`` has made it.

    Raises:
        ModelError: it is neither.
    """
    path = _path(model)
    if files := gguf_files(path):
        return gguf_folder(files)
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


def _path(model: str) -> Path:
    return Path(__file__).parent / "demo_model" if model == DEMO_MODEL else Path(model).expanduser()


def _with_folder(path: Path) -> Path:
    """Return the directory at ``path``, or that which is made for a GGUF model there."""
    return make_folder(files) if (files := gguf_files(path)) else path


def _of_hub(model: str, snapshot: Path) -> Path:
    """Return the directory of a model that has been downloaded to ``snapshot``.

    Raises:
        ModelError: its repository has no GGUF file of the format behind the colon, or several.
    """
    if not (form := model.partition(":")[2]):
        return snapshot
    found = sorted(file for pattern in _forms(form) for file in snapshot.rglob(pattern))
    files = gguf_files(found[0]) if found else []
    if not files or set(found) != set(files):
        names = ", ".join(file.name for file in found) or "none"
        raise ModelError(f"one GGUF model whose name ends with {form} is wanted in {model}, and there is {names}")
    return make_folder(files)


def _forms(form: str) -> list[str]:
    """Return the patterns of the names of GGUF files of a format, whole or split."""
    return [f"*{form}.gguf", f"*{form}-00*.gguf"]


def fetch_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, remote_code: bool = False, bars: bool
) -> Path:
    """Check that the disk has room, then ``resolve_model``. ``bars``: draw progress bars.

    Raises:
        ModelError: there is no such model, the hub cannot be reached or refuses it, or the disk has no room.
    """
    if local_model(model) is not None:
        return _with_folder(_path(model))
    patterns = _patterns(model, tokenizer_only, remote_code)
    _check_disk(model, revision, patterns)
    return _of_hub(model, _download(model, revision, patterns, bars=bars))


def _patterns(model: str, tokenizer_only: bool, remote_code: bool) -> list[str]:
    """Return the patterns of the files of a hub id that are downloaded.

    Behind a colon it has the format of a GGUF model, whose tokenizer is in the file.
    """
    if form := model.partition(":")[2]:
        return _forms(form)
    return [*_TEXT_FILES, *["*.safetensors"] * (not tokenizer_only), *["*.py"] * remote_code]


def _neighbour(path: Path) -> str:
    """Suggest the model directory beside ``path`` with the most similar name."""
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
    repository = model.partition(":")[0]
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=patterns, tqdm_class=bar)
        )
    except Exception as error:  # the client raises the errors of its HTTP library too
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
    """Check that the cache's disk has room for the files that are not in it yet."""
    import huggingface_hub

    try:
        files = huggingface_hub.snapshot_download(
            model.partition(":")[0], revision=revision, allow_patterns=patterns, dry_run=True,
            tqdm_class=logged_bar(log, "looking"),
        )  # fmt: skip
    except Exception:  # the download raises the error
        return
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE)
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if missing > (free := shutil.disk_usage(there).free):
        raise ModelError(
            f"the disk is too full for {model}: {size_text(missing)} are to be downloaded to {cache}, and "
            f"{size_text(free)} are free: set HF_HOME to a folder on a larger disk, or remove models with `hf cache rm`"
        )


# ---- special tokens ----------------------------------------------------------------------------------


def end_token_ids(path: Path, token_to_id: Callable[[str], int | None]) -> frozenset[int]:
    """Return the end-of-sequence tokens of the model in a directory.

    ``token_to_id``: returns the id of a token's text, None if there is none.

    Raises:
        ModelError: a file cannot be read.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        found |= token_ids(read_json(path / name).get("eos_token_id"))
    named = tokenizer_settings(path).get("eos_token")
    if (text := token_text(named)) is not None and (token_id := token_to_id(text)) is not None:
        found.add(token_id)
    return frozenset(found)


def token_ids(value: Any) -> frozenset[int]:
    """Return the tokens in a value of these files: an id, a list of ids, or null."""
    ids = value if isinstance(value, list) else [value]
    return frozenset(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)


def tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the tokenizer in the files beside tokenizer.json.

    Raises:
        ModelError: a file cannot be read.
    """
    return read_json(path / "special_tokens_map.json") | read_json(path / "tokenizer_config.json")


def untyped_special_tokens(path: Path) -> dict[str, Any]:
    """Return the special tokens that these files have as objects without a type, as texts, by their names; for a list
    or an object of tokens, all of it.

    Older files have such objects. transformers refuses them in the file, and accepts the texts as arguments.

    Raises:
        ModelError: the file cannot be read.
    """
    settings = read_json(path / "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:  # otherwise transformers does not read this file
        listed = read_json(path / "special_tokens_map.json").get("additional_special_tokens")
        settings |= {"additional_special_tokens": listed} if listed else {}
    found = {name: _without_object(token) for name, token in settings.items() if name.endswith("_token")}
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(tokens := settings.get(name), list):
            found[name] = list(map(_without_object, tokens))
        elif isinstance(tokens, dict):
            found[name] = {key: _without_object(token) for key, token in tokens.items()}
    return {name: value for name, value in found.items() if value != settings[name]}


def _without_object(token: Any) -> Any:
    """Return the text of a token that is an object without a type; any other token unchanged."""
    is_untyped = isinstance(token, dict) and "__type" not in token and token_text(token) is not None
    return token_text(token) if is_untyped else token


def token_text(value: Any) -> str | None:
    """Return the text of a token in these files: the token is a string, or an object with the string as its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is no such file.

    Raises:
        ModelError: the file cannot be read.
    """
    if not path.is_file():
        return {}
    text = b""
    try:
        return msgspec.json.decode(text := path.read_bytes(), type=dict[str, Any])
    except (msgspec.ValidationError, UnicodeDecodeError, OSError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read: {why_not_json(text, error)}") from error
