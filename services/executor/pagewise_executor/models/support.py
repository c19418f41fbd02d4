"""The models that are served, the refusals of others, and the attention layers of a model."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.config.adapter_options import SERVE_ADAPTER
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.models.latents import keeps_latents, latent_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

SERVED = (
    "served are Llama, Llama 4, Mistral, Mixtral, Qwen2, Qwen3 and their MoEs, Gemma 2, 3 and 4, gpt-oss, Phi-3, "
    "GPT-2, GPT-NeoX, OPT, DeepSeek V2 and V3, GLM-4.7-Flash, and models that compute alike"
)
"""The families with a test, as a part of a sentence."""


_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
"""The kinds of attention layers that keep paged KV, by their names in transformers' configurations."""
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")
"""Ends of the names of classes whose head does not predict the next token, such as that of a reward model."""


def _other_head(config: Any, text: Any) -> str:
    classes = [str(name) for name in getattr(config, "architectures", None) or ()]
    return classes[0] if classes and all(name.endswith(_OTHER_HEADS) for name in classes) else ""


def _other_layers(config: Any, text: Any) -> str:
    return ", ".join(sorted(set(getattr(text, "layer_types", None) or ()) - _KINDS))


def _no_chunk_size(config: Any, text: Any) -> bool:
    kinds = getattr(text, "layer_types", None) or ()
    return "chunked_attention" in kinds and not getattr(text, "attention_chunk_size", None)


def _alibi(config: Any, text: Any) -> bool:
    return getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi"


_REFUSED: tuple[tuple[Callable[[Any, Any], Any], str], ...] = (
    (
        lambda config, text: getattr(config, "is_encoder_decoder", False),
        "is an encoder-decoder model: only decoder-only models are served",
    ),
    (_other_head, "is a {}, whose head does not predict tokens"),
    (_other_layers, "has layers of a kind that keeps no paged KV: {}"),
    (_no_chunk_size, "has layers of chunked attention, and no attention_chunk_size"),
    (
        lambda config, text: getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "attends to later tokens, and paged attention is causal",
    ),
    (_alibi, "uses ALiBi, which paged attention does not support"),
)
"""Checks of the configurations of a model and of its language model, each with the text of its refusal."""


def check_supported(model: str, config: object, text: object) -> None:
    """Check that a model is of a kind that is served. ``text``: the part of ``config`` for its language model.

    Raises:
        ModelError: it is not; the text names the kinds that are.
    """
    for refuses, why in _REFUSED:
        if found := refuses(config, text):
            raise ModelError(f"{model} {why.format(found)}; {SERVED}")
    for name in _COUNTS:
        value = getattr(text, name, None)
        if value is None and name == "max_position_embeddings":
            continue  # some families have no limit
        if type(value) is not int or value < 1:
            raise ModelError(f"{model}: config.json is unusable: {name} is {value!r}, and not a positive number")


def check_known(model: str, path: Path) -> None:
    """Check that transformers knows the type of a model without code of its own, and that the files have no adapter.

    Raises:
        ModelError: it does not, or they have one; the text names the types that are served.
    """
    from transformers import CONFIG_MAPPING

    if (path / "adapter_config.json").exists():
        # Whether transformers adds it depends on whether PEFT is installed.
        raise ModelError(
            f"{model} has an adapter_config.json beside its weights: remove that file if the adapter has been merged "
            "into them; otherwise move the adapter to another folder, and add " + SERVE_ADAPTER.format("FOLDER")
        )

    try:
        found = json.loads((path / "config.json").read_text())
        kind, own_code = found.get("model_type"), "auto_map" in found
    except (ValueError, AttributeError):
        return  # the reader of the whole file reports the error
    if own_code or (isinstance(kind, str) and kind in CONFIG_MAPPING):
        return
    named = f"the model_type {kind!r}, which is not known here" if kind else "no model_type"
    raise ModelError(f"{model} cannot be served: its config.json has {named}; {SERVED}")


def attention_modules(
    name: str, model: torch.nn.Module, text: "LlamaConfig | PretrainedConfig"
) -> list[torch.nn.Module]:
    """Return the attention modules of a model by layer.

    Raises:
        ModelError: paged attention cannot replace its attention layers.
    """
    found: dict[int, torch.nn.Module] = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention")
    }
    if sorted(found) != list(range(text.num_hidden_layers)):
        raise ModelError(f"{name} ({type(model).__name__}) does not expose its attention layers: not supported")
    return [found[layer] for layer in sorted(found)]


def attention_shape(module: Any, text: "LlamaConfig | PretrainedConfig", dtype: torch.dtype) -> AttentionShape:
    """Return the shape of an attention module. ``text``: the configuration of the language model."""
    # In a heterogeneous configuration some settings of a layer differ from those of the other layers.
    own: Any = text.per_layer_config[module.layer_idx] if getattr(text, "is_heterogeneous", False) else text
    heads = int(own.num_attention_heads)
    if keeps_latents(module):
        rotated, latent = latent_sizes(module)
        return AttentionShape(heads, 1, rotated + latent, dtype, float(module.scaling), latent=latent)
    head_dim = getattr(module, "head_dim", None) or getattr(own, "head_dim", None) or own.hidden_size // heads
    return AttentionShape(
        heads=heads,
        kv_heads=int(getattr(own, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        dtype=dtype,
        scale=float(getattr(module, "scaling", None) or head_dim**-0.5),
        window=_window(module, text) or None,  # Qwen2-MoE writes 0 for none
        softcap=getattr(module, "attn_logit_softcapping", None),
        sinks=getattr(module, "sinks", None) is not None,
        attention_chunk=int(text.attention_chunk_size) if _kind(module, text) == "chunked_attention" else None,
    )


def kv_sources(attention: Sequence[Any], text: "LlamaConfig | PretrainedConfig") -> list[int]:
    """Return, for each layer, the layer whose K and V it reads: itself, or an earlier layer that shares its own.

    A layer that shares its K and V does so with the layers of its kind behind it. ``attention``: the modules by layer.
    """
    sources: list[int] = []
    latest: dict[str | None, int] = {}
    for number, module in enumerate(attention):
        kind = _kind(module, text)
        if not getattr(module, "is_kv_shared_layer", False):
            latest[kind] = number
        sources.append(latest[kind])
    return sources


def _kind(module: Any, text: Any) -> str | None:
    """Return the kind of an attention layer by its name in the configuration; None: it has none."""
    kinds = getattr(text, "layer_types", None)
    return str(kinds[module.layer_idx]) if kinds else None


def _window(module: Any, text: Any) -> int | None:
    """Return the window of a module, from its attribute, or from the configuration by the type of the layer."""
    kind = _kind(module, text)
    slides = getattr(module, "is_sliding", True)
    if hasattr(module, "sliding_window"):
        return module.sliding_window if slides else None
    if kind is not None and kind != "sliding_attention":
        return None
    return getattr(text, "sliding_window", None) if slides else None
