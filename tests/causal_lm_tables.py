"""The tables of models in docs/models.md: which families are served, and the KV of a token at real sizes.

    python -m tests.causal_lm_tables [--check]

It tries a tiny model of each family without weights, as an executor does before it reads any, and loads a rank's part
of the served ones, which takes two minutes. The long tests of tests/executor/models/test_every_causal_lm.py compare the
tokens of each family that is served, and tests/executor/ranks/test_every_family.py the tokens of two ranks.
"""

import argparse
import logging
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from pagewise_executor.collectives import Ranks
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_executor.kv.layer_groups import KVLayerKind
from pagewise_executor.models.aliases import ALIASES
from pagewise_executor.models.keys_of_values import store_once
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.support import SERVED, attention_modules, attention_shape, check_supported, kv_sources
from pagewise_executor.models.text_part import text_part
from pagewise_executor.models.trial import Tried, try_without_weights
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.every_causal_lm import build_tiny, causal_lms, tiny_config

DOCUMENT = Path(__file__).parents[1] / "docs/models.md"

_NAME = "MODEL"


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None) -> dict[str, Any]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return sizes | {"num_key_value_heads": kv_heads} | ({"head_dim": head_dim} if head_dim else {})


_GEMMA4 = {"global_head_dim": 512, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}

REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": ("llama", _sizes(32, 4096, 32, 8)),
    "Llama 3.1 70B": ("llama", _sizes(80, 8192, 64, 8)),
    "Llama 4 Scout": ("llama4_text", _sizes(48, 5120, 40, 8, 128)),
    "Mistral 7B v0.3": ("mistral", _sizes(32, 4096, 32, 8) | {"sliding_window": None}),
    "Mistral Small 4": ("mistral4", _sizes(36, 4096, 32, 32) | {"kv_lora_rank": 256, "qk_rope_head_dim": 64}),
    "Mixtral 8x7B": ("mixtral", _sizes(32, 4096, 32, 8)),
    "Qwen2.5 7B": ("qwen2", _sizes(28, 3584, 28, 4)),
    "Qwen2.5 72B": ("qwen2", _sizes(80, 8192, 64, 8)),
    "Qwen3-Next 80B-A3B": ("qwen3_next", {}),
    "Kimi-Linear 48B-A3B": ("kimi_linear", {}),
    "Qwen3 30B-A3B": ("qwen3_moe", _sizes(48, 2048, 32, 4, 128)),
    "Qwen3 235B-A22B": ("qwen3_moe", _sizes(94, 4096, 64, 4, 128)),
    "Gemma 3 4B": ("gemma3_text", _sizes(34, 2560, 8, 4, 256)),
    "Gemma 3 12B": ("gemma3_text", _sizes(48, 3840, 16, 8, 256)),
    "Gemma 3 27B": ("gemma3_text", _sizes(62, 5376, 32, 16, 128)),
    "Gemma 4 26B-A4B": ("gemma4_text", _sizes(30, 2816, 16, 8, 256) | _GEMMA4 | {"num_global_key_value_heads": 2}),
    "Gemma 4 31B": ("gemma4_text", _sizes(60, 5376, 32, 16, 256) | _GEMMA4 | {"num_global_key_value_heads": 4}),
    "OLMo 3 7B": ("olmo3", _sizes(32, 4096, 32, 32)),
    "GLM-4.5": ("glm4_moe", _sizes(92, 5120, 96, 8, 128)),
    "GLM-4.7-Flash": ("glm4_moe_lite", _sizes(47, 2048, 20, 20) | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "MiniMax-M2": ("minimax_m2", _sizes(62, 3072, 48, 8, 128)),
    "gpt-oss 20B": ("gpt_oss", _sizes(24, 2880, 64, 8, 64)),
    "gpt-oss 120B": ("gpt_oss", _sizes(36, 2880, 64, 8, 64)),
    "DeepSeek V3, R1": ("deepseek_v3", _sizes(61, 7168, 128, 128) | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
    "Kimi K2": ("deepseek_v3", _sizes(61, 7168, 64, 64) | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}),
}
"""Families and sizes of well-known models, by their config.json; other settings have no effect on the memory of a
token, and is the default of transformers."""


def refusal(config: transformers.PreTrainedConfig) -> str:
    """The reason why models of this configuration are refused; empty: they are served."""
    try:
        _tried(config, torch.float32)
    except ModelError as error:
        return reason_of(str(error))
    return ""


def reason_of(error: str) -> str:
    """The part of a refusal between the name of the model and the families that are served."""
    return error.partition(")")[2].lstrip().removesuffix(f"; {SERVED}")


def undivided(config: transformers.PreTrainedConfig) -> str:
    """The reason why the text part of such a model cannot be divided between two ranks; empty: it can."""
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(text_part(_NAME, config), Path(folder))
        try:
            load_model(ExecutorConfig(model=folder, device="cpu", dtype="float32", kernels="torch"), Ranks(0, 2))
        except ModelError as error:
            reason = str(error).replace(f"{folder}: ", "").replace(f"a rank's part of {folder}", "a rank's part of it")
            return re.sub(r"^--tensor-parallel( 2)?: ", "", reason.replace(folder, "it"))
    return ""


def _tried(config: transformers.PreTrainedConfig, dtype: torch.dtype) -> tuple[Tried, Any]:
    part = text_part(_NAME, config)
    text = part.get_text_config(decoder=True)
    check_supported(_NAME, part, text)
    return try_without_weights(_NAME, part, dtype, trust_remote_code=False), text


def row_of(kind: str) -> str:
    """The row of a family."""
    if (alias := ALIASES.get(kind)) is not None:
        return row_of(alias).replace(f"`{alias}` | served", f"`{kind}` | served as `{alias}`")
    if reason := refusal(tiny_config(kind)):
        return f"| `{kind}` | refused | | {reason.replace('|', '/')} |"
    why = undivided(tiny_config(kind))
    return f"| `{kind}` | served | {'' if why else 'yes'} | {why} |"


def families_table() -> str:
    """One row for each causal LM of transformers."""
    rows = [row_of(kind) for kind in sorted({*causal_lms(), *ALIASES})]
    return "\n".join(["| model_type | | ranks | why not |", "|---|---|---|---|", *rows])


def memory_of(name: str) -> tuple[list[KVLayerKind], list[int]]:
    """The layers of a model of ``REAL`` that keep K and V, in bfloat16, and the bytes of the states of each of its
    recurrent layers."""
    kind, sizes = REAL[name]
    (model, recurrent), text = _tried(causal_lms()[kind](**sizes), torch.bfloat16)
    store_once(model)
    modules = attention_modules(name, model, text)
    layers = [attention_shape(one, text, torch.bfloat16) for one in modules]
    kept = [layers[source] for source in sorted(set(kv_sources(modules, text)))]
    kinds = [
        KVLayerKind(one.kv_shape, one.attention_chunk or one.window or 0, one.attention_chunk is not None)
        for one in kept
    ]
    return kinds, [layer.num_bytes for layer in recurrent]


def memory_table() -> str:
    """The K and V of a token at real sizes, in layers with a window or attention chunks and in others; and the states
    of recurrent layers."""
    rows = []
    for name, (kind, _) in REAL.items():
        kept, recurrent = memory_of(name)
        within = [one for one in kept if one.window]
        every, some = (
            f"{bytes_per_block([one.shape for one in which], 1, torch.bfloat16) / 1024:,.5g} KiB" if which else ""
            for which in (kept, within)
        )
        states = f"{len(recurrent)} | {sum(recurrent) / 2**20:,.4g} MiB" if recurrent else " |"
        rows.append(f"| {name} | `{kind}` | {len(kept)} | {every} | {len(within) or ''} | {some} | {states} |")
    head = "| model | model_type | layers | KV of a token | with a window | their KV | recurrent | their states |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *rows])


TABLES: dict[str, Callable[[], str]] = {"families": families_table, "memory": memory_table}


def written(text: str) -> str:
    """The document with its tables made anew."""

    def table(match: "re.Match[str]") -> str:
        return f"{match[1]}\n\n{TABLES[match[2]]()}\n\n{match[3]}"

    return re.sub(r"(<!-- table: (\w+) -->).*?(<!-- end of table -->)", table, text, flags=re.DOTALL)


def main() -> int:
    """Write the tables anew, or check them; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, fail if a table is out of date")
    check = parser.parse_args().check
    logging.getLogger("transformers").setLevel(logging.ERROR)
    text, new = DOCUMENT.read_text(), written(DOCUMENT.read_text())
    if not check:
        DOCUMENT.write_text(new)
    return 1 if check and text != new else 0


if __name__ == "__main__":
    sys.exit(main())
