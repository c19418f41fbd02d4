"""Chooses whether an executor keeps its model's layers in groups, each with as many tokens as its layers see."""

import logging

import torch
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import LayerGroup

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
    shapes = [loaded.layers[number] for number in loaded.kv_layers]
    kinds = [
        KVLayerKind(one.kv_shape, one.attention_chunk or one.window or 0, chunked=one.attention_chunk is not None)
        for one in shapes
    ]
    states = [layer.num_bytes for layer in loaded.recurrent]
    found = page_layout(kinds, config.block_size, kv_dtype, loaded.max_model_len, states)
    if states:
        if found is None:
            raise ModelError(f"{config.model} has recurrent layers beside layers with K and V of unequal shapes")
        return found
    if found is not None and not config.layer_groups:
        log.info("windowed layers keep all tokens (--no-layer-groups)")
        return None
    if found is not None and (reason := _one_group(config, loaded)):
        log.info("windowed layers keep all tokens, because %s do not support groups of layers yet", reason)
        return None
    return found


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
