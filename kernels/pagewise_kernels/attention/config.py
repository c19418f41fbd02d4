"""The tile and the number of warps: one plain function per kind of attention, never keyed on the batch."""

from dataclasses import dataclass, replace

import torch

from pagewise_kernels.kv_layer import INT4
from pagewise_kernels.launch import interpreted, is_hopper, num_sms
from pagewise_kernels.shapes import power_of_two


@dataclass(slots=True, frozen=True)
class TileConfig:
    """``rows``: (query, head) rows of a tile; ``tile``: context tokens that are read at once.

    ``programs``: of decode attention, for each multiprocessor, which limits the registers of a thread (``run``).
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs: int = 2


DETERMINISTIC_SPLIT = 1024 if not interpreted() else 32
"""Context tokens that are summed up before they are merged, in deterministic mode."""


LARGEST_TILE = 128 if not interpreted() else 16
"""Attention chunks are multiples of it, so that each begins with a tile."""


def decode_config(
    group: int, dim: int, kv_dtype: torch.dtype, device: torch.device, deterministic: bool, rotated: int = 0
) -> TileConfig:
    """For one query per sequence: ``group`` query heads of ``dim`` (a power of two).

    ``rotated``: see ``latents``; 0: K and V are kept.
    """
    kv_bytes = kv_dtype.itemsize
    if rotated:
        return latent_config(1, group, kv_bytes, device)
    rows = max(16, power_of_two(group))
    if interpreted():
        return TileConfig(rows, 16, 4, 1)
    # Five stages are two buffers of K and V: block ids, and the pointers made of them, take the others.
    if deterministic:
        config = deterministic_config(group, dim, kv_bytes, device)
        return replace(config, num_stages=5) if dim <= 128 and kv_bytes < 4 else config
    if rows >= 64 and kv_bytes < 4:  # many heads share K and V: with four warps, sums do not fit into registers
        return TileConfig(rows, min(64, 8192 // dim), 8, 3, programs=1)
    # Two buffers of about 16 KiB of K and as much of V: three programs fit into the shared memory of Hopper, two into
    # that of other devices. Four bits become numbers of 16 bits there.
    tile = max(16, min(128, 16384 // (dim * (2 if kv_dtype == INT4 else kv_bytes))))
    if kv_bytes == 4:
        # Two buffers of heads of 512 take 97 KiB: but for Hopper, a multiprocessor has room for one program.
        one = dim > 256 and not is_hopper(device)
        return TileConfig(rows, tile, 8 if one else 4, 2, programs=1 if one else 2)
    return TileConfig(rows, tile, 4, 5, programs=3 if dim <= 128 and is_hopper(device) else 2)


def decode_configs(group: int) -> list[TileConfig]:
    """Candidates for decodes with heads of 128 in 16 bits, the default first, of which benchmarks find the fastest."""
    rows = max(16, power_of_two(group))
    return [TileConfig(rows, 64, 4, 5, 3), TileConfig(rows, 64, 4, 2, 3), TileConfig(rows, 64, 4, 5, 2)]


def prefill_config(
    longest: int, group: int, dim: int, kv_dtype: torch.dtype, device: torch.device, deterministic: bool,
    rotated: int = 0,
) -> TileConfig:  # fmt: skip
    """For chunks of which the longest has ``longest`` queries. ``rotated``: see ``decode_config``."""
    kv_bytes = kv_dtype.itemsize
    if rotated:
        return latent_config(longest, group, kv_bytes, device)
    smallest = max(16, power_of_two(group))
    if interpreted():
        return TileConfig(smallest, 16, 4, 1)
    if deterministic or kv_bytes == 4:  # without tensor cores registers are the limit
        return deterministic_config(group, dim, kv_bytes, device)
    if longest * group <= 64:
        rows = power_of_two(min(longest * group, 64 if dim <= 256 else 32))
        return TileConfig(max(smallest, rows), min(64, 8192 // dim), 4, 2)
    # Numbers of four bits are made in registers, of which products before Hopper take more.
    is_tight = kv_dtype == INT4 and not is_hopper(device)
    if dim <= 128:
        # Hopper has room for tiles of 128 tokens, which take a fifth fewer instructions per token than tiles of 64.
        # Float8 has to be converted, for which there are no registers left.
        tile = 128 if is_hopper(device) and kv_bytes == 2 else 32 if is_tight and dim > 64 else 64
        return TileConfig(max(smallest, 128), tile, 8, 3)
    # Four bits, whose numbers are made in registers, would spill 328 bytes per thread of larger tiles, and 848.
    if dim <= 256:
        rows = 128 if is_hopper(device) and kv_dtype != INT4 else 64
        return TileConfig(max(smallest, rows), 32, 8, 1 if is_tight else 2)
    if kv_dtype == INT4:
        return TileConfig(smallest, 16, 8, 2)
    # The queries alone take 64 KiB of shared memory in rows of 64, for which only Hopper has room beside K and V. With
    # float8, which is converted, 652 bytes per thread of these rows would be spilled.
    rows = 64 if is_hopper(device) and kv_bytes == 2 else 32
    return TileConfig(max(smallest, rows), 32 if is_hopper(device) else 16, 8, 2)


def deterministic_config(group: int, dim: int, kv_bytes: int, device: torch.device) -> TileConfig:
    """One shape for decode and prefill: the tensor cores sum in the same order for both."""
    if kv_bytes == 4:
        return TileConfig(max(16, power_of_two(group)), 32 if dim <= 128 else 16, 4, 2)
    if dim > 128:
        # Rows of 64, which Hopper's tensor cores want, spill: prefill keeps the sums of two stretches at a time.
        return TileConfig(max(32, power_of_two(group)), 64 if dim <= 256 else 16, 8, 2, programs=1)
    if is_hopper(device):
        # Four warps leave room for a second program, which loads while this one computes. Float8 would spill.
        warps = 4 if kv_bytes == 2 and group <= 64 else 8
        return TileConfig(max(64, power_of_two(group)), 64, warps, 2, programs=8 // warps)
    return TileConfig(max(32, power_of_two(group)), 64, 4, 2)


def decode_programs(device: torch.device, config: TileConfig) -> int:
    """Programs of the static grid of decode attention."""
    return config.programs * num_sms(device) if not interpreted() else 3


def latent_groups(heads: int, kv_bytes: int, device: torch.device) -> int:
    """Into how many groups the query heads of attention to latents are cut, each of which is a row of tiles."""
    most = 64 if is_hopper(device) and kv_bytes == 2 and not interpreted() else 16
    return next(count for count in range(1, heads + 1) if heads % count == 0 and heads // count <= most)


def latent_config(queries: int, group: int, kv_bytes: int, device: torch.device) -> TileConfig:
    """For attention to latents, of ``group`` query heads at once, each of up to ``queries`` neighbouring queries."""
    rows = max(16, power_of_two(group))
    if interpreted():
        return TileConfig(rows, 16, 4, 1)
    if kv_bytes == 4:
        return TileConfig(rows, 16, 8, 2, programs=1)
    if not is_hopper(device):
        return TileConfig(rows, 32, 4, 3)
    rows = max(rows, min(64, power_of_two(queries * group)))
    # Of fewer than 64 rows, warps share out the scores if a tile has more tokens than rows, or else each computes all.
    # With 64, two buffers of 64 tokens beside the queries take all of the shared memory.
    if rows == 64:
        return TileConfig(rows, 64, 8, 2 if queries > 1 else 3, programs=1)
    if rows == 32:
        return TileConfig(rows, 64, 8, 5, programs=1)
    return TileConfig(rows, 64, 4, 3)
