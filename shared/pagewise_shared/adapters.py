"""LoRA adapters in PEFT's format: reading and checking their folders, without torch.

Gateways read the configuration and the header of the weights, and hash both files. Executors read the weights. The
format is that of PEFT 0.19 (``adapter_config.json``, ``adapter_model.safetensors``); LoRA is Hu and others 2021 (arXiv
2106.09685), the rank-stabilised scale Kalajdzievski 2023 (arXiv 2312.03732).
"""

import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pagewise_shared.errors import AdapterError, AdapterNotFoundError, ModelError
from pagewise_shared.logs import printable
from pagewise_shared.model_files import resolve_model
from pagewise_shared.protocol import Adapter

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_FACTOR = re.compile(r"(.+)\.lora_([AB])\.weight")
_TYPES = {"F32", "F16", "BF16"}
_PIECE = 1 << 22
_MOST_CONFIG_BYTES = 1 << 20
_MOST_HEADER_BYTES = 1 << 26
_MOST_ERROR_TEXT = 500
_MOST_MODULES, _MOST_MODULE_NAME = 1 << 14, 256
_MOST_PATTERNS, _MOST_PATTERN, _MOST_OPEN_PATTERNS = 1024, 256, 16
"""Patterns of a configuration, characters of a pattern, and patterns with a repetition. Each pattern is matched with
each module, in quadratic time of the length of the name if it has a repetition, and in linear time otherwise."""
_REPEATS = re.compile(r"[*+?{]")
_REPEATED_GROUP = re.compile(r"\)[*+?{]")

_NEUTRAL = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config",
    "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size",
    "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Fields that are used here, or that only describe the training. A configuration with a value in any other field is
refused, because the field would change the computation."""
_KEEPS_BASE = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that do not change the model's weights."""
_PARTS = {
    "lora_magnitude_vector": "of DoRA",
    "lora_embedding": "LoRA of embeddings",
    "embed_tokens": "of embeddings",
    "lm_head": "of the head",
    "bias": "a bias",
}
_EMBEDDINGS = ("lm_head", "embed_out", "embed_tokens", "wte", "embed_in")


class Factor(NamedTuple):
    """The pair of matrices of one module: A [rank, ins], B [outs, rank]. ``scale``: factor of the product B A."""

    rank: int
    ins: int
    outs: int
    scale: float


@dataclass(slots=True, frozen=True)
class AdapterFiles:
    """A checked adapter.

    ``config``: the bytes of its configuration. ``weights``: the file with its weights. ``factors``: by module name.
    """

    name: str
    config: bytes
    weights: Path
    factors: Mapping[str, Factor]

    @property
    def rank(self) -> int:
        """The largest rank of a module."""
        return max(factor.rank for factor in self.factors.values())


def read_adapter(name: str, path: str, max_rank: int) -> Adapter:
    """Find, check and hash an adapter. This reads all of its bytes: do not call it on an event loop.

    Raises:
        AdapterError: it cannot be found, read or served; the text has its name and the reason.
    """
    files = open_adapter(name, path, max_rank)
    digest = _begin(files.config)
    with _reading(name), files.weights.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
    size = files.weights.stat().st_size
    return Adapter(name, path, digest.digest(), size, files.rank, int(time.time()))


def content_hash(config: bytes, weights: bytes) -> bytes:
    """Return the hash of an adapter's files: 32 bytes."""
    digest = _begin(config)
    digest.update(weights)
    return digest.digest()


def _begin(config: bytes) -> "hashlib._Hash":
    return hashlib.sha256(b"pagewise adapter %d\n" % len(config) + config)


def open_adapter(name: str, path: str, max_rank: int) -> AdapterFiles:
    """Find an adapter, and check it as far as possible without its weights and without the model.

    Raises:
        AdapterError: it cannot be found, read or served; the text has its name and the reason.
    """
    try:
        folder = resolve_model(path)
    except ModelError as error:
        raise AdapterNotFoundError(_error_text(name, "found", str(error))) from error
    config = folder / _CONFIG
    for file in (config, folder / _WEIGHTS):
        if not file.is_file():
            raise AdapterNotFoundError(_error_text(name, "found", f"{path} has no {file.name}"))
    with _reading(name):
        if config.stat().st_size > _MOST_CONFIG_BYTES:
            raise unusable(name, f"its {_CONFIG} is too large")
        content = config.read_bytes()
        try:
            settings = json.loads(content)
            header = _header(folder / _WEIGHTS)
            _check_settings(settings)
            factors = _factors(_shapes(header), settings, max_rank)
        except _RefusedError as error:
            raise unusable(name, str(error)) from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise AdapterError(_error_text(name, "read", repr(error))) from error
    return AdapterFiles(name, content, folder / _WEIGHTS, factors)


class _RefusedError(Exception):
    """An adapter cannot be served; the text has the reason."""


def unusable(name: str, reason: str) -> AdapterError:
    """Return the error of an adapter that cannot be served. ``reason``: long quotations of the files are cut."""
    return AdapterError(_error_text(name, "served", reason))


def _error_text(name: str, done: str, why: str) -> str:
    return f"the adapter {printable(name)!r} cannot be {done}: {printable(why, _MOST_ERROR_TEXT)}"


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Add the adapter's name to errors of reading its files."""
    try:
        yield
    except OSError as error:
        raise AdapterError(_error_text(name, "read", str(error))) from error


def _header(file: Path) -> dict[str, Any]:
    """Return the header of a safetensors file: type and shape of each tensor by name.

    Raises:
        ValueError: it has no valid header, or is truncated.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"{file.name} is truncated, or no safetensors file")
        header = json.loads(stream.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{file.name} is no safetensors file")
    header.pop("__metadata__", None)
    end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    if size != 8 + length + end:
        raise ValueError(f"{file.name} has {size} bytes, its header says {8 + length + end}")
    return header


_REFUSED: tuple[tuple[Callable[[dict[str, Any]], Any], str], ...] = (
    (lambda of: of.get("peft_type") != "LORA", "peft_type is {peft_type!r}, only LORA is served"),
    (lambda of: of.get("use_dora"), "it is DoRA (use_dora), which is not supported"),
    (lambda of: of.get("bias", "none") != "none", "it has biases (bias {bias!r}), which are not supported"),
    (lambda of: of.get("modules_to_save"), "it replaces whole modules (modules_to_save), which is not supported"),
    (
        lambda of: of.get("init_lora_weights") not in _KEEPS_BASE,
        "init_lora_weights {init_lora_weights!r} changes the model's own weights",
    ),
)
"""The settings that are refused, each with its error text."""


def _check_settings(settings: Any) -> None:
    if not isinstance(settings, dict):
        raise _RefusedError(f"{_CONFIG} is no JSON object")
    for is_so, text in _REFUSED:
        if is_so(settings):
            raise _RefusedError(text.format_map({"peft_type": None} | settings))
    if asked := sorted(filter(settings.get, settings.keys() - _NEUTRAL)):
        raise _RefusedError(f"{asked[0]} is not supported")
    for name in ("rank_pattern", "alpha_pattern"):
        _check_patterns(name, settings.get(name) or {})
    if not all(_is_number(settings.get(name, 8)) for name in ("r", "lora_alpha")):
        raise _RefusedError("r or lora_alpha is no number")


def _check_patterns(name: str, values: Any) -> None:
    """Check the patterns of module names in a field of the configuration.

    PEFT compiles them as regular expressions. Adapters may come from anyone, so patterns must not take exponential
    time.
    """
    if not isinstance(values, dict) or not all(map(_is_number, values.values())):
        raise _RefusedError(f"{name} is no table of numbers")
    if len(values) > _MOST_PATTERNS:
        raise _RefusedError(f"{name}: there are more than {_MOST_PATTERNS} patterns")
    num_open = 0
    for key in values:
        if len(key) > _MOST_PATTERN:
            raise _RefusedError(f"{name}: the pattern {key[:40]!r}... is longer than {_MOST_PATTERN} characters")
        try:
            re.compile(key)
            _module_pattern(key)
        except (re.error, RecursionError, OverflowError) as error:
            raise _RefusedError(f"{name}: {key!r} is no pattern: {error}") from error
        repeats = len(_REPEATS.findall(key))
        if max(repeats, key.count("(")) > 1 or _REPEATED_GROUP.search(key):
            raise _RefusedError(
                f"{name}: the pattern {key!r} has more than one repetition or group, or repeats a group"
            )
        num_open += repeats
    if num_open > _MOST_OPEN_PATTERNS:
        raise _RefusedError(f"{name}: more than {_MOST_OPEN_PATTERNS} patterns repeat something")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _shapes(header: Mapping[str, Any]) -> dict[str, dict[str, list[int]]]:
    """Return the shapes of the factors "A" and "B" of all modules, by module name."""
    shapes: dict[str, dict[str, list[int]]] = {}
    for key, tensor in header.items():
        match = _FACTOR.fullmatch(key.removeprefix(_PREFIX))
        if match is None:
            kind = next((text for part, text in _PARTS.items() if part in key), "no factor of a linear layer")
            raise _RefusedError(f"its weight {key} is {kind}, which is not supported")
        shape = tensor["shape"]
        if tensor["dtype"] not in _TYPES or len(shape) != 2 or min(shape) < 1:
            raise _RefusedError(f"its weight {key} is of type {tensor['dtype']} and shape {shape}")
        if shapes.setdefault(match[1], {}).setdefault(match[2], shape) is not shape:
            raise _RefusedError(f"its weight {key} is there twice, with and without {_PREFIX}")
    if len(shapes) > _MOST_MODULES or max(map(len, shapes), default=0) > _MOST_MODULE_NAME:
        raise _RefusedError(f"it has more than {_MOST_MODULES} modules, or one whose name is too long")
    return shapes


def _factors(
    shapes: Mapping[str, Mapping[str, list[int]]], settings: Mapping[str, Any], max_rank: int
) -> dict[str, Factor]:
    if not shapes:
        raise _RefusedError("it has no weights")
    ranks = _Patterns(settings.get("rank_pattern"), settings.get("r", 8))
    alphas = _Patterns(settings.get("alpha_pattern"), settings.get("lora_alpha", 8))
    factors = {}
    for module, pair in shapes.items():
        if len(pair) < 2:
            raise _RefusedError(f"its module {module} has only one of A and B")
        names = module.split(".")
        if names[-1] in _EMBEDDINGS:
            raise _RefusedError(f"it changes {module}: LoRA of embeddings and of the head is not supported")
        if "experts" in names:
            raise _RefusedError(f"it changes {module}: LoRA of experts is not supported")
        (rank, ins), (outs, other) = pair["A"], pair["B"]
        expected = ranks.of(module)
        if not rank == other == expected:
            raise _RefusedError(
                f"its module {module} has ranks {rank} and {other}, and its configuration says {expected}"
            )
        if rank > max_rank:
            raise _RefusedError(f"the rank of its module {module} is {rank}, --max-lora-rank is {max_rank}")
        root = math.sqrt(rank) if settings.get("use_rslora") else rank
        factors[module] = Factor(rank, ins, outs, float(alphas.of(module)) / root)
    return factors


def _module_pattern(key: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({key})$")


class _Patterns:
    def __init__(self, values: Mapping[str, float] | None, default: float) -> None:
        self._values = [(_module_pattern(key), value) for key, value in (values or {}).items()]
        self._default = default

    def of(self, module: str) -> float:
        """Return the value of the first pattern that matches the end of a module's name, as PEFT does."""
        return next((value for pattern, value in self._values if pattern.match(module)), self._default)


def check_modules(files: AdapterFiles, modules: Mapping[str, tuple[int, int]]) -> None:
    """Check that an adapter fits a model. ``modules``: inputs and outputs of the model's linear layers by name.

    Raises:
        AdapterError: the model has no such module, or one of another shape, or the adapter lacks the weights of a
            module that its configuration names.
    """
    for module, factor in files.factors.items():
        if (shape := modules.get(module)) is None:
            known = sorted({name.rpartition(".")[2] for name in modules})[:12]
            raise unusable(
                files.name,
                f"it changes {module}, which is no linear layer of this model (its layers have {', '.join(known)})",
            )
        if shape != (factor.ins, factor.outs):
            raise unusable(
                files.name,
                f"its module {module} maps {factor.ins} to {factor.outs}, "
                f"that of the model {shape[0]} to {shape[1]}: it is of another model",
            )
    if missing := _targets(json.loads(files.config), modules) - files.factors.keys():
        more = f" and {len(missing) - 3} more" * (len(missing) > 3)
        raise unusable(
            files.name,
            f"its target_modules name {len(missing)} layers whose weights its file lacks: "
            f"{', '.join(sorted(missing)[:3])}{more}; an adapter of some layers alone says so with layers_to_transform",
        )


def _targets(settings: Mapping[str, Any], modules: Iterable[str]) -> set[str]:
    """Return the modules that a configuration names; none if it names them by a regular expression."""
    wanted, excluded = _names(settings.get("target_modules")), _names(settings.get("exclude_modules") or [])
    layers = settings.get("layers_to_transform")
    numbers = [layers] if isinstance(layers, int) else layers
    if wanted is None or excluded is None or not isinstance(numbers, list | None):
        return set()
    found = {module for module in modules if (ends := _ends(module)) & wanted and not ends & excluded}
    return found if numbers is None else {module for module in found if _layer_number(module) in numbers}


def _names(listed: Any) -> set[str] | None:
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else None


def _layer_number(module: str) -> int | None:
    return next((int(part) for part in module.split(".") if part.isdigit()), None)


def _ends(module: str) -> set[str]:
    """Return all suffixes of a module's name at dots: PEFT finds a module by any of them."""
    parts = module.split(".")
    return {".".join(parts[start:]) for start in range(len(parts))}
