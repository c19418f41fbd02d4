"""Recurrent layers, such as gated delta nets, Mamba-2 and short convolutions, whose states are kept in pages.

The recurrent modules of all families of transformers get and update their states by the same methods of a cache. So no
family needs code of its own: the forward pass of each recurrent module is replaced by one that cuts the flat batch into
batches of sequences, and calls the original one on each of them with a cache that has the states of these sequences. A
convolution keeps the last inputs of its kernel, which is its *conv state*; the rest is the *recurrent state*.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from torch import nn

if TYPE_CHECKING:
    from pagewise_kernels.recurrent import ChunkPlan

StateKey = tuple[str, int]
"""``CONV`` or ``RECURRENT``, and the index that a module has for the state."""
CONV, RECURRENT = "conv", "recurrent"

CACHES = ("cache_params", "past_key_values", "past_key_value")
"""The names of the parameter by which recurrent modules get the cache."""


class State(NamedTuple):
    """A state of a recurrent module for one sequence, in the type in which the module computes it."""

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(slots=True, frozen=True)
class RecurrentLayer:
    """A recurrent module of a model, by its name there, and its states."""

    name: str
    states: tuple[State, ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of its states for one sequence."""
        return sum(state.num_bytes for state in self.states)


class StateCache:
    """The cache of transformers that a recurrent module gets, with the states of a batch of sequences.

    ``held``: the states by key, [sequences, *shape], which are updated in place. ``begun``: they are the states behind
    earlier tokens of the sequences; else the sequences begin, and their values have no meaning yet.
    """

    def __init__(self, held: Mapping[StateKey, torch.Tensor], *, begun: bool) -> None:
        self._held = held
        self._known = set(held) if begun else set[StateKey]()

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return whether the states behind all tokens are kept."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether there are states of earlier tokens."""
        return bool(self._known)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a conv state; None: the sequences begin."""
        return self._get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return a recurrent state; None: the sequences begin."""
        return self._get((RECURRENT, state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Keep the end of the inputs of a convolution [sequences, channels, tokens].

        Returns the kept inputs followed by the new ones; for sequences that begin, the new ones, padded to at least the
        number that is kept.
        """
        key = CONV, state_idx
        held, known = self._held[key], key in self._known
        inputs = torch.cat([held, conv_states], dim=-1) if known else conv_states
        if (missing := held.shape[-1] - inputs.shape[-1]) > 0:
            inputs = F.pad(inputs, (missing, 0))
        held.copy_(inputs[..., -held.shape[-1] :])
        self._known.add(key)
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> torch.Tensor:
        """Keep a recurrent state [sequences, ...], and return it."""
        key = RECURRENT, state_idx
        self._held[key].copy_(recurrent_states)
        self._known.add(key)
        return self._held[key]

    def _get(self, key: StateKey) -> torch.Tensor | None:
        return self._held[key] if key in self._known else None


class StateBatch(NamedTuple):
    """Sequences that a recurrent module computes at once, each with equally many tokens.

    ``tokens`` int64 [sequences, tokens]: their indices in the flat batch. ``read``, ``written`` int32 [sequences, pages
    per block]: the pages of the blocks from which states come, and into which they go. ``read`` is None if the
    sequences begin, and ``written`` if they verify drafts: nothing is written then.
    """

    tokens: torch.Tensor
    read: torch.Tensor | None
    written: torch.Tensor | None


class RecurrentContext:
    """The batches of a step, in order, for all recurrent modules of a model. A sequence may be in several of them,
    which cut its tokens. ``drafted``: the range of the flat batch that verifies drafts. For modules that the Triton
    kernels compute: ``plan`` is the same, and ``tables`` int32 [blocks, pages per block] are the pages of blocks."""

    batches: Sequence[StateBatch] = ()
    drafted = slice(0)
    plan: "ChunkPlan | None" = None
    tables: torch.Tensor


class _Place:
    """The bytes of a state in a block: the first one is ``start``, and pages have ``page_bytes`` bytes."""

    def __init__(self, state: State, start: int, page_bytes: int) -> None:
        self.state = state
        stop = start + state.num_bytes
        # A part takes the bytes [low, high) of each of the pages [first, last) of the block; the state's bytes from
        # ``at`` on. Pages that the state fills are one part.
        self._parts: list[tuple[int, int, int, int, int]] = []
        at = start
        while at < stop:
            page, low = divmod(at, page_bytes)
            whole = (stop - at) // page_bytes if not low else 0
            size = whole * page_bytes or min(page_bytes - low, stop - at)
            high = page_bytes if whole else low + size
            self._parts.append((page, page + max(1, whole), low, high, at - start))
            at += size

    def load(self, memory: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Return the state in the blocks of ``pages`` [n, pages per block]: [n, *shape]."""
        found = self.empty(len(pages), memory.device)
        raw = found.flatten(1).view(torch.uint8)
        for first, last, low, high, at in self._parts:
            size = (last - first) * (high - low)
            raw[:, at : at + size] = memory[pages[:, first:last], low:high].flatten(1)
        return found

    def store(self, memory: torch.Tensor, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Write ``content`` [n, *shape] into the blocks of ``pages`` [n, pages per block]."""
        raw = content.flatten(1).view(torch.uint8)
        for first, last, low, high, at in self._parts:
            size = (last - first) * (high - low)
            memory[pages[:, first:last], low:high] = raw[:, at : at + size].view(len(pages), last - first, -1)

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Return memory for the state of ``count`` sequences."""
        return torch.empty(count, *self.state.shape, dtype=self.state.dtype, device=device)


class Operation(Protocol):
    """Computes tokens as a recurrent module does."""

    def takes(self, batch: StateBatch) -> bool:
        """Return whether it computes such tokens."""
        ...

    def __call__(
        self, hidden: torch.Tensor, batches: Sequence[StateBatch], memory: torch.Tensor, starts: Mapping[StateKey, int]
    ) -> torch.Tensor:
        """Return outputs [tokens, size] for hidden states [tokens, size], of which ``batches`` have the indices; read
        and write the states in ``memory``, where ``starts`` are their first bytes in a block."""
        ...


class PagedRecurrence:
    """Replaces the forward pass of a recurrent module, whose states are kept in pages.

    Of the arguments it needs the first one alone, hidden states [1, tokens, size]: the trial without weights has
    checked that the others are masks of padding, which a flat batch does not have. ``operation``: computes the batches
    that it takes; None: the module computes all.
    """

    def __init__(
        self, module: nn.Module, layer: RecurrentLayer, context: RecurrentContext, operation: Operation | None = None
    ) -> None:
        self._forward, self._cache = module.forward, cache_name(module)
        self._layer, self._context, self._operation = layer, context, operation
        self._starts: dict[StateKey, int] = {}
        self._places: list[_Place] = []
        self._drafted: torch.Tensor | None = None

    def attach(self, memory: torch.Tensor, start: int) -> int:
        """Keep the states in ``memory``, pages uint8 [pages, page bytes], from byte ``start`` of each block on; return
        the byte behind them."""
        self._memory, self._places = memory, []
        for state in self._layer.states:
            self._places.append(_Place(state, start, memory.shape[1]))
            self._starts[state.key] = start
            start += state.num_bytes
        return start

    def detach(self) -> None:
        """Drop the references to the memory of states."""
        del self._memory

    def __call__(self, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
        """Compute the outputs [1, tokens, ...] of a flat batch, and update the states of its sequences."""
        drafted = hidden_states[0][self._context.drafted]
        self._drafted = drafted.clone() if len(drafted) else None
        batches, operation = self._context.batches, self._operation
        if operation is not None and all(operation.takes(batch) for batch in batches):
            return operation(hidden_states[0], batches, self._memory, self._starts)[None]
        outputs: list[torch.Tensor] = []
        single = True
        for batch in batches:
            found = self._compute(hidden_states[0][batch.tokens], batch)
            single = isinstance(found, torch.Tensor)
            parts = [found] if single else found
            if not outputs:
                outputs = [part.new_empty(1, hidden_states.shape[1], *part.shape[2:]) for part in parts]
            for output, part in zip(outputs, parts, strict=True):
                output[0, batch.tokens] = part
        return outputs[0] if single else tuple(outputs)

    def settle(self, batches: Sequence[StateBatch]) -> None:
        """Update the states of sequences that have verified drafts by the tokens that they keep.

        ``batches``: of these tokens, with indices in the range of the last step that has verified drafts.
        """
        assert self._drafted is not None
        for batch in batches:
            self._compute(self._drafted[batch.tokens], batch)
        self._drafted = None

    def _compute(self, hidden: torch.Tensor, batch: StateBatch) -> Any:
        """Compute the outputs of the tokens of a batch [sequences, tokens, size], and update its states."""
        memory, (_, read, written) = self._memory, batch
        if self._operation is not None and self._operation.takes(batch):
            here = batch._replace(tokens=torch.arange(batch.tokens.numel()).view(batch.tokens.shape))
            found = self._operation(hidden.flatten(0, 1), [here], memory, self._starts)
            return found.view(*batch.tokens.shape, -1)
        held = {
            place.state.key: place.empty(len(hidden), memory.device) if read is None else place.load(memory, read)
            for place in self._places
        }
        found = self._forward(hidden, **{self._cache: StateCache(held, begun=read is not None)})
        if written is not None:
            for place in self._places:
                place.store(memory, written, held[place.state.key])
        return found


def page_states(
    model: nn.Module,
    layers: Sequence[RecurrentLayer],
    context: RecurrentContext,
    operations: Mapping[str, Operation],
) -> list[PagedRecurrence]:
    """Let the recurrent modules of a model keep their states in pages; return the replacements of their forward passes.

    ``operations``: compute tokens in place of the modules with these names.
    """
    found = []
    for layer in layers:
        module: Any = model.get_submodule(layer.name)
        module.forward = paged = PagedRecurrence(module, layer, context, operations.get(layer.name))
        found.append(paged)
    return found


def check_recurrent(config: ExecutorConfig) -> None:
    """Check that the options are for models with recurrent layers.

    Raises:
        ModelError: they are not.
    """
    if config.kv_mapping == "mmu":
        raise ModelError(
            f"--kv-mapping mmu: {config.model} has recurrent layers, which are computed with block tables only"
        )


def unfit_caches() -> str:
    """Return why recurrent modules of this transformers get no states from pages, as a part of a sentence; empty: they
    do."""
    from transformers import DynamicCache, __version__

    # Before version 5.21 modules read attributes of a cache's layers in place of the methods of ``StateCache``.
    if hasattr(DynamicCache, "get_conv_state"):
        return ""
    return f"which are served from transformers 5.21 on, and {__version__} is installed: take a later version"


def cache_name(module: nn.Module) -> str:
    """Return the name of the parameter by which a recurrent module gets the cache; empty: it has none."""
    parameters = inspect.signature(module.forward).parameters
    return next((name for name in CACHES if name in parameters), "")
