"""EAGLE-3 heads: a layer that drafts from the hidden states of three layers of the model (Li et al., 2025).

A head is a folder with config.json and safetensors. ``fc`` joins the three hidden states of a token to one. The layer
computes attention from it beside the embedding of the next token, each normalised, and its output is the hidden state
of the next entry. Heads of vLLM, SGLang and speculators have the same weights, by two names of the layer.
"""

import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from pagewise_shared.config import DraftModelConfig, ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.model_files import resolve_model
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagewise_executor.models.checkpoint import Checkpoint
from pagewise_executor.models.draft_model import DraftModel
from pagewise_executor.models.families import join_rope
from pagewise_executor.models.fused import FusedDecoder, FusedDecoderLayer, NormWeight, sum_of_one
from pagewise_executor.models.kernel_choice import check_stored
from pagewise_executor.models.llama import LlamaDecoderLayer, RMSNorm, RotaryEmbedding
from pagewise_executor.models.llama_config import Count, LlamaConfig, NotReadableError
from pagewise_executor.models.loader import LoadedModel, fingerprint
from pagewise_executor.models.operations import Operations
from pagewise_executor.models.preparation import operations_of, replace_linears
from pagewise_executor.models.quantised_checkpoint import read_quantisation
from pagewise_executor.models.weight_files import Headers, checked_headers, open_weights, weight_files
from pagewise_executor.models.weight_report import check_types

_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")
_OTHERS = {"d2t", "t2d"}
"""Tensors beside the weights. Which tokens of the model the head knows follows from ``d2t``."""


class _Layers(msgspec.Struct):
    """The part of config.json that names the layers whose inputs ``fc`` joins."""

    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None


class EagleConfig(LlamaConfig, kw_only=True, tag="eagle3", forbid_unknown_fields=False):
    """The keys of config.json of a head. Others are ignored: a wrong draft costs time, and changes no output.

    ``head_norm``: not in the file; the weights tell.
    """

    attention_bias: bool = False  # type: ignore[misc] # it hides the field of the class
    mlp_bias: bool = False  # type: ignore[misc]
    head_norm: bool = False  # type: ignore[misc]
    max_position_embeddings: Count = 2**30
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    num_hidden_layers: int = 1
    draft_vocab_size: Count | None = None
    target_hidden_size: Count | None = None
    norm_before_residual: bool = False
    eagle_config: _Layers = msgspec.field(default_factory=_Layers)
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None

    def taken_layers(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers of a model with so many, by whose inputs the head drafts."""
        named = self.eagle_aux_hidden_state_layer_ids or self.eagle_config.eagle_aux_hidden_state_layer_ids
        return tuple(sorted(set(named or (2, num_layers // 2, num_layers - 3))))


class _Layer(LlamaDecoderLayer):
    """The layer of a head: Q, K and V have twice as many inputs, an embedding and a hidden state."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, 0, None)
        attention, bias = self.self_attn, config.attention_bias
        for name in ("q_proj", "k_proj", "v_proj"):
            outs = getattr(attention, name).out_features
            setattr(attention, name, nn.Linear(2 * config.hidden_size, outs, bias=bias, device="meta"))
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class _Weights(nn.Module):
    """The weights of a head, by their names in the files.

    ``states``: the numbers of a token's hidden states. ``embedded``: the tokens of its own embedding; 0: it has none.
    """

    def __init__(self, config: EagleConfig, states: int, embedded: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        if embedded:
            self.embed_tokens = nn.Embedding(embedded, hidden, device="meta")
        self.fc = nn.Linear(states, hidden, bias=False, device="meta")
        self.layers = nn.ModuleList([_Layer(config)])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size or config.vocab_size, bias=False, device="meta")


class EagleHead(DraftModel):
    """A head that drafts for the model ``loaded``.

    ``shape``: of its attention. ``fingerprint``: the end of the fingerprint of a model whose blocks have its KV, too.
    ``weights``: whose layer is fused. ``embedding``: of the head, or else of the model. ``targets`` int64 [draft
    vocabulary]: the token of the model that each of the head's is; None: the vocabularies are equal.
    """

    def __init__(
        self, loaded: LoadedModel, config: EagleConfig, weights: _Weights, operations: Operations,
        rotary: RotaryEmbedding, hidden_norm: NormWeight, embedding: nn.Module, targets: torch.Tensor | None,
        wanted: DraftModelConfig, digest: str,
    ) -> None:  # fmt: skip
        layer = weights.layers[0]
        assert isinstance(layer, FusedDecoderLayer)
        self.attention, self.most = layer.self_attn, wanted.num_speculative_tokens
        self.most_rows = wanted.disable_by_batch_size or 0
        self.shape, self.fingerprint = layer.shape, f"-eagle3-{digest}"
        self._layer, self._weights, self._operations = layer, weights, operations
        self._hidden_norm, self._norm = hidden_norm, NormWeight(weights.norm)
        self._before_residual = config.norm_before_residual
        self._embedding, self._targets, self._vocab_size = embedding, targets, loaded.vocab_size
        device = hidden_norm.weight.device

        def angles(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            cos, sin = rotary(hidden_norm.weight, positions[None])
            return cos[0], sin[0]

        self._rotation_at = operations.rotations(angles, loaded.max_model_len, device)
        layers = decoder_layers(loaded.model)
        taken = taken_layers(config, len(layers))
        states = weights.fc.weight.shape[1] // len(taken)
        # Inputs of layers: of the last step, and where steps of CUDA graphs keep them (``reserve``).
        self._inputs = self._reserved = [torch.empty(0, states, dtype=loaded.dtype, device=device)] * len(taken)
        self._decoder, self._taken = loaded.model.get_decoder(), [layers[number] for number in taken]  # type: ignore[operator]
        self._hooks: list[RemovableHandle] = []

    def watch(self, watched: bool) -> None:
        """Keep hidden states from now on, or not; see ``DraftModel``. CUDA graphs have been captured with the hooks, so
        with these they stay."""
        if watched == bool(self._hooks) or len(self._reserved[0]):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if isinstance(self._decoder, FusedDecoder):
            self._decoder.call_by_module(frozenset(self._taken if watched else ()).__contains__)
        if watched:
            for place, layer in enumerate(self._taken):
                self._hooks.append(layer.register_forward_pre_hook(partial(self._keep, place), with_kwargs=True))
            # The replay of a graph computes no layer, and its decoder returns the output of the graph.
            self._hooks.append(self._decoder.register_forward_pre_hook(self._begin))

    def reserve(self, tokens: int) -> None:
        """Reserve memory for the inputs of layers; see ``DraftModel``."""
        self.watch(True)
        self._reserved = [one.new_empty(tokens, one.shape[1]) for one in self._reserved]

    def _begin(self, *_: object) -> None:
        self._inputs = list(self._reserved)

    def _keep(self, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the input of a layer: of a fused one, the sum of what is added and the residual, which it overwrites."""
        hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
        if isinstance(module, FusedDecoderLayer):
            hidden = hidden.clone() if args[1] is None else hidden + args[1]
        hidden, reserved = hidden.reshape(-1, hidden.shape[-1]), self._reserved[place]
        if len(hidden) <= len(reserved):
            reserved[: len(hidden)] = hidden
        else:
            self._inputs[place] = hidden

    def states(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [n, hidden] of tokens of the flat batch: ``fc`` of the inputs of three layers."""
        return self._weights.fc(torch.cat([one.index_select(0, tokens) for one in self._inputs], dim=-1))  # type: ignore[no-any-return]

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Compute entries; see ``DraftModel``."""
        layer, compute = self._layer, self._operations
        before, own = layer.norm_before_attention, self._hidden_norm
        embedded = compute.rms_norm(self._embedding(ids), before.weight, before.eps)
        normed = compute.rms_norm(hidden, own.weight, own.eps)
        residual = normed if self._before_residual else hidden
        attended = layer.attention(torch.cat([embedded, normed], dim=-1), self._rotation_at(positions))
        added = compute.feed_forward(layer, attended, residual)  # and adds ``attended`` to the residual
        return residual + added

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits [n, vocab] of the model's tokens."""
        logits: torch.Tensor = self._weights.lm_head(
            self._operations.rms_norm(hidden, self._norm.weight, self._norm.eps)
        )
        if self._targets is None:
            return logits
        whole = logits.new_full((len(logits), self._vocab_size), float("-inf"))
        return whole.index_copy_(1, self._targets, logits)


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the layers of a causal language model.

    Raises:
        ModelError: they are in no list that its decoder has.
    """
    layers = getattr(model.get_decoder(), "layers", None)  # type: ignore[operator]
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(
            f"{type(model).__name__} does not expose its layers, from which draft models take their inputs"
        )
    return layers


def taken_layers(config: EagleConfig, num_layers: int) -> tuple[int, ...]:
    """Return the layers by whose inputs a head drafts.

    Raises:
        ModelError: the model does not have them.
    """
    taken = config.taken_layers(num_layers)
    if not taken or taken[0] < 0 or taken[-1] >= num_layers:
        raise ModelError(f"the EAGLE-3 head takes the inputs of layers {list(taken)} of a model with {num_layers}")
    return taken


def load_head(config: ExecutorConfig, wanted: DraftModelConfig, loaded: LoadedModel) -> EagleHead:
    """Load the head that ``wanted`` names, to draft for the model ``loaded``.

    Raises:
        ModelError: it cannot be read, or does not fit the model.
    """
    assert wanted.model is not None
    name, model = wanted.model, loaded.model
    path, headers = _files(name)
    quantised = read_quantisation(name, path, config.kv_dtype)
    if quantised is None:
        check_types(name, headers)
    else:
        check_stored(config, loaded.device, loaded.dtype, quantised)
    names = {_own_name(key) for header in headers.values() for key in header}
    head = _config(name, path, "layers.0.self_attn.q_norm.weight" in names)
    taken = taken_layers(head, len(decoder_layers(model)))
    embedding: nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    size = int(embedding.embedding_dim)  # type: ignore[arg-type]
    if head.target_hidden_size not in (None, size):
        raise ModelError(f"{name} is for a model with {head.target_hidden_size} numbers in a state, not {size}")
    embedded = loaded.vocab_size if "embed_tokens.weight" in names else 0
    if not embedded and size != head.hidden_size:
        raise ModelError(f"{name} has no embedding, and its hidden states have {head.hidden_size} numbers")
    weights = _Weights(head, len(taken) * size, embedded).eval().requires_grad_(False)
    parts = [*(["embed_tokens"] if embedded else []), "fc", "layers.0", "norm", "lm_head"]
    try:
        checkpoint = Checkpoint(name, weights, headers, loaded.device, quantised, tied=False, named=_own_name)
        for part in parts:
            checkpoint.read(part, loaded.dtype)
    except NotReadableError as error:
        raise ModelError(f"{name} is no EAGLE-3 head for this model: {error}") from error
    if embedded:
        embedding = weights.embed_tokens
    targets = _targets(name, headers, loaded, head.draft_vocab_size or head.vocab_size)
    layer = weights.layers[0]
    assert isinstance(layer, _Layer)
    operations, hidden_norm = operations_of(loaded.kernels), NormWeight(layer.hidden_norm)
    weights.layers[0] = FusedDecoderLayer(layer, operations, sum_of_one)
    for part in parts:
        replace_linears(config, weights, loaded.kernels, loaded.device, part, alone=True)
    rotary, digest = RotaryEmbedding(head).to(loaded.device), fingerprint(path, list(headers))
    return EagleHead(loaded, head, weights, operations, rotary, hidden_norm, embedding, targets, wanted, digest)


def _files(name: str) -> tuple[Path, Headers]:
    """Return the folder of a head, and the headers of its files."""
    path = resolve_model(name)
    if not any(path.glob("*.safetensors")) and (others := sorted(path.glob("*.bin"))):
        raise ModelError(
            f"{path} has {others[0].name}, and only safetensors are loaded; where you trust this file, convert it: "
            'python -c "import torch; from safetensors.torch import save_file; save_file({name: one.contiguous() for '
            f"name, one in torch.load('{others[0]}').items()}}, '{path / 'model.safetensors'}')\""
        )
    return path, checked_headers(weight_files(name, path))


def _own_name(name: str) -> str | None:
    """Return the name in ``_Weights`` of a tensor in the files; None: it has none there."""
    if name.removeprefix("model.") in _OTHERS:
        return None
    return _LAYER.sub("layers.0.", name) if _LAYER.match(name) else name.removeprefix("model.")


def _targets(name: str, headers: Headers, loaded: LoadedModel, known: int) -> torch.Tensor | None:
    """Return the token of the model that each of the ``known`` tokens of a head is; None: they are the same.

    Raises:
        ModelError: the files do not have them.
    """
    names = ("d2t", "model.d2t")
    found = next(((file, key) for file, header in headers.items() for key in names if key in header), None)
    if found is None:
        if known != loaded.vocab_size:
            raise ModelError(f"{name} has no d2t, and another vocabulary than the model")
        return None
    file, key = found
    with open_weights(file) as opened:
        targets: torch.Tensor = opened.get_tensor(key).to(loaded.device)
    if targets.shape != (known,) or targets.is_floating_point():
        raise ModelError(f"{name}: d2t is no list of a number for each token that the head knows")
    targets = targets.to(torch.int64) + torch.arange(known, device=targets.device)
    if targets.min() < 0 or targets.max() >= loaded.vocab_size:
        raise ModelError(f"{name}: d2t names tokens outside the vocabulary of {loaded.vocab_size}")
    return targets


def _config(name: str, path: Path, head_norm: bool) -> EagleConfig:
    try:
        whole = msgspec.json.decode((path / "config.json").read_bytes(), type=dict[str, Any])
        settings = msgspec.convert(whole.pop("transformer_layer_config", {}), dict[str, Any]) | whole  # of speculators
        settings |= {"model_type": "eagle3", "head_norm": head_norm}
        join_rope(settings)
        found = msgspec.convert(settings, EagleConfig)
    except (OSError, ValueError, NotReadableError) as error:
        raise ModelError(f"{name}: its config.json is of no EAGLE-3 head: {error}") from error
    if found.num_hidden_layers != 1:
        raise ModelError(f"{name} has {found.num_hidden_layers} layers: EAGLE-3 heads of one layer are supported")
    return found
