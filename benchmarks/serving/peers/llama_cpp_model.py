"""Writes a Llama of safetensors as a GGUF file, which llama.cpp's own function then quantises.

    python llama_cpp_model.py FOLDER Q4_0|Q4_K_M|... FILE.gguf

It runs in the environment of ``llama_cpp_engine.py``. The texts of tokens are made up, because requests have token ids.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file


def write_half(folder: Path, file: Path) -> None:
    """Write the model of ``folder`` in float16."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(file, "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"t{number}" for number in range(config["vocab_size"])])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for shard in sorted(folder.glob("*.safetensors")):
        for name, values in load_file(shard).items():
            count = {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2], 0)
            ordered = _interleaved(values, count) if count else values
            kind = np.float32 if values.ndim == 1 else np.float16
            own: Any = names.get_name(name, try_suffixes=(".weight",))
            writer.add_tensor(own, np.ascontiguousarray(ordered.astype(kind)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Return rows of queries or keys in the order of llama.cpp's RoPE, which rotates neighbours."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, -1)
    return halves.swapaxes(1, 2).reshape(values.shape)


def main() -> None:
    folder, kind, file = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    half = file.with_suffix(".f16")
    write_half(folder, half)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(str(half).encode(), str(file).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not quantise {folder}")
    half.unlink()


if __name__ == "__main__":
    main()
