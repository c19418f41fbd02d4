"""Where a model's files are: the bundled model, a directory, or a copy of a hub repository."""

import os
from pathlib import Path

from pagewise_shared.config import DEMO_MODEL
from pagewise_shared.errors import ModelError

_TEXT_FILES = ["*.json", "*.jinja", "*.model", "*.txt"]


def resolve_model(
    model: str, revision: str | None = None, *, tokenizer_only: bool = False, remote_code: bool = False
) -> Path:
    """Return the directory with the model's files. A hub repository is downloaded first, unless it is in the cache.

    ``tokenizer_only`` leaves the weights out, which are downloaded as safetensors only. ``remote_code`` includes Python
    files.

    Raises:
        ModelError: there is no such model, or the hub cannot be reached or refuses it.
    """
    if model == DEMO_MODEL:
        return Path(__file__).parent / "demo_model"
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelError(f"{model} is a file: a model is a directory with config.json, or a hub id")
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or "/" not in model:
        raise ModelError(f"no such model: {model} is neither a directory nor a hub id (owner/name)")
    patterns = [*_TEXT_FILES]
    if not tokenizer_only:
        patterns.append("*.safetensors")
    if remote_code:
        patterns.append("*.py")
    return _download(model, revision, patterns)


def _download(model: str, revision: str | None, patterns: list[str]) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(model, revision=revision, allow_patterns=patterns))
    except errors.GatedRepoError as error:
        raise ModelError(f"the hub keeps {model} gated: ask for access, and set HF_TOKEN") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise ModelError(f"the hub has no model {model}{f' at {revision}' if revision else ''}") from error
    except Exception as error:  # the client raises whatever its HTTP library raises
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{model} is no directory here, and the hub could not be reached{offline}: {reason}"
        ) from error
