"""Quantised checkpoints of transformers' families, whose models are built without weights and read as stored.

transformers would convert quantised weights to bfloat16, and it keeps the experts of a mixture in tensors of three
dimensions, for which scales differ by expert. So its modules compute here, but ``Checkpoint`` reads their weights, and
each expert has linear layers of its own, as the files have them.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pagewise_executor.collectives import Ranks
from pagewise_executor.models.checkpoint import Checkpoint
from pagewise_executor.models.grouped_experts import sum_one_by_one
from pagewise_executor.models.latents import absorb_latents
from pagewise_executor.models.long_rope import fix_rope
from pagewise_executor.models.mtp import MtpNames
from pagewise_executor.models.mxfp4_experts import place_mxfp4
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint
from pagewise_executor.models.shard_plans import division_plan
from pagewise_executor.models.shards import EXPERTS, Shards, vocabulary_names
from pagewise_executor.models.text_part import text_name
from pagewise_executor.models.weight_files import Headers

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
_NOT_TEXT = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector)\.")
_OF_TEXT = re.compile(r"^(model\.)?language_model\.(model\.)?")


_OF_MIXTRAL = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""The files' names of modules, for which llm-compressor writes the names of other families in part."""


def _name_of_mixtral(name: str) -> str:
    return ".".join(_OF_MIXTRAL.get(part, part) for part in name.split("."))


def _text(name: str) -> str | None:
    """Return the name in the model of text alone; None for other modules."""
    return name if name.startswith("lm_head.") else text_name(name)


def _text_of_gemma3(name: str) -> str | None:
    """Return the name in the model of text alone; None for the modules of images."""
    if _NOT_TEXT.match(name):
        return None
    bare = _OF_TEXT.sub("", name)
    return bare if bare == name or bare.startswith("lm_head.") else f"model.{bare}"


FAMILIES: dict[str, Callable[[str], str | None]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3"), str),
    "gemma2": str,
    "gemma3": _text_of_gemma3,
    "gemma3_text": _text_of_gemma3,
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), str),
    "mixtral": _name_of_mixtral,
    "phi3": str,
    "qwen2_moe": str,
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _text),
    "qwen3_moe": str,
    "qwen3_next": str,
}
"""The argument ``named`` of ``Checkpoint`` by the model_type of config.json."""
DIVIDED = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mixtral", "qwen3_moe")
"""Families whose quantised checkpoints several ranks divide."""


class FamilyCheckpoint(Checkpoint):
    """The weight files of a model of one of these families, or of gpt-oss with experts in MXFP4, and the model without
    weights and without images.

    ``config``: of transformers; ``part``: of a rank's part of the model. ``mtp``: the names of an MTP layer, which is
    the last one of the model then. ``Checkpoint`` describes the other arguments and the errors.

    Raises:
        ValueError: the rope types of the model differ by layer.
    """

    def __init__(
        self,
        name: str,
        config: Any,
        headers: Headers,
        device: torch.device,
        quantised: QuantisedCheckpoint,
        dtype: torch.dtype,
        max_model_len: int,
        part: Any = None,
        mtp: MtpNames | None = None,
    ) -> None:
        named, text = FAMILIES.get(config.model_type), config.get_text_config(decoder=True)
        tied = bool(text.tie_word_embeddings)
        model = _empty(text, device, dtype)
        if named is None:
            place_mxfp4(model)
        else:
            _place_experts(model)
        self._empty_part: Callable[[], nn.Module] | None = None
        if part is not None and named is not None:
            self._plan = division_plan(model, vocabulary_names(model))
            self._plan |= {
                re.sub(r"\.\d+(?=\.|$)", ".*", path): EXPERTS
                for path, module in model.named_modules()
                if isinstance(module, Experts)
            }

            def empty_part() -> nn.Module:
                made = _empty(part.get_text_config(decoder=True), device, dtype)
                _place_experts(made)
                fix_rope(made, max_model_len)
                return made

            self._empty_part = empty_part
        named = named or str
        if mtp is not None:
            mtp.add_empty(model)
            named = mtp.named(named)
        super().__init__(name, model, headers, device, quantised, tied=tied, named=named)
        self.rope = fix_rope(model, max_model_len)

    def shard(self, ranks: Ranks) -> tuple[nn.Module, Shards | None]:
        """Return this rank's part of the model, and how the model is divided."""
        if self._empty_part is not None:
            self._divide(self._empty_part(), ranks, self._plan)
        return self.model, self._shards

    def read(self, part: str, dtype: torch.dtype) -> None:
        """Read the weights of a part; see ``Checkpoint``."""
        super().read(part, dtype)
        absorb_latents(self.model.get_submodule(part))


def _place_experts(model: nn.Module) -> None:
    """Give each expert of a model linear layers of its own."""
    for path, module in list(model.named_modules()):
        if isinstance(getattr(module, "gate_up_proj", None), nn.Parameter):
            model.set_submodule(path, Experts(module))


class Experts(nn.ModuleList):
    """The experts of a mixture, each with linear layers of its own. It replaces a module of transformers, ``fused``.

    ``has_silu``: their activation is SiLU.
    """

    def __init__(self, fused: nn.Module) -> None:
        gate_up, down = fused.gate_up_proj, fused.down_proj
        assert isinstance(gate_up, nn.Parameter)
        assert isinstance(down, nn.Parameter)
        count, hidden, inner = down.shape
        assert gate_up.shape == (count, 2 * inner, hidden)
        assert isinstance(fused.act_fn, nn.Module)
        super().__init__(_Expert(hidden, inner, fused.act_fn) for _ in range(count))
        x = torch.linspace(-10, 10, 33)
        self.has_silu = torch.equal(fused.act_fn(x), nn.functional.silu(x))

    def linears(self) -> list[list[nn.Module]]:
        """Return gate, up and down of each expert."""
        return [[expert.get_submodule(name) for name in _PROJECTIONS] for expert in self]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Map x [tokens, hidden] to the weighted sums [tokens, hidden] of the outputs of each token's experts.

        ``chosen`` int64 [tokens, k]: the experts. ``weights`` [tokens, k]: of the experts.
        """
        return sum_one_by_one(lambda expert, rows: self[expert](rows), len(self), x, chosen, weights)


class _Expert(nn.Module):
    """An expert without weights: gate, up, and down behind them."""

    def __init__(self, hidden: int, inner: int, act_fn: nn.Module) -> None:
        super().__init__()
        self.act_fn = act_fn
        for name, (ins, outs) in zip(_PROJECTIONS, ((hidden, inner), (hidden, inner), (inner, hidden)), strict=True):
            self.add_module(name, nn.Linear(ins, outs, bias=False, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.get_submodule(name) for name in _PROJECTIONS)  # which have been replaced since
        made: torch.Tensor = down(self.act_fn(gate(x)) * up(x))
        return made


def _empty(config: Any, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Build a model whose weights have no data, but whose buffers have."""
    from transformers import AutoModelForCausalLM

    from pagewise_executor.attention.paged import NAME

    def without_data(module: nn.Module, name: str, weight: nn.Parameter) -> nn.Parameter | None:
        return None if weight.is_meta else nn.Parameter(weight.to("meta"), weight.requires_grad)

    # Under torch.device("meta") the buffers would have no data either. Nothing writes to a weight before this hook gets
    # it, so the operating system gives no memory for it.
    hook = register_module_parameter_registration_hook(without_data)  # type: ignore[arg-type] # it may return a weight
    try:
        model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=dtype)  # type: ignore[no-untyped-call]
    finally:
        hook.remove()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(device))
    return model.eval().requires_grad_(False)  # type: ignore[no-any-return]
