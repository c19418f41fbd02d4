"""Prefill attention: chunks of queries at any positions over their paged contexts."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.attention.checks import check_attention, check_chunk, check_out
from pagewise_kernels.attention.config import DETERMINISTIC_SPLIT, TileConfig, prefill_config
from pagewise_kernels.attention.kernel import UNIT_FIELDS
from pagewise_kernels.attention.run import run_prefill
from pagewise_kernels.kv_layer import KVLayer
from pagewise_kernels.launch import interpreted, num_sms
from pagewise_kernels.shapes import power_of_two

_ALIGNED = 4
"""Parts of a plan begin at multiples of so many int32: kernels are compiled for pointers divisible by 16 bytes."""
_STATIC_PROGRAMS = 4
"""Programs for each multiprocessor of a grid that does not depend on the step. They take the units in turns."""


class Chunk(NamedTuple):
    """``size`` queries from batch row ``first`` on, at context positions ``start`` on, of block table ``table``."""

    first: int
    start: int
    size: int
    table: int


class PrefillPlan:
    """How the chunks of a step are shared out among programs; used by all its layers of one kind.

    Args:
        chunks: of a step; their queries do not overlap. heads, kv_heads, head_dim: of the model. kv_dtype: of the KV
            pool. window: sliding window of the layers that use this plan, in tokens; None: they see everything.
        config: the tile, chosen by default. upload: copies the plan to the device. The default reads memory that is
            not pinned, so CUDA copies a plan of more than 64 KiB (about 14,000 tokens) only after all work that was
            issued before. attention_chunk: a query sees the tokens of its own chunk of so many tokens, which begins
            with a tile; None: it sees everything. rotated: of plans for latents (``latents``).

    ``packed``: the plan in one array, for callers that upload it with other arrays, and then call ``bind``.
    """

    def __init__(
        self, chunks: Sequence[Chunk], *, heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype,
        device: torch.device, window: int | None = None, deterministic: bool = False, config: TileConfig | None = None,
        upload: Callable[[npt.NDArray[np.int32]], torch.Tensor] | None = None, attention_chunk: int | None = None,
        rotated: int = 0,
    ) -> None:  # fmt: skip
        check_chunk(attention_chunk)
        group = heads // kv_heads
        longest = max((chunk.size for chunk in chunks), default=0)
        self.window = window
        self.deterministic = deterministic
        self.config: TileConfig = config or prefill_config(
            longest, group, max(16, power_of_two(head_dim)), kv_dtype, device, deterministic, rotated
        )
        self.groups = kv_heads
        units = _units(chunks, self.config.rows // group, self.config.tile, window, attention_chunk)
        self.programs = len(units) * kv_heads
        self._num_queries = max((chunk.first + chunk.size for chunk in chunks), default=0)
        positions = np.zeros(self._num_queries, np.int32)
        for chunk in chunks:
            positions[chunk.first : chunk.first + chunk.size] = np.arange(chunk.start, chunk.start + chunk.size)
        # One copy to the device for all of it. Its parts are aligned like the parts of static plans, so that both sorts
        # of plans use the same compiled kernels.
        self._num_units = len(units)
        self._first_position = _ALIGNED + -(-units.size // _ALIGNED) * _ALIGNED
        self.packed = np.zeros(self._first_position + self._num_queries, np.int32)
        self.packed[0] = len(units)
        self.packed[_ALIGNED : _ALIGNED + units.size] = units.ravel()
        self.packed[self._first_position :] = positions
        self.bind(torch.from_numpy(self.packed).to(device) if upload is None else upload(self.packed))

    def bind(self, on_device: torch.Tensor) -> None:
        """Read the plan from here: ``packed`` int32, on the device."""
        self.unit_count, self.positions = on_device[:1], on_device[self._first_position :]
        self.units = on_device[_ALIGNED : _ALIGNED + self._num_units * UNIT_FIELDS]


class StaticPrefillPlan:
    """A prefill plan whose tensors keep their addresses, so that a CUDA graph can be captured of kernels that read it.

    Only the chunks of a step change. ``units_of`` returns their units, and the caller copies these into the tensors
    before each step.

    The tile is the tile of chunks as long as the step, also where all chunks of a step are short: drafts, for instance,
    fill a small part of it. Smaller tiles for short chunks would need more graphs of every size, or one more launch in
    each layer of every step; whether that is worth it has not been measured.

    Args:
        size: tokens of a step, decodes and padding included; the tile is chosen for chunks of up to so many. unit_count
            int32 [1], units int32 [size * UNIT_FIELDS], positions int32 [size]: the tensors. The others: as of
            ``PrefillPlan``.
    """

    def __init__(
        self, size: int, *, heads: int, kv_heads: int, head_dim: int, kv_dtype: torch.dtype, unit_count: torch.Tensor,
        units: torch.Tensor, positions: torch.Tensor, window: int | None = None, deterministic: bool = False,
        attention_chunk: int | None = None, rotated: int = 0,
    ) -> None:  # fmt: skip
        check_chunk(attention_chunk)
        group, device = heads // kv_heads, units.device
        self.window, self.deterministic, self._attention_chunk = window, deterministic, attention_chunk
        self.config: TileConfig = prefill_config(
            size, group, max(16, power_of_two(head_dim)), kv_dtype, device, deterministic, rotated
        )
        self.groups = kv_heads
        self._queries = self.config.rows // group
        self.unit_count, self.units, self.positions = unit_count, units, positions
        # More programs than fit at once would find no work.
        at_once = _STATIC_PROGRAMS * num_sms(device) if not interpreted() else 3
        self.programs = min(size * kv_heads, at_once)

    def units_of(self, chunks: Sequence[Chunk], padding: tuple[int, int]) -> npt.NDArray[np.int32]:
        """Units of a step [n, UNIT_FIELDS], at most one for each of its tokens.

        ``padding``: the first query behind all chunks, and how many there are. Their results are zeros.
        """
        units = _units(chunks, self._queries, self.config.tile, self.window, self._attention_chunk)
        first, count = padding
        begin = np.arange(0, count, self._queries)
        empty = np.zeros((len(begin), UNIT_FIELDS), np.int32)
        empty[:, 0], empty[:, 1] = first + begin, np.minimum(self._queries, count - begin)
        return np.concatenate([units, empty])


def _units(
    chunks: Sequence[Chunk], queries: int, tile: int, window: int | None, attention_chunk: int | None
) -> npt.NDArray[np.int32]:
    """Units of ``queries`` neighbouring queries [n, UNIT_FIELDS], in descending order of context.

    All queries of a unit are in one attention chunk, and see it from its beginning on. So the kernel needs no mask for
    it.
    """
    if attention_chunk is not None:
        chunks = [piece for chunk in chunks for piece in _pieces(chunk, attention_chunk)]
    first, start, size, table = np.array(chunks, np.int64).reshape(-1, len(Chunk._fields)).T
    number = -(-size // queries)
    of = np.repeat(np.arange(len(number)), number)
    begin = (np.arange(len(of)) - (np.cumsum(number) - number)[of]) * queries
    count = np.minimum(queries, size[of] - begin)
    low = np.zeros_like(begin)
    if window is not None:
        low = np.maximum(start[of] + begin - window + 1, 0) // tile * tile
    if attention_chunk is not None:
        low = start[of] // attention_chunk * attention_chunk
    stop = start[of] + begin + count
    units = np.stack([first[of] + begin, count, table[of], low, stop], axis=1)
    return np.ascontiguousarray(units[np.argsort(low - stop, kind="stable")].astype(np.int32))


def _pieces(chunk: Chunk, attention_chunk: int) -> Iterator[Chunk]:
    """Cut a chunk of queries where attention chunks begin."""
    position, stop = chunk.start, chunk.start + chunk.size
    while position < stop:
        end = min(stop, (position // attention_chunk + 1) * attention_chunk)
        yield Chunk(chunk.first + position - chunk.start, position, end - position, chunk.table)
        position = end


def prefill_attention(
    q: torch.Tensor, layer: KVLayer, tables: torch.Tensor, plan: PrefillPlan | StaticPrefillPlan, *,
    out: torch.Tensor | None = None, scale: float | None = None, softcap: float | None = None,
    sinks: torch.Tensor | None = None, ring: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of the chunks of ``plan``, whose own K and V are in the pool already.

    q [tokens, heads, head_dim]; tables int32 [rows, blocks]. ``scale``: head_dim ** -0.5 by default. ``sinks`` [heads]:
    a logit of each query head that takes part in its softmax without a value. ``ring``: see ``decode_attention``.
    Returns ``out`` [tokens, heads, head_dim], of which only the chunks' rows are written.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    shape = check_attention(q, layer, tables, sinks)
    out = check_out(q, out)
    if len(plan.positions) > q.shape[0]:
        raise ValueError(f"the plan has queries up to row {len(plan.positions)}, q has {q.shape[0]}")
    run_prefill(
        q, layer, tables, out, shape, plan.config,
        positions=plan.positions, units=plan.units, num_units=plan.unit_count, programs=plan.programs,
        scale=scale, softcap=softcap, window=plan.window,
        split=DETERMINISTIC_SPLIT if plan.deterministic else 0, strict=plan.deterministic, sinks=sinks,
        ring=ring,
    )  # fmt: skip
    return out
