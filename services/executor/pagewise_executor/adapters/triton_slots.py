"""Slots of adapters on a GPU: two Triton kernels per layer add all adapters of a batch.

The adapters of a layer lie one behind the other in two tensors, padded to the greatest rank, so that a kernel finds the
adapter of any token. A step adds the assignment of tokens to adapters (``LoraTiles``). CUDA graphs read it from static
buffers; a step without adapters runs a graph that was captured without them.
"""

from functools import partial

import numpy as np
import torch
from pagewise_kernels.lora import LEAST_RANK, LoraLayer, LoraTiles, add_lora, padded_rank

from pagewise_executor.adapters.host import LayerFactors
from pagewise_executor.adapters.layers import AdaptedLinear, AdapterContext
from pagewise_executor.step_work import Int32s, Int64s
from pagewise_executor.uploads import Uploads

_LARGE_ROWS = 64
_LARGE_BATCH = 512


class TritonSlots:
    """Slots for the Triton kernels. ``num_tokens``: the most tokens of a step from static buffers."""

    def __init__(
        self,
        num_slots: int,
        max_rank: int,
        layers: list[AdaptedLinear],
        context: AdapterContext,
        dtype: torch.dtype,
        device: torch.device,
        num_tokens: int,
    ) -> None:
        self._num_slots, self._rank, self._layers = num_slots, padded_rank(max_rank), layers
        self._context, self._device = context, device
        self._upload = Uploads(device)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self._slots = [
            LoraLayer(
                zeros(len(layer.parts) * self._rank, layer.ins),
                zeros(layer.outs, self._rank),
                tuple(part.stop for part in layer.parts),
            )
            for layer in layers
        ]
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        ints = {"dtype": torch.int32, "device": device}
        most_tiles = max(_most_tiles(size, num_slots) for size in {num_tokens, min(num_tokens, _LARGE_BATCH)})
        self._static_tiles = torch.full((most_tiles, 3), -1, **ints)  # type: ignore[call-overload]
        self._static_order = torch.zeros(num_tokens, **ints)  # type: ignore[call-overload]

    def put(self, slot: int, factors: LayerFactors) -> None:
        """Copy an adapter into a slot that no step in flight uses, on a stream beside the steps; on any thread."""
        if self._stream is None:
            self._copy(slot, factors)
            return
        with torch.cuda.stream(self._stream):
            self._copy(slot, factors)
        self._stream.synchronize()

    def _copy(self, slot: int, factors: LayerFactors) -> None:
        for layer in self._layers:
            a, b = self._slots[layer.number].a[slot], self._slots[layer.number].b[slot]
            a.zero_()
            b.zero_()
            for part, own_a, own_b in ((one.part, one.a, one.b) for one in factors.get(layer.number, ())):
                _, start, stop = layer.parts[part]
                first = part * self._rank
                a[first : first + len(own_a)].copy_(own_a, non_blocking=True)
                b[start:stop, : own_b.shape[1]].copy_(own_b, non_blocking=True)

    def begin(self, slots: Int64s) -> None:
        """Set the slot of each token's adapter [tokens] for the next forward pass, -1 for none."""
        if not (slots >= 0).any():
            self._context.add = None
            return
        rows = _rows_of_tile(len(slots))
        tiles, order = self._upload.together(*make_tiles(slots, rows))
        self._context.add = partial(self._add, LoraTiles(tiles, order, rows))

    def warm_up(self) -> None:
        """Compile the kernels of adapters."""
        for rows in (LEAST_RANK, _LARGE_ROWS):
            tiles, order = make_tiles(np.zeros(1, np.int64), rows)
            uploaded = LoraTiles(self._upload(tiles), self._upload(order), rows)
            for layer, slots in zip(self._layers, self._slots, strict=True):
                self._add(uploaded, layer, slots.a.new_zeros(1, layer.ins), slots.b.new_zeros(1, layer.outs))

    # ---- steps from static buffers -------------------------------------------------------------------

    def begin_static(self, slots: Int64s, size: int) -> bool:
        """Set the slots of the next step's tokens [n], padded to ``size``; return whether it uses adapters."""
        uses = bool((slots >= 0).any())
        self.prepare_static(size, uses=uses)
        if uses:
            tiles, order = make_tiles(slots, _rows_of_tile(size))
            whole = np.full((_most_tiles(size, self._num_slots), 3), -1, np.int32)
            whole[: len(tiles)] = tiles
            tiles_there, order_there = self._upload.together(whole, order)
            self._static_tiles[: len(whole)].copy_(tiles_there)
            self._static_order[: len(order)].copy_(order_there)
        return uses

    def prepare_static(self, size: int, *, uses: bool) -> None:
        """Let a forward pass of ``size`` tokens read the buffers of ``begin_static`` if it ``uses`` adapters."""
        tiles = self._static_tiles[: _most_tiles(size, self._num_slots)]
        static = LoraTiles(tiles, self._static_order[:size], _rows_of_tile(size))
        self._context.add = partial(self._add, static) if uses else None

    def _add(self, tiles: LoraTiles, layer: AdaptedLinear, x: torch.Tensor, y: torch.Tensor) -> None:
        add_lora(x, y, self._slots[layer.number], tiles)


def make_tiles(slots: Int64s, rows: int) -> tuple[Int32s, Int32s]:
    """Return ``LoraTiles.tiles`` and ``order`` of the tokens with these slots [n], -1 for none; ``rows`` per tile."""
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    found, first, counts = np.unique(slots[order], return_index=True, return_counts=True)
    tiles = [
        (slot, start, min(start + rows, begin + count))
        for slot, begin, count in zip(found.tolist(), first.tolist(), counts.tolist(), strict=True)
        for start in range(begin, begin + count, rows)
    ]
    return np.array(tiles, np.int32).reshape(-1, 3), order.astype(np.int32)


def _rows_of_tile(num_tokens: int) -> int:
    return _LARGE_ROWS if num_tokens > _LARGE_BATCH else LEAST_RANK


def _most_tiles(num_tokens: int, num_slots: int) -> int:
    return -(-num_tokens // _rows_of_tile(num_tokens)) + min(num_slots, num_tokens)
