"""Which kernels a configuration uses, and the shapes for which they are compiled."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from pagewise_kernels.launch import interpreted
from pagewise_kernels.mxfp4 import BLOCK, Mxfp4Weights
from pagewise_kernels.skinny_linear import MOST_ROWS
from pagewise_shared.config.adapter_options import adapter_capacity
from torch import nn

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.attention.device_tables import table_shapes
from pagewise_executor.attention.prefill_libraries import with_small_limits
from pagewise_executor.device_defaults import SizedConfig
from pagewise_executor.kernel_checks.recurrent_problems import forms_of, typical_forms
from pagewise_executor.kv.layer_groups import PageLayout
from pagewise_executor.kv.segment_mover import KeyRotation
from pagewise_executor.models.four_bit_linear import TritonInt4Linear
from pagewise_executor.models.four_bit_weight import FourBitWeight
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.grouped_experts import GroupedExperts, GroupedRouter
from pagewise_executor.models.loader import LoadedModel
from pagewise_executor.models.mxfp4_experts import TritonMxfp4Experts
from pagewise_executor.models.plain_recurrence import PlainRecurrence
from pagewise_executor.models.quantised_linear import QuantisedLinear
from pagewise_executor.models.skinny_linear import SkinnyLinear

_FEW_ENTRIES = 500
"""Entries of a vocabulary for Triton's interpreter, which takes seconds for a large one and compiles nothing for it."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The kernels that a configuration uses, and the shapes for which they are compiled.

    ``attention``: the kinds of attention layers. ``hidden_size``, ``gate_up``, ``has_head_norm``: of a fused decoder
    layer; 0 if transformers computes the layers, with ``write_kv``; no ``gate_up`` if all layers have experts.
    ``linears``: quantised linear layers, one of each kind. ``mixture``: router and experts of a layer. ``mxfp4``:
    experts in MXFP4, and how many of them a token has. ``rotation``: of the keys that segments move. ``adapter_rank``:
    0 without adapters. ``rings``: block tables of windowed layers are rings. ``recurrent``: the forms of recurrent
    layers.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    vocab_size: int
    attention: tuple[AttentionShape, ...]
    writes_kv: bool
    hidden_size: int = 0
    gate_up: nn.Module | None = None
    has_head_norm: bool = False
    linears: tuple[QuantisedLinear, ...] = ()
    mixture: tuple[GroupedRouter, GroupedExperts] | None = None
    mxfp4: tuple[TritonMxfp4Experts, int] | None = None
    int4: TritonInt4Linear | None = None
    rotation: KeyRotation | None = None
    adapter_rank: int = 0
    deterministic: bool = False
    rings: bool = False
    recurrent: tuple[PlainRecurrence, ...] = ()

    def draw(self, *sizes: int, seed: int = 0) -> torch.Tensor:
        """Return normal numbers in the model's type; the same for the same seed on every device."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(*sizes, generator=generator).to(self.device, self.dtype)

    def ints(self, *values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Return integers on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def use_of(
    config: SizedConfig, loaded: LoadedModel, kv_dtype: torch.dtype, pages: PageLayout | None = None
) -> KernelUse:
    """Return the kernels that a loaded model uses. ``pages``: of a model with several groups of layers."""
    tables = table_shapes(pages, loaded.max_model_len, config.block_size, config.max_num_batched_tokens)
    shapes = loaded.layers
    layers = [module for module in loaded.model.modules() if isinstance(module, FusedDecoderLayer)]
    return KernelUse(
        loaded.device, loaded.dtype, kv_dtype, config.block_size,
        min(loaded.vocab_size, _FEW_ENTRIES) if interpreted() else loaded.vocab_size,
        tuple(dict.fromkeys(map(with_small_limits, shapes))),
        writes_kv=len(layers) < len(shapes),
        hidden_size=len(layers[0].norm_before_mlp.weight) if layers else 0,
        gate_up=next((layer.gate_up for layer in layers if layer.mlp is None), None),
        has_head_norm=bool(layers) and layers[0].head_norm is not None,
        linears=_linears(loaded.model),
        mixture=next(_mixtures(layers), None),
        mxfp4=next(_mxfp4_experts(loaded.model), None),
        int4=next((each for each in loaded.model.modules() if isinstance(each, TritonInt4Linear)), None),
        rotation=loaded.rotations[0] if loaded.rotations and not shapes[0].latent else None,
        adapter_rank=adapter_capacity(config).max_rank,
        deterministic=config.deterministic,
        rings=any(shape.ring for shape in tables),
        recurrent=forms_of(loaded),
    )  # fmt: skip


def _linears(model: nn.Module) -> tuple[QuantisedLinear, ...]:
    """Return the smallest quantised layer of each kind: PyTorch makes a float32 copy of it."""
    found: dict[tuple[object, ...], QuantisedLinear] = {}
    for module in model.modules():
        if isinstance(module, QuantisedLinear) and type(module) is not QuantisedLinear:
            kind = type(module), module.values.dtype, module.inputs, module.block[0], module.bias is None
            found[kind] = min(found.get(kind, module), module, key=lambda each: each.values.numel())
    return tuple(found.values())


def _mixtures(layers: list[FusedDecoderLayer]) -> Iterator[tuple[GroupedRouter, GroupedExperts]]:
    for layer in layers:
        if layer.mlp is not None and isinstance(router := layer.mlp.gate, GroupedRouter):
            experts = layer.mlp.experts
            assert isinstance(experts, GroupedExperts)
            yield router, experts


def _mxfp4_experts(model: nn.Module) -> Iterator[tuple[TritonMxfp4Experts, int]]:
    for module in model.modules():
        if isinstance(experts := getattr(module, "experts", None), TritonMxfp4Experts):
            yield experts, int(module.router.top_k)  # type: ignore[union-attr, arg-type]


def typical_use(device: torch.device) -> KernelUse:
    """Return all kernels in shapes as common models have them, or in small ones for the interpreter."""
    small = device.type == "cpu"
    heads, kv_heads, head_dim, hidden = (4, 2, 32, 64) if small else (32, 8, 128, 4096)
    latent, rotated = (32, 16) if small else (512, 64)
    dtype = torch.float32 if small else torch.bfloat16
    gate_up = SkinnyLinear(hidden, 4 * hidden if small else 2048, bias=False, device="meta")
    gate_up.few_rows = MOST_ROWS
    gate_up.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    use = KernelUse(
        device, dtype, dtype, 16, _FEW_ENTRIES if small else 128256,
        (
            AttentionShape(heads, kv_heads, head_dim, dtype, head_dim**-0.5),
            AttentionShape(heads, 1, rotated + latent, dtype, head_dim**-0.5, latent=latent),
            AttentionShape(heads, kv_heads, head_dim, dtype, head_dim**-0.5, shared=head_dim // 4 * 3),
        ),
        writes_kv=True, hidden_size=hidden, gate_up=gate_up, has_head_norm=True, adapter_rank=1,
        rotation=KeyRotation(torch.arange(head_dim // 2, device=device) / head_dim), deterministic=True,
    )  # fmt: skip
    gate_up.weight = nn.Parameter(use.draw(gate_up.out_features, hidden), requires_grad=False)
    experts, inner = (4, 32) if small else (16, 512)
    router = GroupedRouter(use.draw(experts, hidden), 2, True, dtype)
    mixture = router, GroupedExperts(use.draw(experts, 2 * inner, hidden), use.draw(experts, hidden, inner))
    mxfp4 = TritonMxfp4Experts(
        _drawn_mxfp4(use, experts, 2 * inner, hidden), _drawn_mxfp4(use, experts, hidden, inner), 7.0, 1.702
    )
    recurrent = typical_forms(*((2, 16, 24) if small else (4, 128, 128)))
    return replace(use, mixture=mixture, mxfp4=(mxfp4, 2), int4=_drawn_int4(use, hidden), recurrent=recurrent)


def _drawn_int4(use: KernelUse, ins: int) -> TritonInt4Linear:
    codes, zeros = (torch.randint(16, (96, size), dtype=torch.uint8, device=use.device) for size in (ins, ins // 32))
    scales, group_of = use.draw(96, ins // 32).float().abs(), torch.arange(ins, device=use.device) // 32
    return TritonInt4Linear(FourBitWeight(codes, scales, zeros, group_of), None, use.dtype)


def _drawn_mxfp4(use: KernelUse, experts: int, outs: int, ins: int) -> Mxfp4Weights:
    blocks, scales = (
        torch.randint(*span, (experts, outs, ins // BLOCK, *more), dtype=torch.uint8, device=use.device)
        for span, more in (((0, 256), (BLOCK // 2,)), ((120, 124), ()))
    )
    return Mxfp4Weights(blocks, scales, use.draw(experts, outs))
