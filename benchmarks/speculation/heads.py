"""An EAGLE-3 head with random weights for a model of Llama's structure: its drafts are hardly ever right."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def build_random_head(path: Path, model: dict[str, Any], vocabulary: int) -> None:
    """Save a head. ``model``: the config.json of the model, whose sizes it has. ``vocabulary``: the tokens it knows."""
    torch.manual_seed(0)
    hidden, inner = model["hidden_size"], model["intermediate_size"]
    layers, head_dim = model["num_hidden_layers"], model.get("head_dim") or hidden // model["num_attention_heads"]
    queries, keys = (model[f"num_{kind}_heads"] * head_dim for kind in ("attention", "key_value"))
    shapes = {
        "fc": (hidden, 3 * hidden),
        **{
            f"midlayer.self_attn.{name}_proj": (outs, 2 * hidden)
            for name, outs in zip("qkv", (queries, keys, keys), strict=True)
        },
        "midlayer.self_attn.o_proj": (hidden, queries),
        **{f"midlayer.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (vocabulary, hidden),
    }
    weights = {f"{name}.weight": 0.05 * torch.randn(shape) for name, shape in shapes.items()}
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights["d2t"] = torch.zeros(vocabulary, dtype=torch.int64)  # the first tokens
    path.mkdir()
    save_file(weights, path / "model.safetensors")
    kept = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "hidden_act",
    )
    settings = {name: model[name] for name in kept} | {
        "head_dim": head_dim, "draft_vocab_size": vocabulary, "num_hidden_layers": 1,
        "eagle_aux_hidden_state_layer_ids": sorted({1, layers // 2, layers - 1}),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(settings))
