"""Linear layers in four bits as checkpoints of GPTQ, AWQ and compressed-tensors (W4A16) have them, and in NVFP4."""

from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

from pagewise_executor.models.four_bit_weight import SYMMETRIC_ZERO, FourBitWeight
from pagewise_executor.models.quantised_weight import FP8

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of AWQ of each of eight outputs."""

NVFP4_GROUP = 16
"""The inputs of an output that share a scale in NVFP4."""


class FourBitScheme(NamedTuple):
    """How a linear layer is stored in four bits.

    ``group``: the inputs of an output that share a scale, 0: all. ``zeros``: whether there is a zero for each scale,
    to which ``zero_offset`` is added. ``scattered``: the files have the group of each input.
    """

    form: Literal["gptq", "awq", "compressed-tensors", "nvfp4", "modelopt"]
    group: int
    zeros: bool = True
    zero_offset: int = 0
    scattered: bool = False

    @property
    def stored(self) -> torch.dtype:
        """The type of weights in files."""
        return torch.uint8 if self.in_nvfp4 else torch.int32

    @property
    def in_nvfp4(self) -> bool:
        """Whether weights are numbers in e2m1: of compressed-tensors ("nvfp4") or of ModelOpt."""
        return self.form in ("nvfp4", "modelopt")

    def __str__(self) -> str:
        return f"in four bits by {self.form}"


class StoredFourBitLinear(nn.Module):
    """A linear layer in four bits as the files have it, with the files' names of its parameters.

    ``given``: the ends of the names of its tensors in the files. ``part``: the shape of a rank's part of it.
    """

    part: list[int] | None = None

    def __init__(self, scheme: FourBitScheme, outs: int, ins: int, bias: bool, given: Collection[str]) -> None:
        super().__init__()
        self.outs, self.ins = outs, ins
        groups = -(-ins // scheme.group) if scheme.group else 1
        out_words, in_words = -(-outs // 8), -(-ins // 8)
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
        if scheme.in_nvfp4:
            names = (
                ("weight", "weight_scale_2") if scheme.form == "modelopt" else ("weight_packed", "weight_global_scale")
            )
            shapes = {
                names[0]: ((outs, -(-ins // 2)), torch.uint8),
                "weight_scale": ((outs, groups), FP8),
                names[1]: ((1,), torch.float32),
            }
        elif scheme.form == "compressed-tensors":
            shapes = {
                "weight_packed": ((outs, in_words), torch.int32),
                "weight_shape": ((2,), torch.int64),
                "weight_scale": ((outs, groups), torch.float32),
            }
            if scheme.zeros:
                shapes["weight_zero_point"] = (out_words, groups), torch.int32
            if scheme.scattered:
                shapes["weight_g_idx"] = (ins,), torch.int32
        else:
            gptq = scheme.form == "gptq"
            shapes = {
                "qweight": ((in_words, outs) if gptq else (ins, out_words), torch.int32),
                "qzeros": ((groups, out_words), torch.int32),
                "scales": ((groups, outs), torch.float32),
            }
            if gptq and "g_idx" in given:
                shapes["g_idx"] = (ins,), torch.int32
        # GPTQ writes a bias of zeros for layers that have none.
        if bias or "bias" in given:
            shapes["bias"] = (outs,), torch.float32
        for name, (shape, dtype) in shapes.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        self.scheme = scheme

    def loaded(self) -> tuple[FourBitWeight, torch.Tensor | None]:
        """Return the weight and the bias.

        Raises:
            ValueError: packed weights are of another shape.
        """
        tensors = {name: weight.detach() for name, weight in self.named_parameters()}
        weight = UNPACK[self.scheme.form](tensors, self.scheme)
        if list(weight.codes.shape) != [self.outs, self.ins]:
            raise ValueError(f"packed weights are {list(weight.codes.shape)}, not {[self.outs, self.ins]}")
        return weight, tensors.get("bias")


def unpack_gptq(tensors: Mapping[str, torch.Tensor], scheme: FourBitScheme) -> FourBitWeight:
    """Return the weight that GPTQ stores.

    ``qweight`` int32 [ins / 8, outs]: a word has eight inputs of an output, the first in its lowest bits. ``qzeros``
    int32 [groups, outs / 8]: a word has the zeros of eight outputs. ``scales`` [groups, outs]. ``g_idx`` int32 [ins]:
    the group of each input; if it is missing, neighbours share a group.
    """
    codes = _nibbles(tensors["qweight"].t())
    zeros = _nibbles(tensors["qzeros"]) + scheme.zero_offset
    return _weight(codes, tensors["scales"].t(), zeros.t(), scheme, tensors.get("g_idx"))


def unpack_awq(tensors: Mapping[str, torch.Tensor], scheme: FourBitScheme) -> FourBitWeight:
    """Return the weight that AWQ stores (version GEMM).

    ``qweight`` int32 [ins, outs / 8], ``qzeros`` int32 [groups, outs / 8]: a word has eight outputs, in an order of
    their own. ``scales`` [groups, outs].
    """
    codes, zeros = (
        _nibbles(tensors[name]).view(len(tensors[name]), -1, 8)[:, :, _AWQ_ORDER].flatten(1).t()
        for name in ("qweight", "qzeros")
    )
    return _weight(codes, tensors["scales"].t(), zeros, scheme, None)


def unpack_compressed(tensors: Mapping[str, torch.Tensor], scheme: FourBitScheme) -> FourBitWeight:
    """Return the weight that compressed-tensors stores (pack-quantized).

    ``weight_packed`` int32 [outs, ins / 8]: a word has eight inputs of an output, with 8 added. ``weight_zero_point``
    int32 [outs / 8, groups], likewise for outputs. ``weight_scale`` [outs, groups]. ``weight_shape`` int64 [2].
    ``weight_g_idx`` int32 [ins]: the group of each input.
    """
    outs, ins = tensors["weight_shape"].tolist()
    codes, zeros = _nibbles(tensors["weight_packed"])[:outs, :ins], tensors.get("weight_zero_point")
    unpacked = None if zeros is None else _nibbles(zeros.t()).t()[:outs]
    return _weight(codes, tensors["weight_scale"], unpacked, scheme, tensors.get("weight_g_idx"))


def unpack_nvfp4(tensors: Mapping[str, torch.Tensor], scheme: FourBitScheme) -> FourBitWeight:
    """Return the weight in NVFP4: numbers in e2m1, two in a byte, the first in its lower bits.

    ``weight_scale`` float8_e4m3fn [outs, ins / 16]: times one number for the layer, ``weight_scale_2`` of ModelOpt, or
    the reciprocal of ``weight_global_scale`` of compressed-tensors.

    Raises:
        ValueError: this number is not positive.
    """
    packed = tensors["weight" if scheme.form == "modelopt" else "weight_packed"]
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    if scheme.form == "modelopt":
        unit = float(tensors["weight_scale_2"])
    else:
        unit = float(1 / tensors["weight_global_scale"].float())
    if not 0 < unit < float("inf"):
        raise ValueError(f"the scale of a layer in NVFP4 is {unit}")
    groups = torch.arange(codes.shape[1]) // scheme.group
    return FourBitWeight(codes, tensors["weight_scale"].float() * unit, None, groups, unit)


UNPACK = {
    "gptq": unpack_gptq, "awq": unpack_awq, "compressed-tensors": unpack_compressed, "nvfp4": unpack_nvfp4,
    "modelopt": unpack_nvfp4,
}  # fmt: skip
"""The functions that return the weights of each form."""


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Return the halves of the bytes of int32 [rows, words], lowest first, as uint8 [rows, 8 · words]."""
    in_bytes = words.contiguous().view(torch.uint8)
    return torch.stack((in_bytes & 15, in_bytes >> 4), dim=-1).flatten(1)


def _weight(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    scheme: FourBitScheme,
    group_of: torch.Tensor | None,
) -> FourBitWeight:
    ins = codes.shape[1]
    groups = torch.arange(ins) // (scheme.group or ins) if group_of is None else group_of.long()
    if zeros is not None:
        zeros = None if bool((zeros == SYMMETRIC_ZERO).all()) else zeros.contiguous()
    return FourBitWeight(codes.contiguous(), scales.float().contiguous(), zeros, groups)
