"""Which tile, how many warps: one plain function per kind of attention, never keyed on the batch."""

from dataclasses import dataclass

import torch

from pagewise_kernels.launch import interpreted, is_hopper, num_sms
from pagewise_kernels.shapes import power_of_two


@dataclass(slots=True, frozen=True)
class TileConfig:
    """``rows``: (query, head) rows of a tile; ``tile``: context tokens that are read at once.

    ``programs``: of decode attention, for each multiprocessor.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs: int = 2


DETERMINISTIC_SPLIT = 1024 if not interpreted() else 32
"""Context tokens that are summed up before they are merged, in deterministic mode."""


def decode_config(group: int, dim: int, kv_bytes: int, device: torch.device, deterministic: bool) -> TileConfig:
    """For one query per sequence: ``group`` query heads of ``dim`` (a power of two), KV of ``kv_bytes`` an element."""
    rows = max(16, power_of_two(group))
    if interpreted():
        return TileConfig(rows, 16, 4, 1)
    if deterministic:
        return deterministic_config(group, dim, kv_bytes, device)
    # About 16 KiB of K per stage keeps enough bytes in flight with two programs on a multiprocessor.
    tile = max(16, min(128, 16384 // (dim * kv_bytes)))
    # Five stages are two buffers of K and V: block ids, and the pointers made of them, take the others.
    return TileConfig(rows, tile, 4, 5 if kv_bytes < 4 else 3)


def decode_configs(group: int) -> list[TileConfig]:
    """What may be fastest for decodes with heads of 128 in 16 bits, the default first: for benchmarks to find out."""
    rows = max(16, power_of_two(group))
    return [TileConfig(rows, 64, 4, 5, 2), TileConfig(rows, 64, 2, 5, 3), TileConfig(rows, 128, 4, 5, 1)]


def prefill_config(
    longest: int, group: int, dim: int, kv_bytes: int, device: torch.device, deterministic: bool
) -> TileConfig:
    """For chunks of which the longest has ``longest`` queries."""
    smallest = max(16, power_of_two(group))
    if interpreted():
        return TileConfig(smallest, 16, 4, 1)
    if deterministic:
        return deterministic_config(group, dim, kv_bytes, device)
    if kv_bytes == 4:  # no tensor cores: registers are the limit
        return TileConfig(smallest, 32 if dim <= 128 else 16, 4, 2)
    if longest * group <= 64:
        rows = power_of_two(min(longest * group, 64))
        return TileConfig(max(smallest, rows), 64 if dim <= 128 else 32, 4, 2)
    if dim <= 128:
        return TileConfig(max(smallest, 128), 64, 8, 3)
    return TileConfig(max(smallest, 128 if is_hopper(device) else 64), 32, 8, 2)


def deterministic_config(group: int, dim: int, kv_bytes: int, device: torch.device) -> TileConfig:
    """One shape for decode and prefill: the tensor cores sum in the same order for both."""
    if kv_bytes == 4:
        return TileConfig(max(16, power_of_two(group)), 32 if dim <= 128 else 16, 4, 2)
    rows = 64 if is_hopper(device) else 32
    return TileConfig(max(rows, power_of_two(group)), 64 if dim <= 128 else 32, 4, 2)


def decode_programs(device: torch.device, config: TileConfig) -> int:
    """Programs of the static grid of decode attention."""
    return config.programs * num_sms(device) if not interpreted() else 3
