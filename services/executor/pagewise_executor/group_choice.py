"""Chooses whether an executor keeps its model's layers in groups, each with as many tokens as its layers see."""

import logging
from collections.abc import Sequence

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import LayerGroup

from pagewise_executor.attention.backend import AttentionShape
from pagewise_executor.kv.layer_groups import KVLayerKind, PageLayout, page_layout
from pagewise_executor.models.loader import LoadedModel

log = logging.getLogger(__name__)


def choose_pages(config: ExecutorConfig, loaded: LoadedModel, kv_dtype: torch.dtype) -> PageLayout | None:
    """Return the groups of the model's layers and their pages; None: it has one group, in which every layer keeps all
    tokens.

    A model whose layers would form several groups has one if an option needs that, and the log says so.

    Raises:
        ModelError: it has recurrent layers, and layers that cannot be grouped beside them.
    """
    layers = [loaded.layers[number] for number in loaded.kv_layers]
    states = [layer.num_bytes for layer in loaded.recurrent]
    found = layout_of_layers(config, layers, kv_dtype, loaded.max_model_len, states)
    _log_whole(layers, found, loaded.max_model_len)
    if states:
        return found
    if found is not None and not config.layer_groups:
        log.info("windowed layers keep all tokens (--no-layer-groups)")
        return None
    if found is not None and (reason := _one_group(config, loaded)):
        log.info("windowed layers keep all tokens, because %s do not support groups of layers yet", reason)
        return None
    return found


def layout_of_layers(
    config: ExecutorConfig,
    layers: Sequence[AttentionShape],
    kv_dtype: torch.dtype,
    max_model_len: int,
    states: Sequence[int],
) -> PageLayout | None:
    """Return the groups that a model's layers form, and their pages; None: one group is enough.

    ``layers``: those with K and V of their own. ``states``: the bytes of the states of each recurrent layer.

    Raises:
        ModelError: it has recurrent layers, and layers that cannot be grouped beside them.
    """
    kinds = [_kind(layer) for layer in layers]
    found = page_layout(kinds, config.block_size, kv_dtype, max_model_len, states)
    if states and found is None:
        raise ModelError(f"{config.model} has recurrent layers beside layers with K and V of unequal shapes")
    return found


def _kind(layer: AttentionShape) -> KVLayerKind:
    """Return the tokens that a layer keeps: those of its attention chunk if it has one, else of its window."""
    if layer.attention_chunk is not None:
        return KVLayerKind(layer.kv_shape, layer.attention_chunk, chunked=True)
    return KVLayerKind(layer.kv_shape, layer.window or 0)


def _log_whole(layers: Sequence[AttentionShape], found: PageLayout | None, max_model_len: int) -> None:
    """Log how many layers with a window keep all tokens in these groups, and why."""
    windows = [kind for kind in map(_kind, layers) if 0 < kind.window < max_model_len]
    count = len(windows) - sum(len(group.layers) for group in found.groups if group.window) if found else len(windows)
    if count:
        unequal = len(windows) < len(layers) or (found is None and len({kind.window for kind in windows}) > 1)
        reason = "layers that see the same tokens have K and V of unequal shapes" if unequal else "no layer sees more"
        log.info("%d layers with a window keep all tokens, because %s", count, reason)


def _one_group(config: ExecutorConfig, loaded: LoadedModel) -> str:
    """Return which used features need all layers in one group; empty: none does."""
    if config.kv_mapping == "mmu":
        return "page tables in hardware (--kv-mapping mmu)"
    if loaded.kernels == "triton" and config.attention not in ("auto", "triton"):
        return f"libraries for attention (--attention {config.attention})"
    return ""


def groups_of(pages: PageLayout | None) -> tuple[LayerGroup, ...]:
    """Return the description of the groups for the scheduler, that of states last."""
    if pages is None:
        return ()
    groups = [
        LayerGroup(len(one.layers), one.pages_per_block, one.window, one.chunked, latent=len(one.shape) == 3)
        for one in pages.groups
    ]
    if (states := pages.states) is not None:
        groups.append(LayerGroup(states.num_layers, states.pages_per_block, window=2, state=True))
    return tuple(groups)
