"""Layers for multi-token prediction (MTP), which checkpoints have beside the layers of their models.

In the files such a layer is ``model.layers.N`` of a model with N layers (DeepSeek V3, GLM-4.5), or ``mtp.layers.0``
(Qwen3-Next, Qwen3.5): a decoder layer like the last one. Two norms and a projection before it, and a norm behind it,
have names of their own. So the model is loaded with one layer more, and with a module for these parts: both are
checked, converted and quantised like the rest of the model. Then the model gives them up, and they draft: they take the
hidden state behind the last norm of the model, and the embedding of the next token. Embedding and head are the model's.
"""

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from pagewise_shared.config import DraftModelConfig, ExecutorConfig, parse_speculative
from pagewise_shared.errors import ModelError
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagewise_executor.models.draft_model import DraftModel
from pagewise_executor.models.weight_files import Headers, open_weights

_PARTS = "mtp"
"""The name of the module for the parts around the layer, while the model has it."""
_BEHIND = {"enorm": "embedding_norm", "hnorm": "hidden_norm", "eh_proj": "project", "shared_head.norm": "norm"}
_APART = {
    "pre_fc_norm_embedding": "embedding_norm", "pre_fc_norm_hidden": "hidden_norm", "fc": "project", "norm": "norm",
}  # fmt: skip
"""The names of the parts in the files, behind ``model.layers.N.`` or ``mtp.``, and in ``MtpParts``."""
_SHARED = re.compile(r"(embed_tokens|shared_head\.head)\.")
"""Copies of the model's embedding and head."""
_KINDS = {"layer_types": "full_attention", "mlp_layer_types": None}
"""Settings that have an entry for each layer, with the one of the MTP layer; None: that of the last layer."""


def draft_model_config(config: ExecutorConfig) -> DraftModelConfig | None:
    """Return the draft model that the option asks for; None: drafts come from the scheduler, or there are none."""
    found = parse_speculative(config.speculative_config) if config.speculative_config else None
    return found if isinstance(found, DraftModelConfig) else None


class MtpParts(nn.Module):
    """The norms and the projection around an MTP layer, without weights. ``norm``: the last norm of the model."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.norm = (copy.deepcopy(norm).to("meta") for _ in range(3))
        size = int(norm.weight.shape[0])  # type: ignore[index]
        self.project = nn.Linear(2 * size, size, bias=False, device="meta")


class MtpNames:
    """The names of an MTP layer in the files ``headers`` of a model, of which it is layer ``number``.

    Raises:
        LookupError: the files have none.
    """

    def __init__(self, headers: Headers, number: int) -> None:
        names = {name for header in headers.values() for name in header}
        self._number, self._layer = number, f"model.layers.{number}."
        behind = re.compile(rf"(.+\.)?layers\.{number}\.eh_proj\.")
        if not any(name.startswith("mtp.fc.") or behind.match(name) for name in names):
            raise LookupError

    def named(self, others: Callable[[str], str | None]) -> Callable[[str], str | None]:
        """Return a function from the name of a tensor in the files to its name in the model with the layer.

        ``others``: is this function for the model without it.
        """

        def name_of(name: str) -> str | None:
            if name.startswith("mtp."):
                part, _, end = (bare := name.removeprefix("mtp.")).rpartition(".")
                if part in _APART:
                    return f"{_PARTS}.{_APART[part]}.{end}"
                return self._layer + bare.removeprefix("layers.0.") if bare.startswith("layers.0.") else None
            own = others(name)
            if own is None or not own.startswith(self._layer):
                return own
            part, _, end = (bare := own.removeprefix(self._layer)).rpartition(".")
            if part in _BEHIND:
                return f"{_PARTS}.{_BEHIND[part]}.{end}"
            return None if _SHARED.match(bare) else own

        return name_of

    def add_empty(self, model: Any) -> None:
        """Give the model the parts around the layer, without weights."""
        setattr(model, _PARTS, MtpParts(model.get_decoder().norm))

    def add(self, name: str, model: Any, headers: Headers, dtype: torch.dtype) -> None:
        """Give the model, which is called ``name``, the parts around the layer, with their weights.

        Raises:
            ModelError: the files lack a weight, or have it in another shape.
        """
        self.add_empty(model)
        parts, named = getattr(model, _PARTS), self.named(str)
        found: dict[str, torch.Tensor] = {}
        for file, header in headers.items():
            with open_weights(file) as opened:
                for key in header:
                    own = named(key) or ""
                    if own.startswith(f"{_PARTS}."):
                        found[own.removeprefix(f"{_PARTS}.")] = opened.get_tensor(key).to(dtype)
        for own, weight in parts.state_dict().items():
            if own not in found or found[own].shape != weight.shape:
                shape = tuple(found[own].shape) if own in found else "no shape"
                raise ModelError(
                    f"{name} cannot draft by its MTP layer: the weight of its {own.removesuffix('.weight')} has "
                    f"{shape} in the files, and not {tuple(weight.shape)}"
                )
        parts.load_state_dict({own: found[own] for own in parts.state_dict()}, assign=True)


def is_of_mtp(name: str) -> bool:
    """Return whether a tensor, by its name in the model, is of the parts around an MTP layer, or, by its name in the
    files, of a layer that they have beside others."""
    return name.startswith(f"{_PARTS}.")


def add_mtp_layer(config: ExecutorConfig, text: Any, headers: Headers, *, served: bool) -> MtpNames | None:
    """Let the configuration of a language model have the MTP layer as its last layer, if the option asks for it.

    Returns its names in the files; None: the option does not. ``served``: such models may have one.

    Raises:
        ModelError: the checkpoint has no such layer, or it is not supported there.
    """
    wanted = draft_model_config(config)
    if wanted is None or wanted.method != "mtp":
        return None
    number: int = text.num_hidden_layers
    try:
        names = MtpNames(headers, number)
    except LookupError:
        raise ModelError(
            f"{config.model} has no layer for multi-token prediction (MTP) in its files, neither mtp.fc nor "
            f"model.layers.{number}.eh_proj: --speculative-config ngram:K"
        ) from None
    if not served:
        raise ModelError(f"{config.model}: MTP layers of models of type {text.model_type} are not supported")
    for name, kind in _KINDS.items():
        if kinds := getattr(text, name, None):
            setattr(text, name, [*kinds, kind or kinds[-1]])
    text.num_hidden_layers += 1
    return names


class MtpLayer(DraftModel):
    """The MTP layer of a model, which was loaded with it, and loses it. ``attention``: of the layer."""

    def __init__(self, wanted: DraftModelConfig, model: Any, attention: nn.Module) -> None:
        self.attention, self.most = attention, wanted.num_speculative_tokens
        self.most_rows = wanted.disable_by_batch_size or 0
        decoder, text = model.get_decoder(), model.config.get_text_config(decoder=True)
        *others, self._block = decoder.layers
        decoder.layers, text.num_hidden_layers = nn.ModuleList(others), len(others)
        self._parts: MtpParts = getattr(model, _PARTS)
        delattr(model, _PARTS)
        self._rotary, self._embedding, self._head = decoder.rotary_emb, model.get_input_embeddings(), model.lm_head
        self._states: torch.Tensor | None = None
        self._decoder = decoder
        self._hook: RemovableHandle | None = None

    def watch(self, watched: bool) -> None:
        """Keep hidden states from now on, or not; see ``DraftModel``."""
        if watched and self._hook is None:
            self._hook = self._decoder.register_forward_hook(self._keep)
        elif not watched and self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _keep(self, decoder: nn.Module, args: object, output: Any) -> None:
        hidden: torch.Tensor = output.last_hidden_state
        self._states = hidden[0]

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens of the flat batch behind the model's last norm."""
        assert self._states is not None
        return self._states.index_select(0, tokens)

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute entries; see ``DraftModel``."""
        parts, at = self._parts, positions[None]
        both = torch.cat([parts.embedding_norm(self._embedding(ids)), parts.hidden_norm(hidden)], dim=-1)
        x = parts.project(both)[None]
        rotation = self._rotary(x, at)
        output = self._block(x, position_embeddings=rotation, attention_mask=None, position_ids=at, use_cache=False)
        found: torch.Tensor = parts.norm(output if isinstance(output, torch.Tensor) else output[0])
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] by the model's head."""
        found: torch.Tensor = self._head(hidden)
        return found
