"""The weight files of a model on the disk, and whether they are complete."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_model import read_table
from safetensors import SafetensorError, safe_open

from pagewise_executor.models.gguf_file import OpenedGguf, tensors_of

log = logging.getLogger(__name__)

_POINTER = b"version "
"""The beginning of a pointer file of Git LFS. As the size of a header it would be absurd."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""The file of a checkpoint that is not divided, and the index of a divided one: from its tensors to their files."""


class TensorInfo(msgspec.Struct, frozen=True):
    """A tensor as the header of its file describes it. ``data_offsets``: its bytes, from the header's end."""

    dtype: str
    shape: list[Annotated[int, msgspec.Meta(ge=0)]]
    data_offsets: tuple[int, int] = (0, 0)


Headers = Mapping[Path, Mapping[str, TensorInfo]]
"""The tensors of each weight file, by their names."""


class FileTensor(NamedTuple):
    """A tensor of a weight file, and its name there."""

    file: Path
    name: str
    info: TensorInfo


class _Index(msgspec.Struct):
    weight_map: Annotated[dict[str, str], msgspec.Meta(min_length=1)]


def weight_files(model: str, path: Path) -> list[Path]:
    """Return the files of the weights of ``model``, which lie in the directory ``path``.

    As in transformers, a single file goes before an index, which may be left from an earlier download.

    Raises:
        ModelError: no file can be read.
    """
    if (table := read_table(path)) is not None:
        return [path / name for name in sorted(table.sizes)]
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model directory: it has no config.json")
    is_indexed = (path / INDEX).is_file()
    if (path / SINGLE).is_file():
        if is_indexed:
            log.warning("%s has %s as well as %s: only the former is read", path, SINGLE, INDEX)
        return [path / SINGLE]
    files = [path / name for name in sorted(set(read_index(path).values()))] if is_indexed else []
    if missing := [file.name for file in files if not file.is_file()]:
        raise ModelError(f"{path} lacks weight files that its index names: {', '.join(missing)}; download them again")
    if not (files := files or sorted(path.glob("*.safetensors"))):
        raise ModelError(_no_weights(model, path))
    return files


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor by the index of the directory ``path``.

    Raises:
        ModelError: the index cannot be read, or is of another form.
    """
    try:
        return msgspec.json.decode((path / INDEX).read_bytes(), type=_Index).weight_map
    except (OSError, ValueError) as error:
        raise ModelError(f"{path / INDEX} is unusable: {first_line(error)}") from error


def _no_weights(model: str, path: Path) -> str:
    """Return why a directory without safetensors is refused, and how to convert files in PyTorch's own form."""
    others = [file.name for pattern in ("*.gguf", "*.bin", "*.pt", "*.pth") for file in path.glob(pattern)]
    if others and others[0].endswith(".gguf"):
        return (
            f"{path} has a config.json and no safetensors; to serve its GGUF model, give the file: {path / others[0]}"
        )
    text = f"{model} has no weights that are loaded: no *.safetensors file in {path}"
    if others:
        text += (
            f" (it has {', '.join(sorted(others)[:3])}: only safetensors are loaded); where you trust these files, "
            'convert them: python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
            f"[c.from_pretrained('{model}').save_pretrained('converted') for c in (M, T)]\""
        )
    return text


def checked_headers(files: Iterable[Path]) -> dict[Path, dict[str, TensorInfo]]:
    """Return the header of each file, by the names of its tensors. A tensor that two files have is in the first alone.

    Raises:
        ModelError: a file is truncated, or no safetensors file, or two files have different tensors of one name.
    """
    headers: dict[Path, dict[str, TensorInfo]] = {}
    first_files: dict[str, Path] = {}
    for file in files:
        header = _gguf_header(file) if file.suffix == ".gguf" else _checked_header(file)
        for name in header.keys() & first_files.keys():
            if _content(file, name) != _content(first_files[name], name):
                raise ModelError(
                    f"{first_files[name]} and {file} have different tensors {name}: remove that which is stale"
                )
            del header[name]
        first_files |= dict.fromkeys(header, file)
        headers[file] = header
    return headers


def _gguf_header(file: Path) -> dict[str, TensorInfo]:
    """Return the header of a GGUF file. A tensor in blocks has its format as its type."""
    return {
        name: TensorInfo(tensor.kind, tensor.shape, (tensor.start, tensor.start + tensor.size))
        for name, tensor in tensors_of(file).items()
    }


def _content(file: Path, name: str) -> tuple[object, ...]:
    with open_weights(file) as opened:
        tensor = opened.get_tensor(name)
    return tensor.dtype, tensor.shape, tensor.flatten().view(torch.uint8).numpy().tobytes()


def _checked_header(file: Path) -> dict[str, TensorInfo]:
    """Return a file's header, by the names of its tensors, after the size of the file has been compared with it.

    Raises:
        ModelError: it is truncated, or no safetensors file, or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            size, start = file.stat().st_size, stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if length <= size - 8 else b""
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if start == _POINTER:
        raise ModelError(f"{file} is a pointer of Git LFS, and not the weights: run git lfs pull")
    if len(start) < 8 or length > size - 8:
        raise ModelError(f"{file} is truncated or no safetensors file ({size} bytes); download it again")
    try:
        header = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        found = {name: msgspec.json.decode(raw, type=TensorInfo) for name, raw in header.items()}
    except ValueError as error:
        raise ModelError(f"{file} is no safetensors file: its header cannot be read") from error
    whole = 8 + length + max((tensor.data_offsets[1] for tensor in found.values()), default=0)
    if size < whole:
        raise ModelError(f"{file} is truncated: {size} bytes of {whole}; download it again")
    return found


@contextmanager
def open_weights(file: Path) -> Iterator[Any]:
    """Open a file to read tensors.

    Raises:
        ModelError: safetensors refuses the file, or a tensor in it; the text names the file.
    """
    if file.suffix == ".gguf":
        yield OpenedGguf(file)
        return
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise ModelError(f"{file} cannot be loaded: {first_line(error)}; download it again") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, with the next one if it announces that; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[: 1 + lines[0].endswith(":")])


def named(error: BaseException) -> str:
    """Return the type of an error, and the first line of its text, which may say little without it."""
    line = first_line(error)
    kind = type(error).__name__
    return line if line == kind else f"{kind}: {line}"


MXFP4_WEIGHTS, MXFP4_SCALES = "_proj_blocks", "_proj_scales"
"""Ends of the names of the tensors of experts in MXFP4, bytes of two weights each, and the exponents of 32 weights."""
