"""Layers for multi-token prediction (MTP) that checkpoints have behind their last layer (DeepSeek-V3, GLM-4.5, ...).

In the files such a layer is ``model.layers.N`` of a model with N layers: a decoder layer like the last one, and beside
it ``enorm``, ``hnorm``, ``eh_proj`` and ``shared_head.norm``. So the model is loaded with one layer more, which is
checked, converted and quantised like the others. Then its decoder gives the layer up, and it drafts: it takes the
hidden state behind the last norm of the model, and the embedding of the next token. Embedding and head are the model's.
"""

import re
from pathlib import Path
from typing import Any

import torch
from pagewise_shared.config import DraftModelConfig, ExecutorConfig, parse_speculative
from pagewise_shared.errors import ModelError
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagewise_executor.models.draft_model import DraftModel
from pagewise_executor.models.weight_files import Headers, open_weights

_COUNTS = ("num_nextn_predict_layers", "num_mtp_layers")
_AROUND = re.compile(r"\.layers\.\d+\.(enorm|hnorm|eh_proj|shared_head|embed_tokens)\.")
_LISTS = ("layer_types", "mlp_layer_types")
"""Settings that have an entry for each layer."""


def draft_model_config(config: ExecutorConfig) -> DraftModelConfig | None:
    """Return the draft model that the option asks for; None: drafts come from the scheduler, or there are none."""
    found = parse_speculative(config.speculative_config) if config.speculative_config else None
    return found if isinstance(found, DraftModelConfig) else None


def has_mtp(config: ExecutorConfig) -> bool:
    """Return whether the option asks for the MTP layer of the checkpoint."""
    wanted = draft_model_config(config)
    return wanted is not None and wanted.method == "mtp"


def is_around_mtp(name: str) -> bool:
    """Return whether a tensor of a checkpoint belongs to an MTP layer, and to no part that other layers have."""
    return _AROUND.search(name) is not None


def add_mtp_layer(config: ExecutorConfig, text: Any, *, readable: bool) -> None:
    """Let the configuration of a language model have the MTP layer as its last layer.

    ``readable``: transformers loads the model, and no weight is quantised.

    Raises:
        ModelError: the checkpoint has no such layer, or it is not supported there.
    """
    if not any(getattr(text, name, None) for name in _COUNTS):
        raise ModelError(f"{config.model} has no layer for multi-token prediction (MTP): --speculative-config ngram:K")
    if not readable:
        raise ModelError(f"{config.model}: MTP layers of checkpoints that are quantised are not supported")
    for name in _LISTS:
        if getattr(text, name, None):
            setattr(text, name, [*getattr(text, name), getattr(text, name)[-1]])
    text.num_hidden_layers += 1


class MtpLayer(DraftModel):
    """The MTP layer of a model, which was loaded with this layer as its last one, and loses it. ``name``: of the model.

    ``headers``: of the files, which have the weights around the layer. ``attention``: of the layer.
    """

    def __init__(
        self, name: str, wanted: DraftModelConfig, model: Any, headers: Headers, dtype: torch.dtype,
        device: torch.device, attention: nn.Module,
    ) -> None:  # fmt: skip
        self.attention, self.most = attention, wanted.num_speculative_tokens
        self.most_rows = wanted.disable_by_batch_size or 0
        decoder, text = model.get_decoder(), model.config.get_text_config(decoder=True)
        layers = decoder.layers
        number = len(layers) - 1
        self._block, decoder.layers = layers[number], nn.ModuleList(layers[:number])
        text.num_hidden_layers = number
        self._rotary, self._embedding, self._head = decoder.rotary_emb, model.get_input_embeddings(), model.lm_head
        read = _read(name, headers, f"model.layers.{number}.", dtype, device)
        norms = (read["enorm.weight"], read["hnorm.weight"], read["shared_head.norm.weight"])
        self._embedding_norm, self._hidden_norm, self._norm = norms
        self._project, self._eps = read["eh_proj.weight"], float(text.rms_norm_eps)
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
        embedded = _rms_norm(self._embedding(ids), self._embedding_norm, self._eps)
        both = torch.cat([embedded, _rms_norm(hidden, self._hidden_norm, self._eps)], dim=-1)
        x, at = nn.functional.linear(both, self._project)[None], positions[None]
        rotation = self._rotary(x, at)
        output = self._block(x, position_embeddings=rotation, attention_mask=None, position_ids=at, use_cache=False)
        found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
        return found[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] by the model's head."""
        found: torch.Tensor = self._head(_rms_norm(hidden, self._norm, self._eps))
        return found


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def _read(
    model: str, headers: Headers, prefix: str, dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return the weights around an MTP layer, by their names behind ``prefix``.

    Raises:
        ModelError: the files lack one.
    """
    found: dict[str, torch.Tensor] = {}
    wanted = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
    files: dict[Path, list[str]] = {
        file: [name for name in header if name.removeprefix(prefix) in wanted and name.startswith(prefix)]
        for file, header in headers.items()
    }
    for file, names in files.items():
        with open_weights(file) as opened:
            for name in names:
                found[name.removeprefix(prefix)] = opened.get_tensor(name).to(device, dtype)
    if missing := sorted(wanted - found.keys()):
        raise ModelError(f"{model} cannot draft by its MTP layer: its files lack {prefix}{missing[0]}")
    return found
