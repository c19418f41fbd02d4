"""The weight files of a model on the disk, and whether they are whole."""

import json
import logging
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pagewise_shared.errors import ModelError
from safetensors import SafetensorError, safe_open

from pagewise_executor.models.quantised_checkpoint import INSTEAD

log = logging.getLogger(__name__)

Headers = Mapping[Path, Mapping[str, Any]]
"""Of each weight file: by the name of a tensor, its dtype and shape."""
_POINTER = b"version "
"""How the small text begins that Git LFS has in the place of a file. As the size of a header it would be absurd."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a checkpoint that is not divided, and that which says where the tensors of a divided one are."""


def weight_files(model: str, path: Path) -> list[Path]:
    """Return the files of the weights of ``model``, which lie in the directory ``path``.

    As in transformers, a single file goes before an index, which may be left from an earlier download.

    Raises:
        ModelError: there are none that can be read.
    """
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model directory: it has no config.json")
    index = path / INDEX
    if (path / SINGLE).is_file():
        if index.is_file():
            log.warning("%s has %s as well as %s: only the former is read", path, SINGLE, INDEX)
        return [path / SINGLE]
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            if not names or not all(isinstance(name, str) for name in names):
                raise ValueError("its weight_map names no files")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
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


def checked_headers(files: Iterable[Path]) -> dict[Path, dict[str, Any]]:
    """Return the header of each file, by the names of its tensors. A tensor that two files have is in the first alone.

    Raises:
        ModelError: a file is truncated, or no safetensors file, or two files have different tensors of one name.
    """
    headers: dict[Path, dict[str, Any]] = {}
    places: dict[str, Path] = {}
    for file in files:
        header = _checked_header(file)
        for name in [name for name in header if name in places]:
            if _content(file, header[name]) != _content(places[name], headers[places[name]][name]):
                raise ModelError(f"{places[name]} and {file} have different tensors {name}: remove that which is stale")
            del header[name]
        places |= dict.fromkeys(header, file)
        headers[file] = header
    return headers


def _content(file: Path, tensor: dict[str, Any]) -> tuple[object, ...]:
    """Return type, shape and bytes of a tensor."""
    start, end = tensor["data_offsets"]
    with file.open("rb") as stream:
        length = struct.unpack("<Q", stream.read(8))[0]
        stream.seek(8 + length + start)
        return tensor["dtype"], tensor["shape"], stream.read(end - start)


def _checked_header(file: Path) -> dict[str, Any]:
    """Return a file's header, by the names of its tensors.

    Its size is compared with the header, so that a truncated download is found before the model is loaded.

    Raises:
        ModelError: it is truncated, or no safetensors file, or cannot be read.
    """
    try:
        stream = file.open("rb")
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    with stream:
        size = file.stat().st_size
        start = stream.read(8)
        if start == _POINTER:
            raise ModelError(f"{file} is a pointer of Git LFS, and not the weights: run git lfs pull")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > size - 8:
            raise ModelError(f"{file} is truncated or no safetensors file ({size} bytes); download it again")
        try:
            header: dict[str, Any] = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
            if not all(isinstance(t["dtype"], str) and math.prod(t["shape"]) >= 0 for t in header.values()):
                raise ValueError("a type or a shape is none")
            whole = 8 + length + end
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{file} is no safetensors file: its header cannot be read") from error
    if size < whole:
        raise ModelError(f"{file} is truncated: {size} bytes of {whole}; download it again")
    return header


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a file to read tensors.

    Raises:
        ModelError: safetensors refuses the file, or a tensor in it; the text names the file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be loaded: {first_line(error)}; download it again") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the next one if it announces that; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])
