"""Tensors of GGUF files, by the names and in the order of rows that the model has.

llama.cpp has names of its own, and keeps the rows of queries and keys of Llama in another order: its RoPE turns
neighbouring dimensions, and that of the model the first and the second half of a head. Norms of Gemma are kept with the
one that the model adds.
"""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_model import GgufTable, GgufTensor, read_table

from pagewise_executor.models.gguf_weight import FORMATS, unpack

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}  # nosec B105 # no secret
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OF_GEMMA = _OF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_GLM = _OF_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "exp_probs_b": "mlp.gate.e_score_correction",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    **{f"nextn.{name}": name for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
_OTHERS = {"gemma2": _OF_GEMMA, "gemma3": _OF_GEMMA, "glm4moe": _OF_GLM}
"""By architecture."""
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+)\.(weight|bias)")
_UNREAD = {"rope_freqs.weight"}
"""The configuration has these values."""
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_PERMUTED = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}


def model_name(name: str, architecture: str) -> str | None:
    """Return the name in the model of a tensor of the file, of experts without their number; None: it has none."""
    if (match := _LAYER.fullmatch(name)) is not None:
        if (module := _OTHERS.get(architecture, _OF_LAYER).get(match[2])) is None:
            return None
        return f"model.layers.{match[1]}.{module}.{match[3]}".replace("correction.bias", "correction_bias")
    module, _, kind = name.rpartition(".")
    return f"{_NAMES[module]}.{kind}" if module in _NAMES else None


def tensors_of(file: Path) -> dict[str, GgufTensor]:
    """Return the tensors of a file by their names in the model.

    Raises:
        ModelError: the file has changed, or has a tensor that is not known or in a format that is not supported.
    """
    found: dict[str, GgufTensor] = {}
    table = _table(file)
    for name, tensor in table.tensors.items():
        if tensor.file != file.name or name in _UNREAD:
            continue
        if (own := model_name(name, table.architecture)) is None:
            raise ModelError(f"{file} has a tensor {name} that is not known of its architecture, and is not served")
        if tensor.kind not in FORMATS.keys() | _FLOATS.keys():
            raise ModelError(
                f"{file}: its tensor {name} is in {tensor.kind}, and GGUF files are served in "
                f"{', '.join([*FORMATS, *_FLOATS])}"
            )
        if tensor.start + tensor.size > file.stat().st_size:
            raise ModelError(f"{file} is truncated: it ends within its tensor {name}; download it again")
        of_experts = len(tensor.shape) == 3 and tensor.shape[0] > 0 and ".experts." in own
        if len(tensor.shape) > 2 and not of_experts:
            raise ModelError(f"{file}: its tensor {name} has the shape {list(tensor.shape)}, and is of no experts")
        found |= _of_each_expert(own, tensor) if of_experts else {own: tensor}
    return found


def _of_each_expert(own: str, tensor: GgufTensor) -> dict[str, GgufTensor]:
    """Return the parts of a tensor of all experts, by their names in the model."""
    count, *shape = tensor.shape
    size = tensor.size // count
    return {
        own.replace(".experts.", f".experts.{expert}."): msgspec.structs.replace(
            tensor, shape=shape, start=tensor.start + expert * size, size=size
        )
        for expert in range(count)
    }


class OpenedGguf:
    """A file whose tensors are read, by their names in the model."""

    def __init__(self, file: Path) -> None:
        self._file, self._tensors = file, tensors_of(file)
        self._heads: dict[str, int] = {}
        self._architecture = _table(file).architecture
        if self._architecture == "llama":
            config = json.loads((file.parent / "config.json").read_text())
            self._heads = {_OF_LAYER[kind]: config[heads] for kind, heads in _PERMUTED.items()}

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor: floats, or its blocks as uint8 [outs, bytes of a row].

        Raises:
            ModelError: scales of its blocks are not finite.
        """
        tensor = self._tensors[name]
        raw = torch.from_numpy(np.fromfile(self._file, np.uint8, tensor.size, offset=tensor.start))
        if tensor.kind in FORMATS:
            found = raw.view(*tensor.shape[:-1], -1)
            self._check(name, found, tensor.kind)
        else:
            found = raw.view(_FLOATS[tensor.kind]).view(tensor.shape)
            if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
                found = found - 1  # which the model adds
        heads = next((count for module, count in self._heads.items() if f".{module}." in name), 0)
        # Pairs of neighbouring rows become rows of the first and the second half.
        rest = found.shape[1:]
        return found.reshape(heads, -1, 2, *rest).transpose(1, 2).reshape(-1, *rest) if heads else found

    def get_slice(self, name: str) -> Any:
        """Return a tensor as floats, to be cut."""
        found, kind = self.get_tensor(name), self._tensors[name].kind
        return Sliced(unpack(found, kind).dequantised() if kind in FORMATS else found)

    def _check(self, name: str, blocks: torch.Tensor, kind: str) -> None:
        form = FORMATS[kind]
        for start in form.scales:
            scales = blocks.view(-1, form.size)[:, start : start + 2].contiguous().view(torch.float16)
            if not bool(scales.isfinite().all()):
                raise ModelError(f"{self._file}: scales of its tensor {name} are not finite; download it again")


class Sliced:
    """A tensor with the functions of a slice of safetensors."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._tensor.shape)

    def __getitem__(self, where: Any) -> torch.Tensor:
        """Return a part of the tensor."""
        return self._tensor[where]


def _table(file: Path) -> GgufTable:
    table = read_table(file.parent)
    assert table is not None
    return table
