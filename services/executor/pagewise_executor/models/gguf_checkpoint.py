"""Layers and embeddings of GGUF files, as the files have them, before they compute."""

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import nn

from pagewise_executor.models.four_bit_weight import FourBitWeight
from pagewise_executor.models.gguf_weight import FORMATS, GgufWeight, in_four_bits, unpack
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint


class GgufScheme(NamedTuple):
    """How a linear layer or an embedding is stored: in a format of GGUF."""

    kind: str


class GgufCheckpoint(QuantisedCheckpoint):
    """How the linear layers and embeddings of GGUF files are stored. ``kinds``: the formats of all their tensors."""

    def __init__(self, name: str, kinds: Collection[str]) -> None:
        super().__init__(name, [], [], strict=False)
        self.in_blocks = not FORMATS.keys().isdisjoint(kinds)
        self.in_floats = not self.in_blocks

    def scheme(self, linear: str, stored: str | None) -> GgufScheme | None:
        """Return the format of a layer; None: it is not quantised. ``stored``: the type of its weight in the file."""
        return GgufScheme(stored) if stored in FORMATS else None


class StoredGgufLinear(nn.Module):
    """A linear layer as a GGUF file has it: ``weight`` uint8 [outs, bytes of a row]. ``shape``: outputs and inputs.
    ``part``: the shape of a rank's part of it."""

    part: list[int] | None = None

    def __init__(self, scheme: GgufScheme, outs: int, ins: int, bias: bool) -> None:
        super().__init__()
        self.kind, self.shape = scheme.kind, [outs, ins]
        self.weight = _blocks(scheme.kind, outs, ins)
        if bias:
            self.bias = nn.Parameter(torch.empty(outs, device="meta"), requires_grad=False)

    def loaded(self) -> tuple[GgufWeight | FourBitWeight, torch.Tensor | None]:
        """Return the weight and the bias."""
        weight = unpack(self.weight.detach(), self.kind)
        bias: torch.Tensor | None = getattr(self, "bias", None)
        return in_four_bits(weight) if self.kind == "Q4_0" else weight, None if bias is None else bias.detach()


class GgufEmbedding(nn.Module):
    """An embedding whose rows stay in blocks, uint8 [ids, bytes of a row], and are dequantised when they are read.

    ``replaced``: the embedding that it replaces, one of torch, or one of Gemma, which multiplies rows by a number.
    """

    def __init__(self, scheme: GgufScheme, replaced: nn.Embedding) -> None:
        super().__init__()
        ids, size = replaced.num_embeddings, replaced.embedding_dim
        self.kind, self.shape, self.embedding_dim = scheme.kind, [ids, size], size
        self.weight = _blocks(scheme.kind, ids, size)
        self.scale: float = getattr(replaced, "scalar_embed_scale", 1.0)
        assert type(replaced) is nn.Embedding or hasattr(replaced, "scalar_embed_scale")

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [..] to float32 [.., size]."""
        rows = self.weight[ids.flatten()]
        return unpack(rows, self.kind).dequantised().view(*ids.shape, -1) * self.scale


def _blocks(kind: str, outs: int, ins: int) -> nn.Parameter:
    weights, size = FORMATS[kind][:2]
    return nn.Parameter(torch.empty(outs, ins // weights * size, dtype=torch.uint8, device="meta"), requires_grad=False)
