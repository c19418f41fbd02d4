"""Adapters on the host: read from their files, checked, and cached."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from pagewise_shared.adapters import check_modules, content_hash, open_adapter, unusable
from pagewise_shared.protocol import Adapter
from safetensors.torch import load

from pagewise_executor.adapters.layers import AdaptedLinear, Part, shapes_of
from pagewise_executor.models.shards import Shards

_PREFIX = "base_model.model."


@dataclass(slots=True, frozen=True)
class PartFactors:
    """The adapter of one part of a layer: A [rank, ins] and B [outs, rank], which has been scaled."""

    part: int
    a: torch.Tensor
    b: torch.Tensor


LayerFactors = dict[int, list[PartFactors]]
"""The factors of an adapter by the number of the layer."""


@dataclass(slots=True)
class HostAdapters:
    """An LRU cache of at most ``most`` adapters in host memory.

    ``layers``: of the model. ``dtype``: of its activations. ``prepare``: is called with each factor that has been read,
    for example to pin its memory. ``shards``: the part of the layers that this rank has; None: all.
    """

    layers: list[AdaptedLinear]
    dtype: torch.dtype
    most: int
    max_rank: int
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    shards: Shards | None = None
    _held: dict[bytes, LayerFactors] = field(default_factory=dict)

    def get(self, adapter: Adapter) -> LayerFactors | None:
        """Return an adapter of the cache as the most recently used one; None: it is not there."""
        found = self._held.pop(adapter.content, None)
        if found is not None:
            self._held[adapter.content] = found
        return found

    def read(self, adapter: Adapter, keep: Collection[bytes]) -> tuple[LayerFactors, tuple[bytes, ...]]:
        """Read an adapter from its files; return it, and the contents of the adapters that were evicted for it.

        ``keep``: contents that are evicted last.

        Raises:
            AdapterError: it cannot be read or served, or its files have changed since it was registered.
        """
        files = open_adapter(adapter.name, adapter.path, self.max_rank)
        try:
            weights = files.weights.read_bytes()
        except OSError as error:
            raise unusable(adapter.name, f"it cannot be read: {error}") from error
        if content_hash(files.config, weights) != adapter.content:
            raise unusable(
                adapter.name,
                "its files are not the registered ones: they have changed since, or the executor sees others; "
                f"load the adapter again from {adapter.path}",
            )
        check_modules(files, self._whole_shapes())
        tensors = load(weights)
        tensors = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}
        found: LayerFactors = {}
        for layer in self.layers:
            for number, part in enumerate(layer.parts):
                if (factor := files.factors.get(part.module)) is not None:
                    a, b = (tensors[f"{part.module}.lora_{name}.weight"] for name in "AB")
                    if (a.shape, b.shape) != ((factor.rank, factor.ins), (factor.outs, factor.rank)):
                        raise unusable(adapter.name, f"the weights of {part.module} have changed while they were read")
                    pair = self._prepared(adapter.name, part, layer.ins, a, b.float() * factor.scale)
                    found.setdefault(layer.number, []).append(PartFactors(number, *pair))
        return found, self._keep(adapter.content, found, keep)

    def _prepared(
        self, name: str, part: Part, ins: int, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's part of A and of the scaled B in the type and the memory in which they are kept.

        Raises:
            AdapterError: values are not finite.
        """
        if self.shards is not None:
            a, b = self.shards.cut_adapter(part.module, a, b, (part.stop - part.start, ins))
        a, b = a.to(self.dtype, copy=True), b.to(self.dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            # K and V that are NaN would corrupt the results of later sequences in the same blocks.
            raise unusable(name, f"{part.module} has weights that are not finite")
        return self.prepare(a), self.prepare(b)

    def _whole_shapes(self) -> dict[str, tuple[int, int]]:
        shapes = shapes_of(self.layers)
        if self.shards is not None:
            for module, (ins, outs) in shapes.items():
                whole_outs, whole_ins = self.shards.whole_shape(module, (outs, ins))
                shapes[module] = whole_ins, whole_outs
        return shapes

    def _keep(self, content: bytes, factors: LayerFactors, keep: Collection[bytes]) -> tuple[bytes, ...]:
        self._held.pop(content, None)
        evicted = []
        while len(self._held) >= self.most:
            out = next((held for held in self._held if held not in keep), next(iter(self._held)))
            del self._held[out]
            evicted.append(out)
        self._held[content] = factors
        return tuple(evicted)
