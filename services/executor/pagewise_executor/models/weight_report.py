"""Compares the weights of a model with its files, and refuses a model whose files lack any.

transformers draws random values for a weight that the files do not have. Two executors would draw different ones, and
share KV nevertheless, because their fingerprints are hashes of the same files.
"""

import logging
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from pagewise_shared.errors import ModelError

from pagewise_executor.models.weight_files import INDEX, MXFP4_SCALES, MXFP4_WEIGHTS, Headers, read_index

log = logging.getLogger(__name__)

FLOATS = frozenset({"F64", "F32", "BF16", "F16"})
"""Types of weights that are not quantised."""
_NAMED = 4
"""Weights that an error names; it counts the others."""
_EXPERT = re.compile(r"(.+\.experts\.)(\d+)\.(.+)")
_WEIGHT = re.compile(r"(weight|_proj)$")


class Mismatch(NamedTuple):
    """A weight with its shape in the files, and its shape in the model."""

    name: str
    found: Collection[int]
    wanted: Collection[int]


class Differences(NamedTuple):
    """How the files of a model differ from it.

    ``missing``: weights that the files lack. ``mismatched``: weights of another shape. ``unexpected``: tensors of the
    files that the model does not have.
    """

    missing: Collection[str] = ()
    mismatched: Collection[Mismatch] = ()
    unexpected: Collection[str] = ()


def differences_of(info: Mapping[str, Any]) -> Differences:
    """Return the differences that transformers reports with ``output_loading_info``."""
    mismatched = [Mismatch(*each) for each in info["mismatched_keys"]]
    return Differences(info["missing_keys"], mismatched, info["unexpected_keys"])


def check_differences(model: str, headers: Headers, found: Differences) -> None:
    """Refuse a model that lacks weights; log the tensors of its files that are not used.

    ``model``: the name for errors.

    Raises:
        ModelError: weights are missing, or have another shape; the text names the first of them and counts them.
    """
    if found.missing:
        raise ModelError(
            f"{model} cannot be served: its files lack {_count(found.missing)} that the model has: "
            f"{_first(found.missing)}{_instead(found.unexpected)}{_lost(headers)}"
        )
    if found.mismatched:
        name, shape, wanted = min(found.mismatched)
        more = len(found.mismatched) - 1
        raise ModelError(
            f"{model} cannot be served: its weight {name} has the shape {list(shape)}{_within(headers, name)}, and by "
            f"its config.json {list(wanted)}{f'; {more} more weights have other shapes' if more else ''}"
        )
    if found.unexpected:
        log.warning(
            "%s: the model has no place for %s of its files, which are not used: %s",
            model, _count(found.unexpected, "tensor"), _first(found.unexpected),
        )  # fmt: skip


def check_types(model: str, headers: Headers) -> None:
    """Refuse a model with weights in integers or in eight bits whose config.json does not describe a quantisation.

    Raises:
        ModelError: it has such a weight; the text names the file and the tensor.
    """
    for file, header in headers.items():
        for name, tensor in header.items():
            if _WEIGHT.search(name) and tensor.dtype not in FLOATS:
                raise ModelError(
                    f"{model} cannot be served: its weight {name} in {file} is of type {tensor.dtype}, and its "
                    "config.json has no quantization_config that describes the values"
                )


def check_experts(model: str, headers: Headers) -> None:
    """Refuse a mixture of which an expert lacks a weight that others of the same layer have, or scales of MXFP4.

    transformers joins the weights of all experts into one tensor, and cannot name the missing one.

    Raises:
        ModelError: there is one; the text names the weights.
    """
    layers: dict[str, tuple[set[str], set[str]]] = {}
    for header in headers.values():
        for match in filter(None, map(_EXPERT.fullmatch, header)):
            experts, ends = layers.setdefault(match[1], (set(), set()))
            experts.add(match[2])
            ends.add(match[3])
    there = {name for header in headers.values() for name in header}
    wanted = {
        f"{prefix}{expert}.{end}"
        for prefix, (experts, ends) in layers.items()
        for expert in range(max(map(int, experts)) + 1)
        for end in ends
    }
    for end, other in ((MXFP4_WEIGHTS, MXFP4_SCALES), (MXFP4_SCALES, MXFP4_WEIGHTS)):
        wanted |= {name.removesuffix(end) + other for name in there if name.endswith(end)}
    check_differences(model, headers, Differences(missing=wanted - there))


def check_values(model: str, weights: Mapping[str, torch.Tensor], headers: Headers) -> None:
    """Refuse a model with a weight that is not finite; log the matrices that are zero throughout.

    ``weights``: by their names, on one device.

    Raises:
        ModelError: a weight is not finite; the text names it.
    """
    ranges = _ranges(weights)
    for name, span in ranges.items():
        if not all(map(math.isfinite, span)):
            kind = str(weights[name].dtype).removeprefix("torch.")
            raise ModelError(
                f"{model} cannot be served: its weight {name}{_within(headers, name)} has values that are not finite "
                f"in {kind}; download it again, or take --dtype bfloat16 if the file has a type of greater range"
            )
    matrices = {name for name in ranges if weights[name].ndim > 1 and min(weights[name].shape) > 1}
    if zero := [name for name, span in ranges.items() if span == [0.0, 0.0] and name in matrices]:
        log.warning("%s: %s zero throughout: %s", model, _count(zero) + (" is", " are")[len(zero) > 1], _first(zero))


def _ranges(weights: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    floats = {
        name: weight
        for name, weight in weights.items()
        if weight.numel() and weight.is_floating_point() and not weight.is_meta
    }
    if not floats:
        return {}
    return dict(zip(floats, torch.stack([_range(weight) for weight in floats.values()]).tolist(), strict=True))


def _range(weight: torch.Tensor) -> torch.Tensor:
    """Return the least and the greatest value [2] of a weight in float32; both are NaN if one value is."""
    if weight.dtype == torch.float8_e4m3fn:  # which has no infinity, and two codes for NaN
        codes = weight.detach().view(torch.uint8).bitwise_and(0x7F).max()
        return torch.where(codes == 0x7F, torch.nan, codes.float()).expand(2)
    return torch.stack(weight.detach().aminmax()).float()


def _count(names: Collection[object], kind: str = "weight") -> str:
    return f"{len(names)} {kind}{'s' * (len(names) > 1)}"


def _first(names: Collection[str]) -> str:
    """Return the first names in the order of layers, and how many more there are."""
    ordered = sorted(names, key=lambda name: [(part.isdigit(), int(part) if part.isdigit() else 0, part)
                                              for part in name.split(".")])  # fmt: skip
    more = len(ordered) - _NAMED
    return ", ".join(ordered[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _instead(unexpected: Collection[str]) -> str:
    if not unexpected:
        return ""
    return f"; they have {_count(unexpected, 'tensor')} that it has no place for: {_first(unexpected)}"


def _within(headers: Headers, name: str) -> str:
    """Return the file of a tensor as a part of a sentence; empty if none has the name."""
    return next((f" in {file}" for file, header in headers.items() if name in header), "")


def _lost(headers: Headers) -> str:
    """Return the first tensor that is not in the file that the index names, as a part of a sentence; empty if none."""
    folder = next(iter(headers)).parent
    there = {name for header in headers.values() for name in header}
    try:
        lost = {
            name: file for name, file in read_index(folder).items() if name not in there and folder / file in headers
        }
    except ModelError:  # there is none, or a stale one, which is not read
        return ""
    if not lost:
        return ""
    name = min(lost)
    return f"; {INDEX} says that {name} is in {lost[name]}, which does not have it: download that file again"
