"""GGUF files of tiny models, written by the package gguf, with weights in the formats that llama.cpp writes."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from pagewise_shared.gguf_tokenizer import TRANSFORMERS
from safetensors.torch import load_file
from tokenizers import pre_tokenizers

from tests.model_builders import build_model

Floats = npt.NDArray[np.float32]
Blocks = npt.NDArray[np.uint8]

SHAPE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 288, "tie_word_embeddings": False,
}  # fmt: skip
"""Settings of a model whose rows are whole blocks in all formats."""
ARCHITECTURES = {name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3")}
ARCHITECTURES |= {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "glm4_moe": "glm4moe"}
GEMMA = {"head_dim": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "query_pre_attn_scalar": 256}
"""Settings that transformers reads of every GGUF file of Gemma, whatever it says."""
EXPERTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "routed_scaling_factor": 1.5,
    },
}
"""Settings of mixtures."""
_LEAST, _MOST = 2.0**-24, 65504.0
_OF_MTP = re.compile(r"layers\.\d+\.(enorm|hnorm|eh_proj|embed_tokens|shared_head)\.")


def build_gguf(
    path: Path, family: str = "llama", kind: str | Callable[[str], str] = "Q4_0", fields: Mapping[str, Any] = {},
    skip: str = "", only: str | tuple[str, ...] = "", big_endian: bool = False,
    split: str = "qwen2", spaces: bool | None = None, build: Callable[..., Any] = build_model, **settings: Any,
) -> Any:  # fmt: skip
    """Write a model of random weights to the file ``path``, and return the model before its weights were rounded.

    ``kind``: the format of matrices, or a function from the name of one to it. ``fields``: more fields of the file, or
    others, by their keys without the architecture; None: the file has none. ``skip``: a tensor that is left out.
    ``only``: the beginnings of the names of those that are written. ``split``: how a byte-level tokenizer splits texts.
    ``spaces``: the tokenizer is one of SentencePiece, and says whether it adds a space before texts. ``build``: saves
    the model, of which the last layer may be for MTP.
    """
    if tuple(map(int, transformers.__version__.split(".")[:2])) < TRANSFORMERS:
        pytest.skip(f"transformers {transformers.__version__} is too old for GGUF files")
    model = build(family, path.parent / "original", **SHAPE | settings)
    config, name = model.config, ARCHITECTURES[family]
    writer = gguf.GGUFWriter(path, name, endianess=gguf.GGUFEndian.BIG if big_endian else gguf.GGUFEndian.LITTLE)
    head_dim = settings.get("head_dim", SHAPE["head_dim"])
    given = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.freq_base": float(_rope(config)["rope_theta"]),
    }
    if name.startswith("gemma"):
        given["attention.sliding_window"] = config.sliding_window
    if family == "glm4_moe":
        given |= {
            "expert_shared_count": config.n_shared_experts,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": config.routed_scaling_factor,
            "expert_gating_func": 2,
            "leading_dense_block_count": config.first_k_dense_replace,
            "rope.dimension_count": head_dim // 2,
        }
    if (experts := getattr(config, "num_experts", getattr(config, "num_local_experts", None))) is not None:
        given |= {"expert_count": experts, "expert_used_count": config.num_experts_per_tok}
    if family in ("qwen3_moe", "glm4_moe"):
        given["expert_feed_forward_length"] = config.moe_intermediate_size
    for key, value in (given | dict(fields)).items():
        if value is not None:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32, bool: writer.add_bool}[
                type(value)
            ]
            add(key if key.startswith("split.") else f"{name}.{key}", value)
    if spaces is None:
        _add_tokenizer(writer, config.vocab_size, split)
    else:
        _add_sentencepiece(writer, config.vocab_size, prefix=spaces)
    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    saved = load_file(path.parent / "original" / "model.safetensors")
    mtp = {full: weight for full, weight in saved.items() if _OF_MTP.search(full)}
    for full, weight in (_apart(model.state_dict()) | mtp).items():
        own = names.get_name(full, try_suffixes=(".weight", ".bias"))
        if (tied and full.startswith("lm_head")) or own == skip or not own.startswith(only):
            continue
        values = np.ascontiguousarray(_permuted(full, weight.float().numpy(), config, name))
        if name.startswith("gemma") and full.endswith("norm.weight"):
            values = values + 1
        if (form := _form(values.ndim, own, kind)) == "F32":
            writer.add_tensor(own, values)
        else:
            writer.add_tensor(own, quantise(values, form), raw_dtype=Kind[form])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _form(dimensions: int, name: str, kind: str | Callable[[str], str]) -> str:
    """Return the format of a tensor: llama.cpp keeps routers in float32."""
    if dimensions < 2 or "ffn_gate_inp" in name:
        return "F32"
    return kind if isinstance(kind, str) else kind(name)


def _apart(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights of a model, those of gate and up of experts apart."""
    found: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith("experts.gate_up_proj"):
            halves = zip(("gate", "up"), weight.chunk(2, dim=1), strict=True)
            found |= {f"{name.replace('gate_up', part)}.weight": half for part, half in halves}
        else:
            corrected = name.replace("e_score_correction_bias", "e_score_correction.bias")
            found[corrected + ".weight" * name.endswith("experts.down_proj")] = weight
    return found


def round_weights(model: Any, kind: str | Callable[[str], str]) -> None:
    """Give the weights of a mixture that ``build_gguf`` has returned the values of the file, by the package gguf."""
    of_glm = model.config.model_type == "glm4_moe"
    arch = gguf.MODEL_ARCH.GLM4_MOE if of_glm else gguf.MODEL_ARCH.QWEN3MOE
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for full, weight in _apart(model.state_dict()).items():
        if (form := _form(weight.ndim, names.get_name(full, try_suffixes=(".weight",)), kind)) != "F32":
            weight.copy_(rounded(weight, form))


def rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return weights after they were in a format, by the package gguf."""
    blocks = quantise(np.ascontiguousarray(weight.float().numpy()), form)
    return torch.from_numpy(gguf.dequantize(blocks, Kind[form]))


def _add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int, split: str) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["t h", "th e", "i n"]
    tokens = ["<bos>", "<eos>", "<end>", *alphabet, *("".join(merge.split()) for merge in merges)]
    tokens += [f"[PAD{n}]" for n in range(len(tokens), vocab_size)]
    kinds = [3, 3, 3, *[1] * (len(alphabet) + len(merges))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds + [5] * (vocab_size - len(kinds)))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}<end>{% endfor %}")


def _add_sentencepiece(writer: gguf.GGUFWriter, vocab_size: int, *, prefix: bool) -> None:
    pieces = ["\u2581t", "he", "\u2581the", "\u2581", "t", "h", "e"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    count = vocab_size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens + [f"[PAD{n}]" for n in range(count)])
    writer.add_token_scores([0.0] * 259 + [-float(n) for n in range(len(pieces))] + [-1e4] * count)
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces) + [5] * count)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_space_prefix(prefix)


def _rope(config: Any) -> Mapping[str, Any]:
    return config.rope_parameters.get("full_attention", config.rope_parameters)  # type: ignore[no-any-return]


def _permuted(name: str, values: Floats, config: Any, architecture: str) -> Floats:
    """Return the rows of queries and keys of Llama in the order of llama.cpp's RoPE."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((count for part, count in heads.items() if f".{part}." in name), 0)
    if architecture != "llama" or not count:
        return values
    halves = values.reshape(count, 2, len(values) // count // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def quantise(values: Floats, kind: str) -> Blocks:
    """Return rows of values [.., size] in a format, as blocks uint8 [.., bytes]."""
    if kind in _K_FORMATS:
        blocks = _K_FORMATS[kind](values.reshape(-1, 256))
        return blocks.reshape(*values.shape[:-1], -1)
    made: Blocks = gguf.quantize(values, Kind[kind])
    return made


def _half(values: Floats) -> Blocks:
    """Return float16 [blocks] as bytes [blocks, 2]."""
    return np.ascontiguousarray(values.astype(np.float16)[:, None]).view(np.uint8)


def _by_ranges(values: Floats, most: int) -> tuple[Floats, Blocks, Blocks]:
    """Return scale and least [2, blocks], their steps [blocks, 2, 8] and codes up to ``most`` [blocks, 8, 32] of groups
    of 32, where a code is a part of the range from the least value of its group to the largest."""
    groups = values.reshape(-1, 8, 32)
    least = np.minimum(groups.min(axis=2), 0)
    ranges = np.stack(((np.maximum(groups.max(axis=2), 0) - least) / most, -least))
    scales = (ranges.max(axis=2) / 63).clip(_LEAST, _MOST).astype(np.float16).astype(np.float32)
    steps = (ranges / scales[:, :, None]).round().clip(0, 63).astype(np.uint8)
    wide = scales[:, :, None] * steps
    codes = ((groups + wide[1][:, :, None]) / np.maximum(wide[0], 1e-9)[:, :, None]).round().clip(0, most)
    return scales, steps.swapaxes(0, 1), codes.astype(np.uint8)


def _packed_steps(steps: Blocks) -> Blocks:
    """Return steps of six bits [blocks, 2, 8] in twelve bytes [blocks, 12]."""
    low, high = steps[:, :, :4], steps[:, :, 4:]
    return np.concatenate(
        [low[:, 0] | high[:, 0] >> 4 << 6, low[:, 1] | high[:, 1] >> 4 << 6, high[:, 0] & 15 | high[:, 1] << 4], axis=1
    )


def _q4_k(values: Floats) -> Blocks:
    scales, steps, codes = _by_ranges(values, 15)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return np.concatenate([*map(_half, scales), _packed_steps(steps), packed.reshape(-1, 128)], axis=1)


def _q5_k(values: Floats) -> Blocks:
    scales, steps, codes = _by_ranges(values, 31)
    packed = codes[:, 0::2] & 15 | codes[:, 1::2] << 4
    fifths = ((codes >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
    return np.concatenate([*map(_half, scales), _packed_steps(steps), fifths, packed.reshape(-1, 128)], axis=1)


def _q6_k(values: Floats) -> Blocks:
    groups = values.reshape(-1, 16, 16)
    ranges = np.abs(groups).max(axis=2) / 31
    scales = (ranges.max(axis=1) / 127).clip(_LEAST, _MOST).astype(np.float16).astype(np.float32)
    steps = (ranges / scales[:, None]).round().astype(np.int8)
    wide = np.maximum(scales[:, None] * steps, 1e-9)[:, :, None]
    codes = ((groups / wide).round().clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | codes[:, :, 2:] << 4
    high = ((codes >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    parts = [low.reshape(-1, 128), high.reshape(-1, 64), steps.view(np.uint8), _half(scales)]
    return np.concatenate(parts, axis=1)


_K_FORMATS: dict[str, Callable[[Floats], Blocks]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
