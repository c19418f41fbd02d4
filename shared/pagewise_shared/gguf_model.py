"""Models in GGUF files: finding the files, and making a folder with their configuration and tokenizer beside a cache.

The folder has the files that other models have, links to the GGUF files, and a table of their tensors, so that all
services read it as they read other models. The package gguf reads the files, and transformers makes the tokenizer. That
takes seconds, and is done once for each file.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_config import config_of
from pagewise_shared.gguf_tokenizer import write_tokenizer

log = logging.getLogger(__name__)

TABLE = "gguf.json"
"""The name of the table in the folder."""
FORM = 1
"""Of folders. Folders of another form are not read."""
_SPLIT = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf$")


class GgufTensor(msgspec.Struct, frozen=True):
    """A tensor of a file: its format ``kind``, its ``shape``, and its first byte and number of bytes in the file."""

    file: str
    kind: str
    shape: list[int]
    start: int
    size: int


class GgufTable(msgspec.Struct, frozen=True):
    """The tensors of a model by their names. ``sizes``: of its files, by their names, in bytes."""

    architecture: str
    sizes: dict[str, int]
    tensors: dict[str, GgufTensor]


def gguf_files(path: Path) -> list[Path]:
    """Return the files of the GGUF model at ``path``: a file, or a folder that has one model; none if it has no such.

    Raises:
        ModelError: the folder has several, or files of a model that is split are missing.
    """
    files = [path] if path.suffix == ".gguf" and path.is_file() else []
    if path.is_dir() and not (path / "config.json").is_file():
        # Files that begin so have the encoder of images of a model.
        files = [file for file in sorted(path.glob("*.gguf")) if not file.name.startswith("mmproj")]
    if not files:
        return []
    if (split := _SPLIT.match(files[0].name)) is not None:
        whole = [files[0].with_name(f"{split[1]}-{n + 1:05}-of-{split[2]}.gguf") for n in range(int(split[2]))]
        if missing := [file.name for file in whole if not file.is_file()]:
            raise ModelError(f"{path} is split, and files are missing: {', '.join(missing)}")
        if set(files) <= set(whole):
            return whole
    if len(files) > 1:
        raise ModelError(f"{path} has several GGUF models, give one: {', '.join(file.name for file in files)}")
    return files


def gguf_folder(files: Iterable[Path]) -> Path:
    """Return the path of the folder of a model in these files, which need not be there yet.

    It is beside the hub's cache, on whose disk other models are.
    """
    found = [(str(file.absolute()), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    digest = hashlib.sha256(f"{FORM} {found}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    home = Path(os.environ.get("HF_HOME") or cache).expanduser()
    return home / "pagewise" / f"{Path(found[0][0]).stem}-{digest}"


def make_folder(files: list[Path]) -> Path:
    """Return the folder of a model in these files, which is made if it is not there.

    Raises:
        ModelError: a file is damaged or of a model that is not served, or the folder cannot be written.
    """
    folder = gguf_folder(files)
    if folder.is_dir():
        return folder
    log.info("reading configuration and tokenizer of %s", files[0])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".", dir=folder.parent))
    except OSError as error:
        raise ModelError(
            f"{files[0]}: its configuration cannot be written to {folder.parent} ({error.strerror}): set HF_HOME to a "
            "folder of yours"
        ) from error
    try:
        _fill(made, files)
        made.chmod(0o755)
        try:
            made.rename(folder)
        except OSError:  # another process has made it
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def read_table(folder: Path) -> GgufTable | None:
    """Return the table of a folder that ``make_folder`` has made; None: it is another folder.

    Raises:
        ModelError: the table cannot be read, or a file has changed.
    """
    if not (folder / TABLE).is_file():
        return None
    try:
        table = msgspec.json.decode((folder / TABLE).read_bytes(), type=GgufTable)
        changed = [name for name, size in table.sizes.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder / TABLE} cannot be read: {error}") from error
    if changed:
        raise ModelError(f"{folder / changed[0]} has changed since the executor started")
    return table


def _fill(folder: Path, files: list[Path]) -> None:
    fields: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    for file in files:
        found, own = _read(file)
        fields = found | fields  # all that is not about a part is in the first one
        if twice := own.keys() & tensors.keys():
            raise ModelError(f"{file} has a tensor of another file again: {min(twice)}")
        tensors |= own
        (folder / file.name).symlink_to(file.absolute())
    parts = fields.get("split.count") or 1
    if parts != len(files):
        raise ModelError(f"{files[0]} is one of {parts} files, and the others are not named as parts of it")
    config = config_of(str(files[0]), fields, {name: tensor.shape for name, tensor in tensors.items()},
                       _factors(files, tensors))  # fmt: skip
    if any(tensor.kind not in ("F32", "F16", "BF16") for tensor in tensors.values()):
        config["quantization_config"] = {"quant_method": "gguf"}  # which other services know quantised models by
    write_tokenizer(folder, files[0], fields, config["vocab_size"])
    ends = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    generation = {"eos_token_id": sorted({end for end in ends if end is not None})}
    table = GgufTable(fields["general.architecture"], {file.name: file.stat().st_size for file in files}, tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / TABLE).write_bytes(msgspec.json.encode(table))


def _read(file: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the fields of a file, without its vocabulary, and its tensors."""
    try:
        import gguf
    except ImportError as error:
        raise ModelError(f"{file}: GGUF files need a package that is not installed: pip install gguf") from error
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file} is no GGUF file: it does not begin with GGUF")
    try:
        reader = gguf.GGUFReader(file)
        fields = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("tokenizer.") or len(field.data) == 1
        }
    except Exception as error:  # of numpy, of any kind, where the file ends too early
        raise ModelError(f"{file} is truncated or damaged ({error}): download it again") from error
    if reader.endianess != gguf.GGUFEndian.LITTLE:
        raise ModelError(f"{file} is for machines of the other byte order (big-endian)")
    tensors = {
        tensor.name: GgufTensor(
            file.name, tensor.tensor_type.name, tensor.shape[::-1].tolist(), tensor.data_offset, tensor.n_bytes
        )
        for tensor in reader.tensors
    }
    return fields, tensors


def _factors(files: list[Path], tensors: dict[str, GgufTensor]) -> list[float] | None:
    """Return by how much slower each pair of dimensions turns in RoPE, which Llama 3.1 and later have as a tensor."""
    import numpy as np

    if (found := tensors.get("rope_freqs.weight")) is None:
        return None
    file = next(file for file in files if file.name == found.file)
    factors: list[float] = np.fromfile(file, np.float32, found.size // 4, offset=found.start).tolist()
    return factors
