"""The states that the recurrent modules of a model without weights keep, found by recording their use of a cache.

Its tensors have shapes and types, and gradients tell which tensors an output depends on.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pagewise_executor.models.recurrent import CACHES, CONV, RECURRENT, State, StateCache, StateKey, cache_name
from pagewise_executor.models.support import WITHOUT_EFFECT

_WITHOUT_EFFECT = WITHOUT_EFFECT | {"conv_mask", *CACHES}
"""Arguments that recurrent modules get and that change nothing in a flat batch, which has no padding."""
_LATER = (1, 4)
"""The numbers of tokens of the trial continuations."""


class _FirstCache(StateCache):
    """The cache of a sequence that begins: it takes the states as they come, so that their sizes can be read."""

    def __init__(self) -> None:
        self.found: dict[StateKey, torch.Tensor] = {}
        self.layers = set[int]()
        super().__init__(self.found, begun=False)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: object
    ) -> torch.Tensor:
        """Keep inputs of a convolution."""
        size = more.get("conv_kernel_size")
        kept = size if isinstance(size, int) else conv_states.shape[-1]
        self.layers.add(layer_idx)
        self.found[CONV, state_idx] = conv_states.new_empty(*conv_states.shape[:-1], kept)
        return super().update_conv_state(conv_states, layer_idx, state_idx)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **more: object
    ) -> torch.Tensor:
        """Keep a recurrent state."""
        self.layers.add(layer_idx)
        self.found[RECURRENT, state_idx] = torch.empty_like(recurrent_states)
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx)


class RecordedModule:
    """Replaces the forward pass of a module that gets a cache, and records the states that it keeps there.

    ``states``: none if the module does not use the cache. ``layers``: the layers that have these states.
    ``unfit``: why the states cannot be kept in pages, as a part of a sentence; empty: they can.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward, self._cache = module.forward, cache_name(module)
        self.states: tuple[State, ...] = ()
        self.unfit = ""
        self.layers = set[int]()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs of a sequence that begins."""
        given = inspect.signature(self._forward).bind(*args, **kwargs).arguments
        (_, hidden), *others = (given | given.pop("kwargs", {})).items()
        unknown = {name for name, value in others if value is not None} - _WITHOUT_EFFECT
        if self.states:
            self.unfit = "are called more than once"
        elif unknown:
            self.unfit = f"get arguments that are not known: {', '.join(sorted(unknown))}"
        cache = _FirstCache()
        found = self._forward(hidden, **{self._cache: cache})
        self.layers |= cache.layers
        self.states = tuple(State(key, tuple(one.shape[1:]), one.dtype) for key, one in cache.found.items())
        parts = found if isinstance(found, tuple) else (found,)
        if any(not isinstance(part, torch.Tensor) or part.shape[:2] != hidden.shape[:2] for part in parts):
            self.unfit = "return other things than a value for each token"
        self._size, self._dtype = hidden.shape[2:], hidden.dtype
        return found

    def check(self) -> None:
        """Find out whether tokens that come later depend on all states."""
        for count in _LATER:
            for state in self.states:
                if not self._follows(state.key, count):
                    self.unfit = f"compute {count} later tokens without the {state.key[0]} state of earlier ones"

    def _follows(self, key: StateKey, count: int) -> bool:
        """Return whether the outputs of ``count`` tokens depend on a state of earlier tokens."""
        with torch.enable_grad():
            held = {
                state.key: torch.zeros(
                    1, *state.shape, dtype=state.dtype, device="meta", requires_grad=state.key == key
                ).mul(1)  # a leaf cannot be updated in place
                for state in self.states
            }
            hidden = torch.zeros(1, count, *self._size, dtype=self._dtype, device="meta")
            found = self._forward(hidden, **{self._cache: StateCache(held, begun=True)})
            return any(part.requires_grad for part in (found if isinstance(found, tuple) else (found,)))


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[dict[str, RecordedModule]]:
    """Record the states that ``modules`` keep while the model computes within."""
    found = {name: RecordedModule(module) for name, module in modules.items()}
    for name, module in modules.items():
        module.forward = found[name]
    try:
        yield found
    finally:
        for module in modules.values():
            del module.forward
