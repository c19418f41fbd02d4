"""Tiny draft models, saved where a test wants them: EAGLE-3 heads, and MTP layers beside the layers of a model."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.four_bit_checkpoints import FourBits, quantised
from tests.model_builders import FAMILIES, FEW_LAYERS, LATENTS, OTHERS, RECURRENT, VOCAB_SIZE, build_model
from tests.quantised_checkpoints import Form, OracleLinear, edit_config

_HIDDEN, _INNER, _HEADS, _KV_HEADS, _HEAD_DIM = 48, 80, 4, 2, 12


def build_head(path: Path, *, seed: int = 0, vocabulary: int | None = 120, **settings: object) -> None:
    """Save an EAGLE-3 head with random weights for a model of hidden size 48, whose drafts are hardly ever right.

    ``vocabulary``: its own, of the tokens 0, 2, 4, ... and behind the last of them; None: it is the model's.
    """
    torch.manual_seed(seed)
    heads, kv_heads = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    shapes = {
        "fc": (_HIDDEN, 3 * _HIDDEN),
        "midlayer.self_attn.q_proj": (heads, 2 * _HIDDEN),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * _HIDDEN),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * _HIDDEN),
        "midlayer.self_attn.o_proj": (_HIDDEN, heads),
        "midlayer.mlp.gate_proj": (_INNER, _HIDDEN),
        "midlayer.mlp.up_proj": (_INNER, _HIDDEN),
        "midlayer.mlp.down_proj": (_HIDDEN, _INNER),
        "lm_head": (vocabulary or VOCAB_SIZE, _HIDDEN),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    weights = {f"{name}.weight": 0.2 * torch.randn(shape) for name, shape in shapes.items()}
    weights |= {f"{name}.weight": 1 + 0.1 * torch.randn(_HIDDEN) for name in norms}
    if vocabulary is not None:
        targets = torch.tensor([*range(0, VOCAB_SIZE, 2), *range(1, VOCAB_SIZE, 2)][:vocabulary]).sort().values
        weights["d2t"] = targets - torch.arange(vocabulary)
        known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
        known[targets] = True
        weights["t2d"] = known
    _save_head(path, weights, vocabulary, **settings)


def _save_head(path: Path, weights: dict[str, torch.Tensor], vocabulary: int | None, **settings: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    hidden, inner = weights["norm.weight"].shape[0], weights["midlayer.mlp.gate_proj.weight"].shape[0]
    known = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_act": "silu", "hidden_size": hidden,
        "intermediate_size": inner, "num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS,
        "num_hidden_layers": 1, "rms_norm_eps": 1e-6, "vocab_size": VOCAB_SIZE, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    if vocabulary is not None:
        known["draft_vocab_size"] = vocabulary
    (path / "config.json").write_text(json.dumps(known | settings))


def quantise_head(path: Path, form: FourBits | Form) -> Path:
    """Store the linear layers of a saved head, except its ``lm_head``, in fewer bits; return the folder of a head with
    the same weights in floats."""
    weights, floats = load_file(path / "model.safetensors"), load_file(path / "model.safetensors")
    for name in [name for name in weights if name.startswith("fc.") or "_proj." in name]:
        weight, own = weights.pop(name), name.removesuffix("weight")
        if isinstance(form, FourBits):
            stored, exact = quantised(weight, form, torch.zeros(0))
        else:
            linear = OracleLinear(weight, None, form)
            stored, exact = linear.stored(), linear.exact
        weights |= {f"{own}{end}": tensor.contiguous() for end, tensor in stored.items()}
        floats[name] = exact.float()
    shutil.copytree(path, exact_path := path.with_name("exact"))
    save_file(floats, exact_path / "model.safetensors")
    save_file(weights, path / "model.safetensors")
    edit_config(path, quantization_config=form.config)
    return exact_path


@torch.inference_mode()
def reference_of_head(model: Any, head: Path, ids: list[int], count: int) -> list[int]:
    """The tokens that an EAGLE-3 head proposes behind ``ids``, all positions at once."""
    own, size, eps = load_file(head / "model.safetensors"), model.config.hidden_size, 1e-6
    states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    hidden = torch.cat([states[layer][0] for layer in (0, 1, 2)], -1) @ own["fc.weight"].T
    known, found = ids[1:], list[int]()
    targets = own["d2t"] + torch.arange(len(own["d2t"]))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (size,), own[f"{name}.weight"], eps)

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ own[f"midlayer.{name}_proj.weight"].T

    for _ in range(count):
        embedded = norm(model.model.embed_tokens(torch.tensor(known)), "midlayer.input_layernorm")
        both = torch.cat([embedded, norm(hidden, "midlayer.hidden_norm")], -1)
        q, k, v = (linear(both, f"self_attn.{name}").view(len(known), -1, 12).transpose(0, 1) for name in "qkv")
        angles = torch.arange(len(known))[:, None] * 10000.0 ** (-torch.arange(0, 12, 2) / 12)
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        q, k = (x * cos + torch.cat([-x[..., 6:], x[..., :6]], -1) * sin for x in (q, k))
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        residual = hidden + linear(attended.transpose(0, 1).flatten(1), "self_attn.o")
        x = norm(residual, "midlayer.post_attention_layernorm")
        gated = torch.nn.functional.silu(linear(x, "mlp.gate")) * linear(x, "mlp.up")
        out = residual + linear(gated, "mlp.down")
        found.append(int(targets[(norm(out[-1], "norm") @ own["lm_head.weight"].T).argmax()]))
        known, hidden = [*known, found[-1]], torch.cat([hidden, out[-1:]])
    return found


def build_cycling(model: Path, head: Path) -> list[int]:
    """Save a Llama whose likeliest token follows from the last token alone, and a head that always drafts this token.

    Returns the token behind each token. Hidden states are the embeddings of the last token, which are unit vectors: the
    layers add nothing to them. The layer of the head turns the embedding of a token into that of the next one.
    """
    size = VOCAB_SIZE + 1
    torch.manual_seed(3)
    following = torch.randperm(VOCAB_SIZE)
    build_model("llama", model, hidden_size=size, num_attention_heads=4, num_key_value_heads=2, intermediate_size=size)
    weights = load_file(model / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    ones, head_weight = torch.eye(size), torch.zeros(VOCAB_SIZE, size)
    head_weight[following, torch.arange(VOCAB_SIZE)] = 1.0
    weights["model.embed_tokens.weight"] = ones[:VOCAB_SIZE].clone()
    weights["lm_head.weight"] = head_weight
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    move = torch.zeros(size, size)  # from a unit vector to that of the next token
    move[following, torch.arange(VOCAB_SIZE)] = 1.0
    value = size**0.5  # of a unit vector behind its norm
    gated = float(torch.nn.functional.silu(torch.tensor(value)) * value)
    inputs = 2 * size
    per_head = size // _HEADS
    own = {
        "fc.weight": torch.cat([ones, torch.zeros(size, 2 * size)], dim=1),
        "midlayer.self_attn.q_proj.weight": torch.randn(_HEADS * per_head, inputs),
        "midlayer.self_attn.k_proj.weight": torch.randn(_KV_HEADS * per_head, inputs),
        "midlayer.self_attn.v_proj.weight": torch.randn(_KV_HEADS * per_head, inputs),
        "midlayer.self_attn.o_proj.weight": torch.zeros(size, _HEADS * per_head),
        "midlayer.mlp.gate_proj.weight": ones.clone(),
        "midlayer.mlp.up_proj.weight": ones.clone(),
        "midlayer.mlp.down_proj.weight": (move - ones) / gated,
        "lm_head.weight": head_weight.clone(),
    }
    norms = ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")
    _save_head(head, own | {f"{name}.weight": torch.ones(size) for name in norms}, None)
    return following.tolist()


BEHIND = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
APART = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
"""The names of two norms, a projection and a norm around an MTP layer, in ``model.layers.N`` and in ``mtp``."""


def build_mtp(
    family: str, path: Path, seed: int = 0, build: Callable[..., transformers.PreTrainedModel] = build_model
) -> transformers.PreTrainedModel:
    """Save a tiny model with an MTP layer behind its last layer, or beside its layers if it has recurrent ones.

    ``build``: saves a model that has it as a layer like others, which is returned.
    """
    _, settings = (FAMILIES | OTHERS | LATENTS | RECURRENT)[family]
    settings = settings | FEW_LAYERS.get(family, {})
    layers, apart = settings["num_hidden_layers"], family in RECURRENT
    kinds: dict[str, Any] = {"layer_types": [*settings["layer_types"], "full_attention"]} if apart else {}
    model = build(family=family, path=path, seed=seed, num_hidden_layers=layers + 1, **kinds)
    weights = load_file(path / "model.safetensors")
    prefix, size = f"model.layers.{layers}.", model.config.hidden_size
    if apart:
        weights = {name.replace(prefix, "mtp.layers.0."): weight for name, weight in weights.items()}
        prefix = "mtp."
    else:
        weights[f"{prefix}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
        weights[f"{prefix}shared_head.head.weight"] = weights["lm_head.weight"].clone()
    names = APART if apart else BEHIND
    weights[f"{prefix}{names[2]}.weight"] = 0.2 * torch.randn(size, 2 * size)
    for name in (*names[:2], names[3]):
        weights[f"{prefix}{name}.weight"] = (0 if apart else 1) + 0.1 * torch.randn(size)  # theirs is added to 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    config = json.loads(file.read_text()) | {"num_hidden_layers": layers}
    if apart:
        config["layer_types"] = settings["layer_types"]
    file.write_text(json.dumps(config))
    return model
