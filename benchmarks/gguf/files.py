"""Writes GGUF files: of a Llama checkpoint in float16, or of random weights in Q4_0 with the shape of Llama 3.2 1B.

    python -m benchmarks.gguf.files demo.gguf [--model FOLDER]
    python -m benchmarks.gguf.files random.gguf --random

The tokenizer is that of the model, which has to be byte-level. A random model has it with 128,256 tokens.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from pagewise_shared.model_files import resolve_model
from safetensors.torch import load_file

RANDOM: dict[str, Any] = {
    "max_position_embeddings": 8192, "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 500_000.0}, "vocab_size": 128_256,
}  # fmt: skip
"""The shape of Llama 3.2 1B, without its factors of RoPE."""
_BLOCK = 32
"""Weights of a block of Q4_0, in 18 bytes."""


def write_checkpoint(model: Path, file: Path) -> None:
    """Write a checkpoint of Llama in the folder ``model`` to ``file``, with matrices in float16."""
    config = json.loads((model / "config.json").read_text())
    writer = _writer(file, config, model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in load_file(model / "model.safetensors").items():
        values = tensor.float().numpy()
        if count := next((count for part, count in heads.items() if part in name), 0):
            # llama.cpp turns neighbouring dimensions, and not the first and the second half of a head.
            halves = values.reshape(count, 2, len(values) // count // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        kind = np.float16 if values.ndim > 1 else np.float32
        own = names.get_name(name, try_suffixes=(".weight",))
        assert own is not None
        writer.add_tensor(own, values.astype(kind))
    _write(writer)


def write_random(model: Path, file: Path) -> None:
    """Write random weights in Q4_0 to ``file``. ``model``: the folder of a model with a tokenizer."""
    random, writer = np.random.default_rng(0), _writer(file, RANDOM, model)
    hidden, inner = RANDOM["hidden_size"], RANDOM["intermediate_size"]
    keys = RANDOM["num_key_value_heads"] * RANDOM["head_dim"]
    layer = {
        "attn_q": (hidden, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden), "attn_output": (hidden, hidden),
        "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner),
    }  # fmt: skip
    matrices = {"token_embd": (RANDOM["vocab_size"], hidden)}
    layers = range(RANDOM["num_hidden_layers"])
    matrices |= {f"blk.{number}.{name}": shape for number in layers for name, shape in layer.items()}
    for name, (outs, ins) in matrices.items():
        blocks = random.integers(0, 256, (outs * ins // _BLOCK, 18), dtype=np.uint8)
        blocks[:, :2] = np.frombuffer(np.float16(0.1 / ins**0.5).tobytes(), np.uint8)
        writer.add_tensor(f"{name}.weight", blocks.reshape(outs, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    for name in ["output_norm", *(f"blk.{number}.{kind}_norm" for number in layers for kind in ("attn", "ffn"))]:
        writer.add_tensor(f"{name}.weight", np.ones(hidden, np.float32))
    _write(writer)


def _writer(file: Path, config: Mapping[str, Any], model: Path) -> gguf.GGUFWriter:
    """Return a writer that has the fields of a Llama with this configuration, and the tokenizer of ``model``."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokens = [f"[PAD{number}]" for number in range(config["vocab_size"])]
    kinds = [int(gguf.TokenType.UNUSED)] * len(tokens)
    for token, number in tokenizer["model"]["vocab"].items():
        tokens[number], kinds[number] = token, gguf.TokenType.NORMAL
    for token in tokenizer["added_tokens"]:
        tokens[token["id"]], kinds[token["id"]] = token["content"], gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_add_bos_token(False)
    if (template := model / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())
    return writer


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="pagewise-demo", help="the checkpoint, or a model with the tokenizer")
    parser.add_argument("--random", action="store_true")
    args = parser.parse_args()
    (write_random if args.random else write_checkpoint)(resolve_model(args.model), args.file)


if __name__ == "__main__":
    main()
