"""The part of a model that one rank of an executor holds (tensor parallelism, Megatron-LM, arXiv 1909.08053).

A rank's part is a smaller model of the same family: fewer heads, a narrower MLP, a part of the vocabulary. So its
modules are built from a configuration with these sizes (``shard_settings.py``), and compute as they are. ``connect``
adds the sums over all ranks, behind attention and the MLP of each layer and behind the embedding, and gathers the
logits. A plan (``shard_plans.py``) has the dimension along which each weight is cut. transformers itself would use
DTensor, with which a step took 33 ms instead of 6.7 ms.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagewise_executor.collectives import ALONE, Ranks

COLUMNS, PACKED, ROWS, PACKED_ROWS = "colwise", "packed_colwise", "rowwise", "packed_rowwise"
EXPERTS, NORM, FIRST = "moe_tp_experts", "norm_over_ranks", "first_rank"
"""Styles as transformers names them, and two more: of an RMS norm over all heads, and of a bias that counts once."""
_DIMENSIONS = {COLUMNS: -2, PACKED: -2, NORM: -2, ROWS: -1, PACKED_ROWS: -1}
"""The dimension of a weight that is cut, by its style. The only dimension of a bias counts as the columns'."""
_SUMMED = (ROWS, EXPERTS)
"""Styles of modules whose outputs are summed over the ranks."""


class Heads(NamedTuple):
    """A part of the rows of a weight: ``size`` rows for each of ``number`` heads. If there are fewer heads than ranks,
    neighbours have the same."""

    number: int
    size: int

    @property
    def rows(self) -> int:
        """The rows of all heads."""
        return self.number * self.size


class Packed(NamedTuple):
    """The style of a weight whose rows have several parts, each of which is cut."""

    parts: tuple[Heads, ...]


class GatedNorm(NamedTuple):
    """The style of a gated norm over the channels of each of ``groups`` of heads."""

    groups: int


Style = str | Packed | GatedNorm

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


class VocabularyNames(NamedTuple):
    """The names of a model's embedding and head."""

    embedding: str
    head: str


class Shards:
    """The part of each weight that a rank holds.

    ``plan``: names of modules or weights, * for each number, to styles. ``vocabulary``: embedding and head.
    """

    def __init__(self, ranks: Ranks, plan: Mapping[str, Style], vocabulary: VocabularyNames) -> None:
        self.ranks, self.vocabulary = ranks, vocabulary
        self._plan = plan
        self._whole: dict[str, tuple[int, int]] = {}

    def style(self, name: str) -> Style:
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
        self.note(name, whole)
        module = name.rpartition(".")[0]
        style = self.style(name) or self.style(module)
        parts = style.parts if isinstance(style, Packed) else ()
        joined = len(whole) < len(shape) or (len(parts) > 1 and whole[0] in {part.rows for part in parts})
        summed = style == ROWS and len(whole) > 1 and module not in self.vocabulary
        if module in self.vocabulary:
            part = self._vocabulary(source, whole, shape[0])  # against the plan: its size need not be divisible
        elif style == FIRST or (style == ROWS and len(whole) == 1):
            part = source[...]  # a bias, which is summed, and must count once
            part = part if self.ranks.first else torch.zeros_like(part)
        elif isinstance(style, Packed) and not joined:
            part = self._cut_parts(source, parts)
        elif isinstance(style, Packed | GatedNorm):
            part = source[slice(*self.span(whole[0], whole[0] // self.ranks.size))]
        elif style in _DIMENSIONS:
            part = self._cut(source, style, None if joined else shape)
        else:
            part = source[...]
        if not joined and (list(part.shape) != shape or (summed and whole[-1] != shape[-1] * self.ranks.size)):
            how = f"parts of {', '.join(str(one.rows) for one in parts)} rows" if parts else f"style {style!r}"
            raise UnknownShardError(
                f"--tensor-parallel: nothing says how its weight {name} is divided ({how}, {whole} in the file, "
                f"{shape} on each rank)"
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

    def _cut_parts(self, source: Slice, parts: Sequence[Heads]) -> torch.Tensor:
        """Read this rank's heads of each of the ``parts`` that follow each other in a weight."""
        cut, start = [], 0
        for part in parts:
            begin, end = self.span(part.rows, max(1, part.number // self.ranks.size) * part.size)
            cut.append(source[start + begin : start + end])
            start += part.rows
        return torch.cat(cut)

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

    @property
    def embedding_dim(self) -> int:
        """Numbers of a token."""
        return self.own.embedding_dim  # type: ignore[return-value]

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
    modules = list(model.named_modules())
    inside_experts = tuple(f"{name}." for name, _ in modules if shards.style(name) == EXPERTS)  # their sum is summed
    for name, module in modules:
        if shards.style(name) in _SUMMED and name not in names and not name.startswith(inside_experts):
            _RankSum(ranks).join(module)
        elif shards.style(name) == NORM:
            model.set_submodule(name, _over_ranks(module, name, ranks))
    embedding = model.get_submodule(names.embedding)
    model.set_submodule(names.embedding, ShardedEmbedding(embedding, -(-vocab_size // ranks.size), ranks))
    head = model.get_submodule(names.head)
    head.register_forward_hook(lambda module, args, output: ranks.gather_logits(output, vocab_size))
