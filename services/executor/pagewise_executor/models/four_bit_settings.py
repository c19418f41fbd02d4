"""Reads from config.json how GPTQ, AWQ and ModelOpt (NVFP4) store linear layers in four bits."""

from pathlib import Path
from typing import Any

import msgspec

from pagewise_executor.models.four_bit_checkpoint import NVFP4_GROUP, FourBitScheme


class _Gptq(msgspec.Struct):
    """``quant_method: gptq``, as AutoGPTQ and GPTQModel write it. The files tell which layers are quantised."""

    bits: int
    group_size: int
    checkpoint_format: str = "gptq"
    pack_dtype: str = "int32"
    is_marlin_format: bool = False
    dynamic: dict[str, Any] | None = None


class _Awq(msgspec.Struct):
    """``quant_method: awq``, as AutoAWQ writes it, with both names of two keys. The files tell which layers are
    quantised."""

    version: str = "gemm"
    zero_point: bool = True
    bits: int | None = None
    w_bit: int | None = None
    group_size: int | None = None
    q_group_size: int | None = None


class _ModelOpt(msgspec.Struct):
    """``quant_method: modelopt``, as NVIDIA's ModelOpt writes it. The files tell which layers are quantised."""

    quant_algo: str | None = None
    group_size: int | None = None


class UnsupportedError(Exception):
    """A scheme that cannot be served; the text names it."""


def refuse(*errors: tuple[object, str]) -> None:
    """Raise ``UnsupportedError`` with the text of the first error whose condition holds."""
    for unsupported, text in errors:
        if unsupported:
            raise UnsupportedError(text)


def gptq_scheme(settings: dict[str, Any]) -> FourBitScheme:
    """Return how the layers of such a checkpoint are stored; the errors are ``UnsupportedError`` and msgspec's."""
    found = msgspec.convert(settings, _Gptq)
    # "-:" begins the patterns of modules that are not quantised, which the files tell too.
    others = [key for key, value in (found.dynamic or {}).items() if value and not key.startswith("-:")]
    refuse(
        (found.bits != 4, f"to {found.bits} bits"),
        (found.checkpoint_format not in ("gptq", "gptq_v2"), f"in the format {found.checkpoint_format}"),
        (found.is_marlin_format, "in the format marlin"),
        (found.pack_dtype != "int32", f"packed in {found.pack_dtype}"),
        (others, f"with other settings for some modules (dynamic: {', '.join(others)})"),
    )
    # The first format has zeros minus one.
    return FourBitScheme("gptq", _group_size(found.group_size), zero_offset=int(found.checkpoint_format == "gptq"))


def awq_scheme(settings: dict[str, Any]) -> FourBitScheme:
    """Return how the layers of such a checkpoint are stored; the errors are ``UnsupportedError`` and msgspec's."""
    found = msgspec.convert(settings, _Awq)
    bits, group = found.bits or found.w_bit, found.group_size or found.q_group_size
    refuse(
        (bits != 4, f"to {bits} bits"),
        (found.version.lower() != "gemm", f"in the version {found.version}"),
        (not found.zero_point, "without zero points"),
        (group is None, "without a group_size"),
    )
    return FourBitScheme("awq", _group_size(group or -1))


def modelopt_settings(file: Path) -> dict[str, Any]:
    """Return what ModelOpt's own file says of the quantisation."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]).get("quantization")
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def modelopt_scheme(settings: dict[str, Any]) -> FourBitScheme:
    """Return how the layers of such a checkpoint are stored; the errors are ``UnsupportedError`` and msgspec's."""
    found = msgspec.convert(settings, _ModelOpt)
    refuse(
        (found.quant_algo != "NVFP4", f"by {found.quant_algo}"),
        (found.group_size not in (None, NVFP4_GROUP), f"in groups of {found.group_size}"),
    )
    return FourBitScheme("modelopt", NVFP4_GROUP, zeros=False)


def _group_size(size: int) -> int:
    """Return the inputs of a group, 0 for all."""
    refuse((size < 1 and size != -1, f"in groups of {size}"))
    return max(size, 0)
