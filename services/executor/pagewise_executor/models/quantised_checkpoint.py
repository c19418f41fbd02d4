"""Reads from config.json how the weights of a checkpoint are quantised, and refuses unsupported schemes by name.

These forms are read: compressed-tensors, as llm-compressor writes it; ``quant_method: fp8``, which DeepSeek and Qwen
(scales per block) and AutoFP8 (scales per tensor) write; FP8 of ModelOpt; and in four bits GPTQ, AWQ and ModelOpt's
NVFP4 (``four_bit_settings``). The experts of gpt-oss are in MXFP4.
docs/quantization.md lists all of them.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
import torch
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_model import read_table

from pagewise_executor.models.four_bit_checkpoint import NVFP4_GROUP, FourBitScheme
from pagewise_executor.models.four_bit_settings import (
    UnsupportedError,
    awq_scheme,
    gptq_scheme,
    modelopt_scheme,
    modelopt_settings,
    refuse,
)
from pagewise_executor.models.quantised_weight import FP8, Inputs

if TYPE_CHECKING:
    from pagewise_executor.models.gguf_checkpoint import GgufScheme

log = logging.getLogger(__name__)

INSTEAD = (
    "take a checkpoint in FP8 or int8 of compressed-tensors, in FP8 of quant_method 'fp8', in four bits of GPTQ, AWQ "
    "or compressed-tensors, or the one in bfloat16, whose linear layers --quantization int4 or fp8 (on the CPU: int8) "
    "quantises while they are loaded"
)
"""The advice in refusals."""
_STORED = {"F8_E4M3": FP8, "I8": torch.int8, "I32": torch.int32, "U8": torch.uint8}
_FORMATS = {
    "float-quantized",
    "int-quantized",
    "naive-quantized",
    "pack-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
}


class Scheme(NamedTuple):
    """How a linear layer is stored. ``dtype``: of its weight, float8_e4m3fn or int8.

    ``block``: outputs and inputs that share a scale, 0 for all. ``packed``: four int8 lie in an int32.
    """

    dtype: torch.dtype
    block: tuple[int, int]
    inputs: Inputs
    packed: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The type of weights in files."""
        return torch.int32 if self.packed else self.dtype

    def __str__(self) -> str:
        return "packed " * self.packed + str(self.dtype).removeprefix("torch.")


class _Settings(msgspec.Struct):
    quantization_config: Any = None
    compression_config: Any = None
    text_config: Any = None
    model_type: Any = None


class _Arguments(msgspec.Struct):
    """How compressed-tensors describes the quantisation of a tensor, with its defaults."""

    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: list[int] | str | None = None
    dynamic: bool | str = False
    actorder: bool | str | None = None


class _Group(msgspec.Struct):
    targets: list[str]
    weights: _Arguments | None = None
    input_activations: _Arguments | None = None
    output_activations: _Arguments | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct):
    config_groups: dict[str, _Group]
    format: str | None = None
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


class _Fp8(msgspec.Struct, forbid_unknown_fields=True):
    """``quant_method: fp8``. Layers with weights in FP8 are converted, whatever the lists say. Unknown keys fail."""

    quant_method: Literal["fp8"]
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[int, int] | None = None
    fmt: str = "e4m3"
    scale_fmt: str | None = None
    expert_dtype: str | None = None
    modules_to_convert: list[str] | None = None
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None
    kv_cache_scheme: Any = None
    dequantize: bool = False


class QuantisedCheckpoint:
    """How the linear layers of a checkpoint are stored. ``name``: of the model, for errors.

    ``unread``: the names of tensors that are not read: zero points, which are zero in symmetric quantisation, scales of
    a KV cache, and the frequencies of RoPE. ``mxfp4``: the experts are stored in MXFP4, and nothing else is quantised.
    ``four_bits``: how linear layers are stored in four bits; None: none are. ``in_blocks``: they are stored in blocks
    of GGUF. ``in_floats``: nothing is quantised.
    """

    in_blocks = in_floats = False

    def __init__(
        self,
        name: str,
        groups: Sequence[tuple[list[str], Scheme | FourBitScheme]],
        ignore: list[str],
        strict: bool,
        mxfp4: bool = False,
    ) -> None:
        self.name, self.mxfp4 = name, mxfp4
        self._strict = strict
        four = [scheme for _, scheme in groups if isinstance(scheme, FourBitScheme)]
        self.four_bits = four[0] if four else None
        zeros = "input|output|[qkv]" if any(scheme.zeros for scheme in four) else "weight|input|output|[qkv]"
        nvfp4 = any(scheme.in_nvfp4 for scheme in four)
        if nvfp4:
            log.info("%s: inputs of layers in NVFP4 are not quantised", name)
        inputs = "|input_scale|input_global_scale" * nvfp4
        unread = rf"\.(({zeros})_zero_point|[qkv]_scale|output_scale|rotary_emb\.inv_freq{inputs})$"
        self.unread = re.compile(unread)
        # The first entry that means a layer decides: whole names, then patterns, then all layers, as in
        # compressed-tensors, whatever the order of groups.
        targets = [(target, scheme) for targets, scheme in groups for target in targets]
        targets.sort(key=lambda entry: (entry[0] == "Linear", entry[0].startswith("re:"), entry[0]))
        self._schemes: list[tuple[re.Pattern[str], Scheme | FourBitScheme | None]]
        self._schemes = [(_pattern(entry), None) for entry in ignore]
        self._schemes += [(_pattern(target), scheme) for target, scheme in targets]

    def scheme(self, linear: str, stored: str | None) -> "Scheme | FourBitScheme | GgufScheme | None":
        """Return how the linear layer called ``linear`` is quantised, None if it is not.

        ``stored``: the type of its weight in the file, None if there is none, as for a tied head.

        Raises:
            ModelError: the weight and the configuration differ in type.
        """
        found = next((scheme for pattern, scheme in self._schemes if pattern.match(linear)), None)
        if stored not in _STORED and (found is None or stored is None or not self._strict):
            return None
        if found is None or _STORED.get(str(stored)) != found.stored:
            says = "is not quantised" if found is None else f"is {found}"
            raise ModelError(f"{self.name}: its weight {linear} is of type {stored}, but by config.json it {says}")
        return found


def read_quantisation(name: str, path: Path, kv_dtype: str) -> QuantisedCheckpoint | None:
    """Return how the checkpoint in the folder ``path`` is quantised, None if it is not.

    ``name``: of the model. ``kv_dtype``: the option, for the warning about a scheme for the KV cache.

    Raises:
        ModelError: the quantisation is not supported; the text names it, and advises another checkpoint.
    """
    if (table := read_table(path)) is not None:
        from pagewise_executor.models.gguf_checkpoint import GgufCheckpoint

        return GgufCheckpoint(name, {tensor.kind for tensor in table.tensors.values()})
    try:
        settings = msgspec.json.decode((path / "config.json").read_bytes(), type=_Settings)
    except (OSError, ValueError):
        return None  # the readers of the other keys report the error
    text = settings.text_config if isinstance(settings.text_config, dict) else {}
    places = {
        "quantization_config": settings.quantization_config,
        "compression_config": settings.compression_config,
        "quantization_config in text_config": text.get("quantization_config"),
    }
    if wrong := next((key for key, value in places.items() if not isinstance(value, dict | None)), None):
        raise ModelError(f"{name}: config.json is unusable: {wrong} is {places[wrong]!r:.100}, and not an object")
    found = next(filter(None, places.values()), None)
    if not found and (path / "hf_quant_config.json").is_file():
        found = {"quant_method": "modelopt"} | modelopt_settings(path / "hf_quant_config.json")
    if not found:
        return None
    method = str(found.get("quant_method", "unknown"))
    try:
        match method:
            case "compressed-tensors":
                return _compressed_tensors(name, msgspec.convert(found, _CompressedTensors), kv_dtype)
            case "fp8":
                return _fp8(name, msgspec.convert(found, _Fp8), kv_dtype)
            case "gptq":
                return _of_files(name, gptq_scheme(found))
            case "awq":
                return _of_files(name, awq_scheme(found))
            case "modelopt":
                if found.get("kv_cache_scheme") or found.get("kv_cache_quant_algo"):
                    _warn_of_kv_scales(name, kv_dtype)
                in_fp8 = found.get("quant_algo") == "FP8"
                return _of_files(name, _PER_TENSOR if in_fp8 else modelopt_scheme(found))
            case "mxfp4" if settings.model_type == "gpt_oss":
                log.info("%s has experts in MXFP4: one rank keeps them in four bits, several convert them", name)
                return QuantisedCheckpoint(name, [], [], strict=False, mxfp4=True)
            case _:
                raise UnsupportedError
    except (UnsupportedError, msgspec.ValidationError) as error:
        how = f"{name}: its weights are quantised (quant_method {method!r})"
        raise ModelError(f"{how}{' ' * bool(str(error))}{error}, which cannot be served; {INSTEAD}") from error


def _fp8(name: str, found: _Fp8, kv_dtype: str) -> QuantisedCheckpoint:
    block, static = found.weight_block_size, found.activation_scheme == "static"
    refuse(
        (found.fmt != "e4m3", f"in the format {found.fmt}"),
        (found.scale_fmt not in (None, "float", "ue8m0"), f"with scales in the format {found.scale_fmt}"),
        (found.scale_fmt == "ue8m0" and not block, "with scales in the format ue8m0, and not per block"),
        (found.expert_dtype not in (None, "fp8"), f"with experts in {found.expert_dtype}"),
        (
            found.modules_to_convert,
            f"with other modules than linear layers ({', '.join(found.modules_to_convert or ())})",
        ),
        (block and static, "per block and with static scales of inputs"),
    )
    if found.kv_cache_scheme:
        _warn_of_kv_scales(name, kv_dtype)
    inputs = Inputs(group=block[1], ue8m0=found.scale_fmt == "ue8m0") if block else Inputs(static=static)
    return QuantisedCheckpoint(name, [(["Linear"], Scheme(FP8, block or (0, 0), inputs))], [], strict=False)


_PER_TENSOR = Scheme(FP8, (0, 0), Inputs(static=True))
"""FP8 of ModelOpt."""


def _of_files(name: str, scheme: Scheme | FourBitScheme) -> QuantisedCheckpoint:
    """Return a checkpoint whose files tell which linear layers have this scheme."""
    return QuantisedCheckpoint(name, [(["Linear"], scheme)], [], strict=False)


def _compressed_tensors(name: str, found: _CompressedTensors, kv_dtype: str) -> QuantisedCheckpoint:
    for key, settings in (("sparsity_config", found.sparsity_config), ("transform_config", found.transform_config)):
        given = settings or {}
        refuse((given.get("format", "dense") not in ("dense", "") or given.get("config_groups"), f"with a {key}"))
    schemes = [
        (group.targets, _scheme(group, group.format or found.format or "unknown"))
        for group in found.config_groups.values()
    ]
    if found.kv_cache_scheme:
        _warn_of_kv_scales(name, kv_dtype)
    return QuantisedCheckpoint(name, schemes, found.ignore or [], strict=True)


def _warn_of_kv_scales(name: str, kv_dtype: str) -> None:
    stays = f"KV is kept in eight bits with scales of its own, by token and head (--kv-dtype {kv_dtype})"
    if kv_dtype == "auto":
        stays = "KV is kept in the model's type; --kv-dtype fp8 keeps it in float8, with scales by token and head"
    log.warning("%s has a kv_cache_scheme, whose scales are not used: %s", name, stays)


def _pattern(entry: str) -> re.Pattern[str]:
    """Return the pattern of the names of the linear layers that an entry of ``targets`` or ``ignore`` means."""
    if entry == "Linear":
        return re.compile("")
    try:
        return re.compile(entry.removeprefix("re:") if entry.startswith("re:") else rf"{re.escape(entry)}\Z")
    except re.error as error:
        raise UnsupportedError(f"by a pattern {entry!r} that is no regular expression ({error})") from None


def _scheme(group: _Group, form: str) -> Scheme | FourBitScheme:
    weights, inputs, packed = group.weights, group.input_activations, form == "pack-quantized"
    refuse((form not in _FORMATS, f"in the format {form}"))
    if weights is None or group.output_activations is not None:
        raise UnsupportedError("of which outputs alone are, or are as well")
    kind = f"{weights.type}{weights.num_bits}"
    if form == "nvfp4-pack-quantized":
        how = f"to {kind} weights in groups of {weights.group_size}"
        refuse(((kind, weights.group_size) != ("float4", NVFP4_GROUP), f"in the format {form} {how}"))
        return FourBitScheme("nvfp4", NVFP4_GROUP, zeros=False)  # inputs are not quantised
    if kind == "int4":
        return _four_bits(weights, inputs, form)
    refuse(
        (kind not in ("float8", "int8") or weights.dynamic is not False, f"to {kind} weights"),
        (not all(each.symmetric for each in (weights, inputs or weights)), "asymmetrically (with zero points)"),
        (weights.actorder in (True, "group"), "in the order of activations (actorder)"),
        (packed and (kind != "int8" or inputs), f"to packed {kind} with quantised inputs or in floats"),
    )
    dtype = FP8 if kind == "float8" else torch.int8
    return Scheme(dtype, _block(weights), _inputs(inputs, kind), packed)


def _four_bits(weights: _Arguments, inputs: _Arguments | None, form: str) -> FourBitScheme:
    rows, columns = _block(weights)
    refuse(
        (form != "pack-quantized" or weights.dynamic is not False, f"to int4 weights in the format {form}"),
        (inputs, "to int4 weights with quantised inputs"),
        (rows != 1, f"to int4 weights by the strategy {weights.strategy}"),
    )
    scattered = weights.actorder in (True, "group", "dynamic")
    return FourBitScheme("compressed-tensors", columns, not weights.symmetric, scattered=scattered)


def _block(weights: _Arguments) -> tuple[int, int]:
    strategy = weights.strategy
    if strategy is None:  # as compressed-tensors completes it
        strategy = "tensor" if weights.group_size is None else "channel" if weights.group_size == -1 else "group"
    structure = weights.block_structure
    if isinstance(structure, str):
        structure = [int(size) for size in structure.split("x") if size.isdecimal()]
    match strategy:
        case "tensor":
            return 0, 0
        case "channel":
            return 1, 0
        case "group" if (weights.group_size or 0) > 0:
            return 1, weights.group_size or 0
        case "block" if structure is not None and len(structure) == 2 and min(structure) > 0:
            return structure[0], structure[1]
        case _:
            raise UnsupportedError(f"with weights by the strategy {strategy}")


def _inputs(inputs: _Arguments | None, weights: str) -> Inputs:
    if inputs is None:
        return Inputs(quantised=False)
    kind = f"{inputs.type}{inputs.num_bits}"
    if kind != weights:
        raise UnsupportedError(f"to {weights} weights with {kind} inputs")
    match inputs.strategy, inputs.dynamic:
        case "tensor" | None, False:
            return Inputs(static=True)
        case "token" | "tensor" | None, True:
            # Each row has a scale of its own: one scale for all rows would make a row depend on the rest of its batch.
            return Inputs()
        case "group", True if (inputs.group_size or 0) > 0:
            return Inputs(group=inputs.group_size)
        case strategy, dynamic:
            how = "dynamic" if dynamic is True else "static" if dynamic is False else str(dynamic)
            raise UnsupportedError(f"with {how} inputs by the strategy {strategy}")
