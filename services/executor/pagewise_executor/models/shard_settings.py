"""The sizes of the part of a model that one rank of an executor holds, in the configuration of the model."""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol.limits import MAX_RANKS

_DIVIDED = (
    *("num_attention_heads", "num_attention_heads_per_layer", "intermediate_size", "intermediate_size_mlp"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    *("shared_intermediate_size", "linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"),
    *("mamba_n_heads", "mamba_num_heads", "mamba_d_ssm"),
)
"""Settings that are divided among the ranks, of all layers or a list of one for each; KV heads and the vocabulary need
not be divisible."""
_GROUPS = ("mamba_n_groups", "n_groups")
"""Settings of groups of Mamba-2's heads, which ranks may share as they share KV heads."""
_DIFFERING = {"head_dim", "num_key_value_heads"}
"""Settings in which the layers of a model that is divided may differ."""


def shard_config(name: str, text: Any, size: int) -> None:
    """Change the configuration ``text`` of a whole model to the sizes of the part of one of ``size`` ranks.

    Raises:
        ModelError: the model cannot be divided like that; the text names the possible numbers of ranks.
    """
    if size == 1:
        return
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):
        raise ModelError(
            f"--tensor-parallel {size}: in layers of {name} the activations of a whole MLP decide which of them count "
            "(activation_sparsity_pattern), and each rank would have a part of them"
        )
    _divide_recurrent(text, size)
    counts = {key: count for key in _DIVIDED if (count := getattr(text, key, None))}
    differ = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if differ else [text]
    kv_heads = {getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers}
    shared = {"num_key_value_heads": kv_heads} | {
        key: {groups} for key in _GROUPS if _is_mamba(text) and (groups := getattr(text, key, None))
    }
    # A short convolution has as many channels as the hidden state, whose size stays.
    channels = {"hidden_size": text.hidden_size} if "conv" in (getattr(text, "layer_types", None) or ()) else {}
    if indivisible := _indivisible(counts | channels, shared, size):
        sizes = range(1, MAX_RANKS + 1)
        possible = [str(one) for one in sizes if not _indivisible(counts | channels, shared, one)]
        raise ModelError(
            f"--tensor-parallel {size}: of {name}, {indivisible}; numbers of ranks that work: {', '.join(possible)}"
        )
    if differ:
        _divide_layers(name, text, size)
    else:
        if getattr(text, "head_dim", None) is None:
            text.head_dim = text.hidden_size // text.num_attention_heads
        text.num_key_value_heads = max(1, max(kv_heads) // size)
    for key, count in counts.items():
        setattr(text, key, [one // size for one in count] if isinstance(count, list) else count // size)
    for key, groups in shared.items():
        if key in _GROUPS:
            setattr(text, key, max(1, max(groups) // size))
    text.vocab_size = -(-text.vocab_size // size)
    if getattr(text, "pad_token_id", None) is not None:
        _drop_padding(name, text, size)


def _drop_padding(name: str, text: Any, size: int) -> None:
    """Remove the token for padding: its embedding, of zeros, would be at the same place in the part of each rank.

    Raises:
        ModelError: the configuration has to name one.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        text.pad_token_id = None
    except StrictDataclassError as error:
        raise ModelError(f"--tensor-parallel {size}: the config.json of {name} has to have a pad_token_id") from error


def _divide_layers(name: str, text: Any, size: int) -> None:
    """Divide the KV heads of the layers of a heterogeneous configuration among ``size`` ranks.

    Raises:
        ModelError: the layers differ in settings that have no known division.
    """
    if unknown := set(text.per_layer_attributes) - _DIFFERING:
        raise ModelError(f"--tensor-parallel {size}: the layers of {name} differ in {', '.join(sorted(unknown))}")
    text.per_layer_config = {
        number: {"head_dim": layer.head_dim, "num_key_value_heads": max(1, layer.num_key_value_heads // size)}
        for number, layer in enumerate(text.per_layer_config)
    }


def _indivisible(counts: Mapping[str, int | list[int]], shared: Mapping[str, Collection[int]], size: int) -> str:
    """Return the setting that is not divisible by ``size``, as a part of a sentence; empty if all are.

    ``shared``: counts of parts that several ranks may share, with each count that layers have.
    """
    for key, count in counts.items():
        if any(not isinstance(one, int) or one % size for one in (count if isinstance(count, list) else [count])):
            return f"{key} is {count}"
    wrong = [(key, one) for key, every in shared.items() for one in every if one % size and size % one]
    return f"{wrong[0][0]} is {wrong[0][1]}" if wrong else ""


def _is_mamba(text: Any) -> bool:
    return bool(getattr(text, "mamba_n_heads", None) or getattr(text, "mamba_num_heads", None))


def _divide_recurrent(text: Any, size: int) -> None:
    """Change settings of recurrent layers, from which the sizes of their modules follow by rounding, to the sizes of
    the part of one of ``size`` ranks. The numbers of heads are still the whole model's."""
    if getattr(text, "block_auto_adjust_ff_dim", False):
        from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

        with torch.device("meta"):
            text.intermediate_size = Lfm2MLP(text).w1.out_features
        text.block_auto_adjust_ff_dim = False
    if getattr(text, "mamba_n_heads", None) and not getattr(text, "mamba_d_ssm", None):
        inner = text.mamba_n_heads * text.mamba_d_head // size
        exact = inner / text.hidden_size
        # Modules have ``int(mamba_expand * hidden_size)`` channels. The configuration only takes integers.
        fits = int(exact * text.hidden_size) == inner
        vars(text)["mamba_expand"] = exact if fits else math.nextafter(exact, math.inf)
