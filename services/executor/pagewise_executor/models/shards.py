"""The part of a model that one rank of an executor holds (tensor parallelism, Megatron-LM, arXiv 1909.08053).

A rank's part is a smaller model of the same family: fewer heads, a narrower MLP, a part of the vocabulary. So its
modules are built from a configuration with these sizes, and compute as they are. ``connect`` adds the sums over all
ranks, behind attention and the MLP of each layer and behind the embedding, and gathers the logits. A plan
(``shard_plans.py``) says along which dimension each weight is cut. transformers itself would use DTensor, with which a
step took 33 ms instead of 6.7 ms.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol.limits import MAX_RANKS
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagewise_executor.collectives import ALONE, Ranks

_DIVIDED = (
    *("num_attention_heads", "num_attention_heads_per_layer", "intermediate_size", "intermediate_size_mlp"),
    *("moe_intermediate_size", "shared_expert_intermediate_size"),
)
"""Settings that are divided among the ranks, of all layers or a list of one for each; KV heads and the vocabulary need
not be divisible."""
_DIFFERING = {"head_dim", "num_key_value_heads"}
"""Settings in which the layers of a model that is divided may differ."""
COLUMNS, PACKED, ROWS, PACKED_ROWS = "colwise", "packed_colwise", "rowwise", "packed_rowwise"
EXPERTS, NORM, FIRST = "moe_tp_experts", "norm_over_ranks", "first_rank"
"""Styles as transformers names them, and two more: of an RMS norm over all heads, and of a bias that counts once."""
_DIMENSIONS = {COLUMNS: -2, PACKED: -2, NORM: -2, ROWS: -1, PACKED_ROWS: -1}
"""The dimension of a weight that is cut, by its style. The only dimension of a bias counts as the columns'."""
_SUMMED = (ROWS, EXPERTS)
"""Styles of modules whose outputs are summed over the ranks."""

LLAMA_PLAN = {
    f"model.layers.*.{name}": style
    for style, names in {
        COLUMNS: (*(f"self_attn.{one}_proj" for one in "qkv"), "mlp.gate_proj", "mlp.up_proj"),
        ROWS: ("self_attn.o_proj", "mlp.down_proj"),
    }.items()
    for name in names
}
"""The plan of models of Llama's structure."""


class UnknownShardError(Exception):
    """The plan does not say how to cut a weight; the text names it."""


class Slice(Protocol):
    """A weight in a safetensors file, of which parts can be read."""

    def get_shape(self) -> list[int]:
        """Return its shape."""

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read a part of it."""


def shard_config(name: str, text: Any, size: int) -> None:
    """Change the configuration ``text`` of a whole model to the sizes of the part of one of ``size`` ranks.

    Raises:
        ModelError: the model cannot be divided like that; the text says which numbers of ranks are possible.
    """
    if size == 1:
        return
    if any(getattr(text, "activation_sparsity_pattern", None) or ()):
        raise ModelError(
            f"--tensor-parallel {size}: in layers of {name} the activations of a whole MLP decide which of them count "
            "(activation_sparsity_pattern), and each rank would have a part of them"
        )
    counts = {key: count for key in _DIVIDED if (count := getattr(text, key, None))}
    differ = getattr(text, "is_heterogeneous", False)
    layers = text.per_layer_config if differ else [text]
    kv_heads = {getattr(layer, "num_key_value_heads", None) or layer.num_attention_heads for layer in layers}
    if indivisible := _indivisible(counts, kv_heads, size):
        possible = [str(count) for count in range(1, MAX_RANKS + 1) if not _indivisible(counts, kv_heads, count)]
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
        ModelError: the layers differ in settings of which nothing says how they are divided.
    """
    if unknown := set(text.per_layer_attributes) - _DIFFERING:
        raise ModelError(f"--tensor-parallel {size}: the layers of {name} differ in {', '.join(sorted(unknown))}")
    text.per_layer_config = {
        number: {"head_dim": layer.head_dim, "num_key_value_heads": max(1, layer.num_key_value_heads // size)}
        for number, layer in enumerate(text.per_layer_config)
    }


def _indivisible(counts: Mapping[str, int | list[int]], kv_heads: Collection[int], size: int) -> str:
    """Return the setting that is not divisible by ``size``, as a part of a sentence; empty if all are."""
    for key, count in counts.items():
        if any(not isinstance(one, int) or one % size for one in (count if isinstance(count, list) else [count])):
            return f"{key} is {count}"
    wrong = [heads for heads in kv_heads if heads % size and size % heads]
    return f"num_key_value_heads is {wrong[0]}" if wrong else ""


class VocabularyNames(NamedTuple):
    """The names of a model's embedding and head."""

    embedding: str
    head: str


class Shards:
    """The part of each weight that a rank holds.

    ``plan``: names of modules or weights, * for each number, to styles. ``vocabulary``: embedding and head.
    """

    def __init__(self, ranks: Ranks, plan: Mapping[str, str], vocabulary: VocabularyNames) -> None:
        self.ranks, self.vocabulary = ranks, vocabulary
        self._plan = plan
        self._whole: dict[str, tuple[int, int]] = {}

    def style(self, name: str) -> str:
        """Return the style of a module or a weight; empty if all ranks hold the whole of it."""
        return self._plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name), "")

    def read(self, source: Slice, name: str, shape: list[int]) -> torch.Tensor:
        """Read and return this rank's part of a weight.

        ``name``: of the weight in the model. ``shape``: of the part in the model. If ``source`` has fewer dimensions,
        it is one of several weights of the checkpoint that make this one, for example the weight of one expert.

        Raises:
            UnknownShardError: the plan does not say how to get from the shape in the file to ``shape``.
        """
        whole = list(source.get_shape())
        joined = len(whole) < len(shape)
        self.note(name, whole)
        module = name.rpartition(".")[0]
        style = self.style(name) or self.style(module)
        summed = style == ROWS and len(whole) > 1 and module not in self.vocabulary
        if module in self.vocabulary:
            part = self._vocabulary(source, whole, shape[0])  # against the plan: its size need not be divisible
        elif style == FIRST or (style == ROWS and len(whole) == 1):
            part = source[...]  # a bias, which is summed, and must count once
            part = part if self.ranks.first else torch.zeros_like(part)
        elif style in _DIMENSIONS:
            part = self._cut(source, style, None if joined else shape)
        else:
            part = source[...]
        if not joined and (list(part.shape) != shape or (summed and whole[-1] != shape[-1] * self.ranks.size)):
            raise UnknownShardError(
                f"--tensor-parallel: nothing says how its weight {name} is divided (style {style!r}, {whole} in the "
                f"file, {shape} on each rank)"
            )
        return part

    def note(self, name: str, whole: Sequence[int]) -> None:
        """Keep the shape that a weight has in the whole model."""
        if len(whole) == 2:
            self._whole[name.removesuffix(".weight")] = whole[0], whole[1]

    def whole_shape(self, module: str, part: tuple[int, int]) -> tuple[int, int]:
        """Return outputs and inputs of a linear layer in the whole model; ``part``: the sizes on this rank."""
        return self._whole.get(module, part)

    def cut_adapter(
        self, module: str, a: torch.Tensor, b: torch.Tensor, part: tuple[int, int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of an adapter of a linear layer: A [rank, inputs] and B [outputs, rank].

        ``part``: outputs and inputs of the layer on this rank. Where it has some of the outputs, it needs these rows of
        B and all of A. Where it has some of the inputs, it needs these columns of A and all of B: the product is then a
        part of a sum over the ranks, as the layer's own output is.
        """
        outs, ins = part
        if outs < len(b):
            halves = b.chunk(2) if self.style(module) == PACKED else (b,)
            b = torch.cat([half[slice(*self.span(len(half), outs // len(halves)))] for half in halves])
        if ins < a.shape[1]:
            a = a[:, slice(*self.span(a.shape[1], ins))]
        return a, b

    def span(self, whole: int, width: int) -> tuple[int, int]:
        """Return the begin and the end of this rank's part of a dimension.

        With fewer parts than ranks (KV heads), neighbours have the same part.
        """
        size = self.ranks.size
        parts = max(1, whole // width)
        begin = (self.ranks.rank * parts // size if parts < size else self.ranks.rank) * width
        return begin, begin + width

    def _cut(self, source: Slice, style: str, shape: list[int] | None) -> torch.Tensor:
        """Read this rank's part of a dimension. ``shape``: of the part; None: ``source`` is one of several weights."""
        whole = source.get_shape()
        dim = max(0, len(whole) + _DIMENSIONS[style])
        halves = 2 if style in (PACKED, PACKED_ROWS) and shape is not None else 1
        size = whole[dim] // halves
        begin, end = self.span(size, size // self.ranks.size if shape is None else shape[dim] // halves)
        before = (slice(None),) * dim
        cut = [source[(*before, slice(half * size + begin, half * size + end))] for half in range(halves)]
        return cut[0] if halves == 1 else torch.cat(cut, dim=dim)

    def _vocabulary(self, source: Slice, whole: list[int], rows: int) -> torch.Tensor:
        """Read the rows of this rank's tokens, padded with zeros behind the end of the vocabulary."""
        begin = min(self.ranks.rank * rows, whole[0])
        part = source[begin : min(begin + rows, whole[0])]
        return torch.cat([part, part.new_zeros(rows - len(part), *whole[1:])]) if len(part) < rows else part


class _RankSum:
    """A hook that sums the output of a module over all ranks."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._handle: RemovableHandle | None = None

    def join(self, module: nn.Module) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._handle = module.register_forward_hook(self)
        module.rank_sum = self  # type: ignore[assignment]

    def __call__(self, module: nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return self._ranks.reduce(output)


def move_sum(module: nn.Module, to: nn.Module) -> None:
    """Sum the output of ``to`` over all ranks instead of the output of ``module``, if that one is summed."""
    if isinstance(hook := getattr(module, "rank_sum", None), _RankSum):
        hook.join(to)


class ShardedEmbedding(nn.Module):
    """An embedding of which each rank has the rows of a part of the vocabulary."""

    def __init__(self, own: nn.Module, rows: int, ranks: Ranks) -> None:
        super().__init__()
        self.own = own
        self._rows, self._ranks = rows, ranks

    @property
    def weight(self) -> torch.Tensor:
        """The rows of this rank; some models send ids to the device of this weight."""
        return self.own.weight  # type: ignore[return-value]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Map ids [..] to [.., hidden]."""
        local = ids - self._ranks.rank * self._rows
        foreign = (local < 0) | (local >= self._rows)
        found: torch.Tensor = self.own(local.masked_fill(foreign, 0))
        return self._ranks.reduce(found.masked_fill(foreign[..., None], 0))


class NormOverRanks(nn.Module):
    """An RMS norm over all heads, of which each rank has some. Ranks that share a KV head count it equally often.

    ``weight``: of this rank's heads. ``late``: whether the normalised input is rounded before it is multiplied by it.
    """

    def __init__(self, weight: nn.Parameter, eps: float, ranks: Ranks, *, late: bool) -> None:
        super().__init__()
        self.weight = weight
        self._eps, self._ranks, self._late = eps, ranks, late

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise x [.., this rank's heads and their numbers]."""
        wide = x.float()
        squares = self._ranks.reduce(wide.pow(2).mean(-1, keepdim=True)) / self._ranks.size
        wide = wide * torch.rsqrt(squares + self._eps)
        return self.weight * wide.to(x.dtype) if self._late else (self.weight * wide).to(x.dtype)


def _over_ranks(norm: Any, name: str, ranks: Ranks) -> NormOverRanks:
    """Return a norm over the heads of all ranks for one over the heads of this rank, which shows how it rounds.

    Raises:
        UnknownShardError: it is no RMS norm.
    """
    weight, eps = norm.weight, getattr(norm, "variance_epsilon", None)
    x = torch.arange(len(weight), device=weight.device).cos().to(weight.dtype)[None, None]
    for late in (False, True):
        if eps is not None and torch.equal(NormOverRanks(weight, eps, ALONE, late=late)(x), norm(x)):
            return NormOverRanks(weight, eps, ranks, late=late)
    raise UnknownShardError(f"--tensor-parallel: {name} goes over all heads, and is no RMS norm that is known here")


def vocabulary_names(model: Any) -> VocabularyNames:
    """Return the names of a model's embedding and head, before faster modules replace them."""
    names = {module: name for name, module in model.named_modules()}
    return VocabularyNames(names[model.get_input_embeddings()], names[model.get_output_embeddings()])


def connect(model: nn.Module, shards: Shards | None, vocab_size: int) -> None:
    """Add the sums over the ranks and the gathering of logits to a model, except in fused layers, which sum themselves.

    ``shards``: None if there is one rank. ``vocab_size``: of the whole model.
    """
    if shards is None:
        return
    ranks, names = shards.ranks, shards.vocabulary
    for name, module in list(model.named_modules()):
        if shards.style(name) in _SUMMED and name not in names:
            _RankSum(ranks).join(module)
        elif shards.style(name) == NORM:
            model.set_submodule(name, _over_ranks(module, name, ranks))
    embedding = model.get_submodule(names.embedding)
    model.set_submodule(names.embedding, ShardedEmbedding(embedding, -(-vocab_size // ranks.size), ranks))
    head = model.get_submodule(names.head)
    head.register_forward_hook(lambda module, args, output: ranks.gather_logits(output, vocab_size))
