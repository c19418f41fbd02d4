"""The weight files of a model on the disk, and whether they are whole."""

import json
import struct
from pathlib import Path
from typing import Any

from pagewise_shared.errors import ModelError

from pagewise_executor.models.quantised_checkpoint import INSTEAD


def weight_files(model: str, path: Path) -> list[Path]:
    """Return the files of the weights of ``model``, which lie in the directory ``path``.

    Raises:
        ModelError: there are none that can be read.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model directory: it has no config.json")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index} is unusable: {first_line(error)}") from error
        missing = [name for name in names if not (path / name).is_file()]
        if missing:
            raise ModelError(
                f"{path} lacks weight files that its index names: {', '.join(missing)}; download them again"
            )
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        others = [file.name for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
        if others and others[0].endswith(".gguf"):
            raise ModelError(f"{path} is a GGUF model ({others[0]}), which cannot be served; {INSTEAD}")
        raise ModelError(
            f"{model} has no weights that are loaded: no *.safetensors file in {path}{_convert(model, others)}"
        )
    return files


def _convert(model: str, others: list[str]) -> str:
    """Return how to make safetensors of files in PyTorch's own form, if there are any."""
    if not others:
        return ""
    return (
        f" (it has {', '.join(sorted(others)[:3])}: only safetensors are loaded); where you trust these files, convert "
        'them: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
        f"[c.from_pretrained('{model}').save_pretrained('converted') for c in (M, T)]\""
    )


def checked_header(file: Path) -> dict[str, Any]:
    """Return a file's header, by the names of its tensors.

    Its size is compared with the header, so that a truncated download is found before the model is loaded.

    Raises:
        ModelError: it is truncated, or no safetensors file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ModelError(f"{file} is truncated or no safetensors file ({size} bytes); download it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            end = max((t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is no safetensors file: its header cannot be read") from error
    if size < 8 + length + end:
        raise ModelError(f"{file} is truncated: {size} bytes of {8 + length + end}; download it again")
    return header


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type if it has none."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
