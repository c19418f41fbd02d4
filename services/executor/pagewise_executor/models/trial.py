"""A trial of a model without its weights: what its layers ask of attention, before a byte of the weights is read.

The model is built on the meta device, whose tensors have shapes and no data, and computes one short prompt. An
attention function and a mask function of the trial record the arguments that each layer passes, and the modules that
pass them. So a model that keeps state elsewhere, that attends in a way of its own, or whose masks let a token see other
tokens than paged attention would, is found by what it does, and need not be on a list. Modules that keep states in a
cache of transformers compute another prompt with a cache that records these states.
"""

import inspect
import logging
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pagewise_shared.errors import ModelError
from torch import nn

from pagewise_executor.models.latents import absorb_latents, unfit_latents
from pagewise_executor.models.recurrent import RecurrentLayer, unfit_caches
from pagewise_executor.models.recurrent_shards import narrow_convolutions
from pagewise_executor.models.recurrent_trial import recording
from pagewise_executor.models.support import (
    SERVED,
    AttentionCall,
    attention_modules,
    attention_shape,
    is_attention,
    recurrent_layers,
    refuse_call,
)
from pagewise_executor.models.weight_files import named

log = logging.getLogger(__name__)

_NAME = "pagewise-trial"
_TOKENS = 6
_STATES = {"past_key_values", "past_key_value", "layer_past", "cache_params", "past_buckets_states", "mems", "state"}
"""Parameters by which transformers' modules get the state of a sequence."""

_ONE_AT_A_TIME = threading.Lock()
"""Held during a trial: transformers has one table of attention functions by name, and a trial registers its own."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]


class _UnfitError(Exception):
    """The forward pass of a model is of another form than those of transformers; the text says how."""


class Tried(NamedTuple):
    """A model without weights that was tried, and its recurrent layers in order.

    Its attention modules attend to latents if they compute any.
    """

    model: nn.Module
    recurrent: list[RecurrentLayer]


def try_without_weights(
    model: str, config: Any, dtype: torch.dtype, *, trust_remote_code: bool, ranks: int = 1
) -> Tried:
    """Build the model of ``config`` on the meta device, and try it.

    ``model``: its name, for errors. ``config``: of transformers; of the whole model, or of the part of one of
    ``ranks``.

    Raises:
        ModelError: paged attention would not serve it, or not serve it right; the text says why.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config(decoder=True)
    name = f"{model} (model_type {config.model_type})"
    if not trust_remote_code and (text is not config or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING):
        raise ModelError(f"{name} has no causal LM in transformers, nor has its text part; {SERVED}")
    with _ONE_AT_A_TIME:
        return _try(name, config, text, dtype, trust_remote_code=trust_remote_code, ranks=ranks)


def _try(name: str, config: Any, text: Any, dtype: torch.dtype, *, trust_remote_code: bool, ranks: int) -> Tried:
    if recurrent_layers(text) and (why := unfit_caches()):
        raise ModelError(f"{name} has recurrent layers, {why}; {SERVED}")
    trial = _Trial(text)
    try:
        skeleton = _build(config, dtype, trust_remote_code=trust_remote_code)
        narrow_convolutions(skeleton, ranks)
    except Exception as error:  # code of any family, or of the model itself, may raise anything
        log.debug("%s cannot be built", name, exc_info=True)
        own = isinstance(error, KeyError) and error.args == (_NAME,)
        why = "it chooses its attention from a list of its own" if own else named(error)
        raise ModelError(f"{name} cannot be built with paged attention: {why}; {SERVED}") from error
    if why := unfit_latents(skeleton):
        raise ModelError(f"{name} has multi-head latent attention (MLA) {why}; {SERVED}")
    absorb_latents(skeleton)
    failure = trial.run(skeleton)
    stateful = trial.stateful_modules(skeleton)
    types = ", ".join(sorted({type(module).__name__ for module in stateful.values()}))
    if stateful and not recurrent_layers(text):
        raise ModelError(f"{name} keeps state that is no paged KV, in modules of type {types}; {SERVED}")
    if recurrent_layers(text) and not stateful:
        raise ModelError(f"{name} has recurrent layers, and no module gets their states from a cache; {SERVED}")
    recurrent: list[RecurrentLayer] = []
    if stateful and failure is None:
        recurrent = _recorded(f"{name} keeps states in modules of type {types}", skeleton, stateful, trial, text)
    if failure is not None:
        log.debug("%s cannot be tried", name, exc_info=failure)
        why = named(failure)
        if isinstance(failure, _UnfitError):
            why = str(failure)
        elif "meta" in why:  # the errors of tensors without data are of several types, and name the device
            why = "its steps depend on the content of tensors"
        raise ModelError(f"{name} cannot be tried without its weights: {why}; {SERVED}") from failure
    modules = attention_modules(name, skeleton, text)
    if [call.module for call in trial.calls] != modules:
        raise ModelError(
            f"{name} does not compute attention by one call of the attention function of transformers in each layer, "
            f"which paged attention would replace; {SERVED}"
        )
    for call in trial.calls:
        refuse_call(name, call, attention_shape(call.module, text, dtype))
    return Tried(skeleton, recurrent)


def _recorded(
    kept: str, skeleton: nn.Module, stateful: dict[str, nn.Module], trial: "_Trial", text: Any
) -> list[RecurrentLayer]:
    """Return the states of the modules ``stateful``.

    Raises:
        ModelError: they cannot be kept in pages. ``kept``: the beginning of its text.
    """
    skeleton.requires_grad_(requires_grad=False)  # their gradients say nothing about states
    with recording(stateful) as recorded:
        failure = trial.run(skeleton)
        found = {name: one for name, one in recorded.items() if one.states}
        try:
            # Modules of one type with the same states compute alike. All 36 checks of Qwen3-Next take a second.
            for one in {(type(stateful[name]), one.states): one for name, one in found.items()}.values():
                one.check()
        except Exception as error:  # as in ``_Trial.run``
            failure = failure or error
    why = next((f"which {one.unfit}" for one in found.values() if one.unfit), "")
    if not why and failure is not None:
        log.debug("%s, and cannot be recorded", kept, exc_info=failure)
        why = f"which cannot be computed with these alone: {named(failure)}"
    if not why and recurrent_layers(text) - set[int]().union(*(one.layers for one in found.values())):
        why = "and not in a cache alone"
    if why:
        raise ModelError(f"{kept}, {why}; {SERVED}")
    return [RecurrentLayer(name, one.states) for name, one in found.items()]


def _build(config: Any, dtype: torch.dtype, *, trust_remote_code: bool) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        built: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config,
            dtype=dtype,
            attn_implementation=_NAME,
            experts_implementation="batched_mm",  # it has no step that depends on data, which the meta device lacks
            trust_remote_code=trust_remote_code,
        )
    return built.eval()


class _Trial:
    """Forward passes of a model on the meta device. ``calls``: of the attention function in the last one, in order.
    ``text``: the configuration of the language model.

    From now on models that are built with the attention ``_NAME`` call it.
    """

    def __init__(self, text: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        self._text = text
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []
        self.calls: list[AttentionCall] = []
        AttentionInterface.register(_NAME, self._attend)
        AttentionMaskInterface.register(_NAME, self._mask)

    @torch.inference_mode()
    def run(self, skeleton: Any) -> Exception | None:
        """Compute a prompt; return the error with which it failed."""
        from transformers import DynamicCache

        self._masks, self.calls = [], []
        for module in skeleton.modules():
            kind = getattr(module, "rope_type", None)
            if isinstance(kind, str):
                module.rope_type = "default"  # others compute frequencies from the largest position, which has no data
            elif isinstance(kind, dict):
                module.rope_type = dict.fromkeys(kind, "default")
        tokens = torch.arange(_TOKENS, device="meta")[None]
        kept = torch.arange(2, device="meta")
        given: dict[str, Any] = {"position_ids": tokens, "logits_to_keep": kept}
        # With a mask of the tokens, or a cache, transformers does not search the positions for borders of sequences.
        # Recurrent layers would read the mask.
        if recurrent := bool(recurrent_layers(self._text)):
            given["past_key_values"] = DynamicCache(config=self._text)
        else:
            given["attention_mask"] = torch.ones_like(tokens)
        try:
            if missing := [name for name in given if not _takes(skeleton, name)]:
                return _UnfitError(f"its forward pass does not take {missing[0]}")
            logits = skeleton(input_ids=tokens, use_cache=recurrent, **given).logits
            if logits.shape[:2] != (1, len(kept)):
                return _UnfitError(
                    f"for {len(kept)} tokens of a prompt it returns logits of shape {list(logits.shape)}"
                )
        except Exception as error:  # code of any family, or of the model itself, may raise anything
            return error
        return None

    def stateful_modules(self, skeleton: nn.Module) -> dict[str, nn.Module]:
        """Return the modules that get the state of a sequence and did not call the attention function, by name."""
        called = {call.module for call in self.calls}
        found = {}
        for name, module in skeleton.named_modules():
            if module in called or is_attention(module, self._text) or not _takes_state(module):
                continue  # an attention module that does not call the function is counted by the caller
            _, *parts = module.modules()
            if not called.intersection(parts) and not any(_takes_state(part) for part in parts):
                found[name] = module
        return found

    def _attend(
        self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        attention_mask: torch.Tensor | None, **arguments: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        sees = next((sees for mask, sees in self._masks if mask is attention_mask), None)
        self.calls.append(AttentionCall(module, query, key, value, attention_mask, sees, arguments))
        absorbed: Any = getattr(module, "absorbed", None)
        size = value.shape[-1] if absorbed is None else absorbed.from_latents.shape[-1]
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], size), None

    def _mask(self, *_: object, mask_function: MaskFunction, **__: object) -> torch.Tensor:
        mask = torch.ones(1, 1, _TOKENS, _TOKENS, dtype=torch.bool, device="meta")
        self._masks.append((mask, mask_function))
        return mask


def _takes(model: Any, name: str) -> bool:
    """Return whether the forward pass of a model, or of the decoder that gets its arguments, has a parameter."""
    return any(name in inspect.signature(part.forward).parameters for part in (model, model.get_decoder()))


def _takes_state(module: nn.Module) -> bool:
    return not _STATES.isdisjoint(inspect.signature(module.forward).parameters)
