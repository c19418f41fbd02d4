"""How recurrent layers are divided among ranks: by heads, and short convolutions by channels.

Each rank computes some heads of a recurrent module, and keeps their states. A weight may have several parts one after
the other, such as the queries, keys and values that a convolution gets; each of these is cut. Groups of Mamba-2, whose
B and C several heads read, may be fewer than ranks: then neighbours have the same group, and a gated norm, which covers
all heads of a group, sums over these ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.models.recurrent import RecurrentLayer
from pagewise_executor.models.shards import (
    COLUMNS,
    ROWS,
    GatedNorm,
    Heads,
    Packed,
    Shards,
    Style,
    UnknownShardError,
    move_sum,
)

_OUTPUTS = ("out_proj", "o_proj")
_LOW_RANK = ("g_a_proj", "f_a_proj")
"""Projections to as many numbers as a head has, which all heads read."""
_PARAMETERS = ("A_log", "dt_bias", "D")
"""Parameters of each head."""


def recurrent_styles(module: Any) -> Iterator[tuple[str, Style]]:
    """Yield the styles of the weights of a recurrent module, by their names there; of other modules nothing."""
    if is_short_convolution(module):
        channels = Heads(module.conv.in_channels, 1)
        yield "conv", Packed((channels,))
        yield "in_proj", Packed((channels,) * 3)
        yield "out_proj", ROWS
    elif type(getattr(module, "conv1d", None)) is nn.Conv1d and (parts := _parts(module)):
        yield "conv1d", Packed(tuple(parts))
        for name, child in module.named_modules():
            first, _, last = name.rpartition(".")
            if last in ("in_proj", "in_proj_qkv"):
                yield name, Packed(tuple(_projected(module, parts) if last == "in_proj" else parts))
            elif type(child) is nn.Linear and last not in _LOW_RANK:
                yield name, ROWS if last in _OUTPUTS else COLUMNS
            prefix = f"{name}." if name else first
            yield from ((prefix + one, COLUMNS) for one in _PARAMETERS if hasattr(child, one))
        if hasattr(module, "n_groups") and hasattr(module.norm, "weight"):
            yield "norm", GatedNorm(module.n_groups)


def _parts(module: Any) -> list[Heads]:
    """Return the parts of the inputs of a recurrent module's convolution; none: the module is of no known kind."""
    if hasattr(module, "ssm_state_size") and hasattr(module, "n_groups"):  # Mamba-2: x, B and C
        groups = Heads(module.n_groups, module.ssm_state_size)
        return [Heads(module.num_heads, module.head_dim), groups, groups]
    if hasattr(module, "num_k_heads"):  # gated delta net: queries, keys and values
        keys = Heads(module.num_k_heads, module.head_k_dim)
        return [keys, keys, Heads(module.num_v_heads, module.head_v_dim)]
    if hasattr(module, "forget_gate"):  # KDA: queries, keys and values
        return [Heads(module.num_heads, module.head_dim)] * 3
    return []


def _projected(module: Any, parts: list[Heads]) -> list[Heads]:
    """Return the parts of the outputs of the input projection of Mamba-2: z, x, B, C and dt."""
    return [parts[0], *parts, Heads(module.num_heads, 1)]


def is_short_convolution(module: Any) -> bool:
    """Return whether a module is a gated short convolution."""
    parts: list[Any] = [getattr(module, name, None) for name in ("conv", "in_proj", "out_proj")]
    conv, into, out = parts
    return (
        (type(conv), type(into), type(out)) == (nn.Conv1d, nn.Linear, nn.Linear)
        and conv.groups == conv.in_channels == out.in_features
        and into.out_features == 3 * conv.in_channels
    )


def narrow_convolutions(model: nn.Module, size: int) -> bool:
    """Give the short convolutions of a model as many channels as one of ``size`` ranks has.

    Their number is the size of the hidden state, which a rank's part has, too: no configuration makes them narrower.
    Returns whether the model has any.
    """
    found = [module for module in model.modules() if is_short_convolution(module)] if size > 1 else []
    for module in found:
        part: Any = module
        conv, into, out = part.conv, part.in_proj, part.out_proj
        channels = conv.in_channels // size
        alike = {"device": conv.weight.device, "dtype": conv.weight.dtype}
        part.conv = nn.Conv1d(
            channels, channels, conv.kernel_size, padding=conv.padding, groups=channels, bias=conv.bias is not None,
            **alike,
        )  # fmt: skip
        part.in_proj = nn.Linear(into.in_features, 3 * channels, bias=into.bias is not None, **alike)
        part.out_proj = nn.Linear(channels, out.out_features, bias=out.bias is not None, **alike)
    return bool(found)


def narrowed(kind: type[Any], size: int) -> type[Any]:
    """Return a class of models that are built with the short convolutions of one of ``size`` ranks."""

    class Part(kind):  # type: ignore[misc] # a class that is known when the model is
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            narrow_convolutions(self, size)

    return Part


class GatedNormOverRanks(nn.Module):
    """A gated RMS norm over groups of heads, each of which some ranks have parts of.

    ``weight``: of this rank's heads. ``groups``: their number in the whole model. ``first``: whether the gate comes
    before the norm. ``late``: whether the normalised input is rounded before it is multiplied by the weight.
    """

    def __init__(self, weight: nn.Parameter, eps: float, groups: int, ranks: Ranks, *, first: bool, late: bool) -> None:
        super().__init__()
        self.weight = weight
        self._eps, self._ranks, self._first, self._late = eps, ranks, first, late
        self._own, self._groups = ranks.rank * groups // ranks.size, groups

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise x [.., this rank's channels] by a gate of this shape."""
        wide, gates = x.float(), F.silu(gate.float())
        if self._first:
            wide = wide * gates
        sums = wide.new_zeros(*wide.shape[:-1], self._groups)
        sums[..., self._own] = wide.pow(2).mean(-1)
        mean = self._ranks.reduce(sums)[..., self._own, None] * (self._groups / self._ranks.size)
        wide = wide * torch.rsqrt(mean + self._eps)
        result = self.weight * wide.to(x.dtype) if self._late else self.weight * wide
        return result.to(x.dtype) if self._first else (result * gates).to(x.dtype)


def _gated_norm_over_ranks(norm: Any, name: str, groups: int, ranks: Ranks) -> GatedNormOverRanks:
    """Return a norm over ``groups`` of the heads of all ranks that rounds like ``norm``, a norm over this rank's heads.

    Raises:
        UnknownShardError: it is no gated RMS norm.
    """
    weight, eps = norm.weight, getattr(norm, "variance_epsilon", None)
    x = torch.arange(len(weight), device=weight.device).cos().to(weight.dtype)[None, None]
    gate = x.flip(-1)
    for first, late in itertools.product((True, False), (True, False)):
        if eps is not None:
            alone = GatedNormOverRanks(weight, eps, 1, ALONE, first=first, late=late)
            if torch.equal(alone(x, gate), norm(x, gate)):
                return GatedNormOverRanks(weight, eps, groups, ranks, first=first, late=late)
    raise UnknownShardError(f"--tensor-parallel: {name} goes over heads of several ranks, and is no norm known here")


def connect_recurrent(model: nn.Module, shards: Shards | None, layers: Sequence[RecurrentLayer]) -> None:
    """Join the recurrent modules of a model, which ``connect`` has connected, to those of the other ranks.

    Norms over heads of several ranks replace norms over this rank's heads. A step computes a module in several batches,
    and the ranks sum all their outputs at once: the outputs of the module, not of its last projection.

    Raises:
        UnknownShardError: a norm is of no known kind.
    """
    if shards is None:
        return
    for layer in layers:
        module = model.get_submodule(layer.name)
        for name, child in list(module.named_children()):
            move_sum(child, module)
            style = shards.style(f"{layer.name}.{name}")
            if isinstance(style, GatedNorm) and style.groups < shards.ranks.size:
                norm = _gated_norm_over_ranks(child, f"{layer.name}.{name}", style.groups, shards.ranks)
                module.set_submodule(name, norm)
