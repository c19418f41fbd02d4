"""Cascade attention: decodes that share a prefix read it once, all of them together, and then each its own rest.

After Hydragen (Juravsky et al., arXiv 2402.05099) and FlashInfer's cascade inference: attention over two stretches of a
context is merged from the two by the weights of their softmaxes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from pagewise_kernels.attention.checks import Scales, check_attention, check_out
from pagewise_kernels.attention.config import decode_config, decode_programs, prefill_config
from pagewise_kernels.attention.decode import merge_parts
from pagewise_kernels.attention.kernel import UNIT_FIELDS
from pagewise_kernels.attention.run import run_attention
from pagewise_kernels.shapes import power_of_two


class SharedPrefix(NamedTuple):
    """The first ``tokens`` tokens of the contexts of ``queries`` lie in the same blocks."""

    queries: Sequence[int]
    tokens: int


class CascadePlan:
    """How decodes with shared prefixes are shared out among programs; made on the host, for one step.

    Args:
        lengths: context tokens of each query, the new one included, at least 1. rows: its row of the block tables.
        prefixes: what is shared; each query is in at most one of them. heads, kv_heads, head_dim: of the model.

    Raises:
        ValueError: a prefix is longer than a context it is said to begin, or a query is in two of them.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[int],
        prefixes: Sequence[SharedPrefix],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        group, dim = heads // kv_heads, max(16, power_of_two(head_dim))
        widest = max((len(prefix.queries) for prefix in prefixes), default=1)
        self.num_queries = len(lengths)
        self.shared_config = prefill_config(widest, group, dim, kv_dtype.itemsize, device, deterministic=False)
        self.own_config = decode_config(group, dim, kv_dtype.itemsize, device, deterministic=False)
        self.programs = decode_programs(device)
        begin = _begin_of_own(lengths, prefixes)
        tile = self.own_config.tile
        total = sum(length - start for length, start in zip(lengths, begin, strict=True))
        total += sum(prefix.tokens * -(-len(prefix.queries) * group // self.shared_config.rows) for prefix in prefixes)
        # Parts of such a size that all programs have about two units, in whole tiles of either kind.
        largest = max(tile, self.shared_config.tile)
        size = max(1, -(-total * kv_heads // (2 * self.programs * largest))) * largest
        self._num_parts = np.zeros(len(lengths), np.int32)
        order: list[int] = []
        shared: list[tuple[int, ...]] = []
        for prefix in prefixes:
            shared += self._units_of(prefix, rows, len(order), self.shared_config.rows // group, size)
            order += prefix.queries
        own = []
        for query, (length, start) in enumerate(zip(lengths, begin, strict=True)):
            for low in range(start // tile * tile, length, size):
                part = int(self._num_parts[query])
                own.append((query, 1, rows[query], max(low, start), min(low + size, length), part))
                self._num_parts[query] += 1
        first_parts = np.cumsum(self._num_parts) - self._num_parts
        self._upload(
            device,
            num_shared=np.array([len(shared)]),
            num_own=np.array([len(own)]),
            shared=np.array(shared, np.int32).reshape(-1, UNIT_FIELDS),
            own=np.array(own, np.int32).reshape(-1, UNIT_FIELDS),
            order=np.array(order, np.int32),
            positions=np.array(lengths) - 1,
            first_parts=first_parts,
            num_parts=self._num_parts,
        )
        count = int(self._num_parts.sum())
        self.parts = torch.empty(count, heads, head_dim, dtype=torch.float32, device=device)
        self.part_highs = torch.empty(count, heads, dtype=torch.float32, device=device)

    def _units_of(
        self, prefix: SharedPrefix, rows: Sequence[int], first: int, queries: int, size: int
    ) -> list[tuple[int, ...]]:
        units: list[tuple[int, ...]] = []
        count = -(-prefix.tokens // size)
        for start in range(0, len(prefix.queries), queries):
            number = min(queries, len(prefix.queries) - start)
            for part in range(count):
                stop = min((part + 1) * size, prefix.tokens)
                units.append((first + start, number, rows[prefix.queries[0]], part * size, stop, part))
        self._num_parts[list(prefix.queries)] = count
        return units

    def _upload(self, device: torch.device, **arrays: npt.NDArray[np.int32]) -> None:
        """Bring all arrays to the device in one copy; each becomes an attribute, flat."""
        packed = np.concatenate([array.ravel() for array in arrays.values()]).astype(np.int32)
        on_device = torch.from_numpy(packed).to(device, non_blocking=True)
        sizes = [array.size for array in arrays.values()]
        self.on_device = dict(zip(arrays, on_device.split(sizes), strict=True))


def _begin_of_own(lengths: Sequence[int], prefixes: Sequence[SharedPrefix]) -> list[int]:
    """Where each query's own context begins."""
    begin = [0] * len(lengths)
    for prefix in prefixes:
        for query in prefix.queries:
            if begin[query]:
                raise ValueError(f"query {query} is in two shared prefixes")
            if not 0 < prefix.tokens < lengths[query]:
                raise ValueError(f"a prefix of {prefix.tokens} tokens does not begin a context of {lengths[query]}")
            begin[query] = prefix.tokens
    return begin


def cascade_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    plan: CascadePlan,
    *,
    out: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    scales: Scales | None = None,
) -> torch.Tensor:
    """What ``decode_attention`` computes, reading each shared prefix of ``plan`` once for many queries.

    q [queries, heads, head_dim]; keys, values [num_blocks, block_size, kv_heads, head_dim], any strides but the last;
    tables int32 [rows, blocks]. Worth it from about 8 queries that share 256 tokens on. Returns ``out``, like q.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """
    shape = check_attention(q, keys, values, tables, scales)
    out = check_out(q, out)
    if q.shape[0] != plan.num_queries or plan.parts.shape[1:] != q.shape[1:]:
        raise ValueError(
            f"the plan is for {plan.num_queries} queries of {list(plan.parts.shape[1:])}, q is {list(q.shape)}"
        )
    held = plan.on_device
    for config, units, count, order in (
        (plan.shared_config, held["shared"], held["num_shared"], held["order"]),
        (plan.own_config, held["own"], held["num_own"], None),
    ):
        run_attention(
            q, keys, values, tables, out, shape, config,
            positions=held["positions"], units=units, num_units=count, programs=plan.programs,
            parts=(plan.parts, plan.part_highs, held["first_parts"]),
            scale=scale, softcap=softcap, window=None, scales=scales, order=order,
        )  # fmt: skip
    merge_parts(out, plan.parts, plan.part_highs, held["first_parts"], held["num_parts"], even_one=True)
    return out
