"""The models that are served, the refusals of others, and the attention layers of a model."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pagewise_shared.config.adapter_options import SERVE_ADAPTER
from pagewise_shared.errors import ModelError

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.models.config_checks import unusable_size
from pagewise_executor.models.latents import keeps_latents, latent_sizes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from pagewise_executor.models.llama_config import LlamaConfig

SERVED = (
    "served are Llama, Llama 4, Mistral, Mixtral, Qwen2, Qwen3 and their MoEs, Gemma 2, 3 and 4, gpt-oss, Phi-3, "
    "GPT-2, GPT-NeoX, OPT, DeepSeek V2 and V3, GLM-4.7-Flash, Qwen3-Next, Qwen3.5, Nemotron-H, Granite 4, Falcon-H1, "
    "LFM2, Kimi-Linear, and models that compute alike"
)
"""The families with a test, as a part of a sentence."""


_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""The kinds of layers that keep states; hybrid ones have attention, too."""
_WITHOUT_ATTENTION = {"linear_attention", "conv", "mlp", "moe"}
_KINDS = {"full_attention", "sliding_attention", "chunked_attention"} | _RECURRENT | _WITHOUT_ATTENTION
"""The kinds of layers that may be served, by their names in transformers' configurations."""
_COUNTS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
_OTHER_HEADS = ("Classification", "QuestionAnswering", "MultipleChoice", "RewardModel")
"""Ends of the names of classes whose head does not predict the next token, such as that of a reward model."""


def _other_head(config: Any, text: Any) -> str:
    classes = [str(name) for name in getattr(config, "architectures", None) or ()]
    return classes[0] if classes and all(name.endswith(_OTHER_HEADS) for name in classes) else ""


def _other_layers(config: Any, text: Any) -> str:
    return ", ".join(sorted(set(getattr(text, "layer_types", None) or ()) - _KINDS))


def _no_attention(config: Any, text: Any) -> bool:
    kinds = getattr(text, "layer_types", None) or ()
    return bool(kinds) and _WITHOUT_ATTENTION.issuperset(kinds)


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
    (_other_layers, "has layers of a kind that is not served: {}"),
    (_no_attention, "has no layers with attention"),
    (_no_chunk_size, "has layers of chunked attention, and no attention_chunk_size"),
    (
        lambda config, text: getattr(text, "use_bidirectional_attention", None) in (True, "all"),
        "attends to later tokens, and paged attention is causal",
    ),
    (_alibi, "uses ALiBi, which paged attention does not support"),
)
"""Checks of the configurations of a model and of its language model, each with the text of its refusal."""


@dataclass(slots=True, frozen=True)
class AttentionCall:
    """A call of the attention function by a layer of a model without weights, whose tensors have no data.

    Fields:
        query, key, value: [1, heads, tokens, head_dim].
        mask: the layer's; None: it has none. ``sees``: whether a query at a position sees a key at another by that
            mask, from (sequence, head, positions of queries, of keys); None: the model made the mask itself.
        arguments: all others, by name.
    """

    module: torch.nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    sees: Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor] | None
    arguments: dict[str, Any]


WITHOUT_EFFECT = {
    "attention_mask", "cache_position", "dropout", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip
"""Arguments that models pass on to their layers and that do not change results here."""


def _not_causal(call: AttentionCall, shape: AttentionShape) -> bool:
    return call.arguments.get("is_causal", getattr(call.module, "is_causal", True)) is False


def _unequal(call: AttentionCall, shape: AttentionShape) -> str:
    key, value = call.key.shape, call.value.shape
    if key[1] == value[1] and value[-1] == (shape.latent or key[-1]):
        return ""
    return f"{key[1]} heads of {key[-1]} and {value[1]} of {value[-1]}"


def _other_shape(call: AttentionCall, shape: AttentionShape) -> str:
    window = call.arguments.get("sliding_window")
    # The scale is not compared: OPT scales its queries itself, and every backend uses the scale of the call.
    found = {
        "query heads": (call.query.shape[1], shape.heads),
        "KV heads": (call.key.shape[1], shape.kv_heads),
        "numbers in a head": (call.key.shape[-1], shape.head_dim),
        "tokens in the window": (_effective(call, window), _effective(call, shape.window)),
        "for the cap of scores": (call.arguments.get("softcap"), shape.softcap),
    }
    return ", ".join(f"{own} {name} and not {seen}" for name, (own, seen) in found.items() if own != seen)


def _longest(call: AttentionCall) -> int:
    return int(getattr(getattr(call.module, "config", None), "max_position_embeddings", None) or sys.maxsize)


def _effective(call: AttentionCall, window: int | None) -> int | None:
    """Return the window if it is shorter than the longest sequence; Phi-3.5-MoE has one that is not."""
    return window if window and window < _longest(call) else None


def _others(call: AttentionCall, shape: AttentionShape) -> str:
    known = WITHOUT_EFFECT | {"is_causal", "s_aux", "scaling", "sliding_window", "softcap"}
    return ", ".join(sorted(name for name, value in call.arguments.items() if name not in known and value is not None))


def _other_mask(call: AttentionCall, shape: AttentionShape) -> str:
    """Describe the first key that a query sees by the mask and not by paged attention, or the reverse."""
    if call.mask is None or shape.attention_chunk:  # where chunks begin depends on the prompt's padding
        return ""
    if call.sees is None:
        return "one that it makes itself"
    window = _effective(call, call.arguments.get("sliding_window"))
    places = {0, 1, 5, 100, 8191, 100_003} | ({window - 1, window, window + 1, 3 * window + 1} if window else set())
    queries = torch.tensor(sorted(one for one in places if one < _longest(call)))[:, None]
    firsts = (queries - window + 1).clamp(min=0) if window else torch.zeros_like(queries)
    ends = [firsts - 1, firsts, queries - 1, queries, queries + 1, queries + 7]
    keys = torch.cat([torch.zeros_like(queries), queries // 2, *ends], -1).clamp(min=0)
    try:
        seen = call.sees(0, 0, queries, keys).expand_as(keys)
        wrong = (seen != ((firsts <= keys) & (keys <= queries))).nonzero().tolist()
    except Exception as error:  # the function may need data of the prompt
        return f"one that depends on the prompt ({type(error).__name__})"
    if not wrong:
        return ""
    row, column = wrong[0]
    verb = "sees" if seen[row, column] else "does not see"
    return f"one by which a token at position {int(queries[row])} {verb} that at {int(keys[row, column])}"


_REFUSED_CALLS: tuple[tuple[Callable[[AttentionCall, AttentionShape], Any], str], ...] = (
    (_not_causal, "attends to the tokens behind a token too, as encoders do"),
    (_unequal, "has keys and values of unequal size, which paged attention does not support: {}"),
    (_others, "passes arguments to attention which paged attention does not know: {}"),
    (_other_shape, "has layers whose attention differs from config.json: {}"),
    (_other_mask, "masks attention in a way that paged attention does not support: {}"),
)
"""Checks of each call of attention in a model without weights, each with the text of its refusal."""


def refuse_call(model: str, call: AttentionCall, shape: AttentionShape) -> None:
    """Check a call of attention against the shape that paged attention computes with.

    Raises:
        ModelError: paged attention would compute something else.
    """
    for refuses, why in _REFUSED_CALLS:
        if found := refuses(call, shape):
            raise ModelError(f"{model} {why.format(found)}; {SERVED}")


def check_supported(model: str, config: object, text: object) -> None:
    """Check that a model is of a kind that is served. ``text``: the part of ``config`` for its language model.

    Raises:
        ModelError: it is not; the text names the kinds that are.
    """
    named = f"{model} (model_type {getattr(config, 'model_type', None)})"
    for refuses, why in _REFUSED:
        if found := refuses(config, text):
            raise ModelError(f"{named} {why.format(found)}; {SERVED}")
    for name in _COUNTS:
        if not hasattr(text, name):
            raise ModelError(f"{named} has no {name}, so it is no decoder with layers of attention; {SERVED}")
        if type(getattr(text, name)) is not int:
            raise ModelError(f"{named} has a config.json that is unusable: {name} is {getattr(text, name)!r}; {SERVED}")
    if why := unusable_size(text):
        raise ModelError(f"{named} has a config.json that is unusable: {why}; {SERVED}")


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


def recurrent_layers(text: Any) -> set[int]:
    """Return the layers of a language model that keep states, by its configuration."""
    return {layer for layer, kind in enumerate(getattr(text, "layer_types", None) or ()) if kind in _RECURRENT}


def is_attention(module: torch.nn.Module, text: Any) -> bool:
    """Return whether a module is one of attention with K and V, by its name; those of recurrent layers are not."""
    if not type(module).__name__.endswith("Attention"):
        return False
    kinds, layer = getattr(text, "layer_types", None), getattr(module, "layer_idx", None)
    return not kinds or not isinstance(layer, int) or kinds[layer] not in _WITHOUT_ATTENTION


def attention_modules(
    name: str, model: torch.nn.Module, text: "LlamaConfig | PretrainedConfig"
) -> list[torch.nn.Module]:
    """Return the attention modules of a model by layer, of those layers that have one.

    Raises:
        ModelError: paged attention cannot replace its attention layers.
    """
    found: dict[int, torch.nn.Module] = {
        int(module.layer_idx): module  # type: ignore[arg-type]
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and is_attention(module, text)
    }
    kinds = getattr(text, "layer_types", None) or ()
    without = {layer for layer, kind in enumerate(kinds) if kind in _WITHOUT_ATTENTION}
    if sorted(found) != [layer for layer in range(text.num_hidden_layers) if layer not in without]:
        raise ModelError(f"{name} ({type(model).__name__}) does not expose its attention layers; {SERVED}")
    return [found[layer] for layer in sorted(found)]


def attention_shape(module: Any, text: Any, dtype: torch.dtype) -> AttentionShape:
    """Return the shape of an attention module. ``text``: the configuration of the language model."""
    # In a heterogeneous configuration some settings of a layer differ from those of the other layers.
    whole: Any = text
    own: Any = whole.per_layer_config[module.layer_idx] if getattr(text, "is_heterogeneous", False) else text
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
        attention_chunk=int(whole.attention_chunk_size) if _kind(module, text) == "chunked_attention" else None,
        shared=module.stored_once.shared if hasattr(module, "stored_once") else 0,
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
