"""Moves the KV of segments from their canonical position to where they stand in a sequence."""

from collections.abc import Sequence

import numpy as np
import torch
from pagewise_shared.protocol import SegmentMove, unpack_int32s

from pagewise_executor.input_batch import InputBatch, Int64s
from pagewise_executor.kv.kv_pool import FP8, KVPool, KVScales
from pagewise_executor.models.key_rotation import KeyRotation

_FP8_MOST = 448.0
_TOKENS_AT_ONCE = 8192
"""The most tokens that are moved at once: their keys of one layer take memory in float32 meanwhile."""


class SegmentMover:
    """Moves tokens between blocks of ``pool``. ``rotations``: of each layer's keys."""

    def __init__(self, pool: KVPool, rotations: Sequence[KeyRotation], *, triton: bool) -> None:
        self._pool, self._rotations, self._triton = pool, rotations, triton

    def move(self, moves: Sequence[SegmentMove], batch: InputBatch) -> None:
        """Carry out the moves of a step, which the batch has applied. No target is a source."""
        if not moves:
            return
        sources, targets, distances = _slots(moves, batch)
        for start in range(0, len(sources), _TOKENS_AT_ONCE):
            part = slice(start, start + _TOKENS_AT_ONCE)
            self._move(*(self._upload(one[part]) for one in (sources, targets, distances)))

    def _move(self, sources: torch.Tensor, targets: torch.Tensor, distances: torch.Tensor) -> None:
        pool, size = self._pool, self._pool.block_size
        source, target = (sources // size, sources % size), (targets // size, targets % size)
        angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for keys, values, scales, rotation in zip(pool.keys, pool.values, pool.scales, self._rotations, strict=True):
            number = rotation.frequencies.data_ptr()
            if number not in angles:
                angles[number] = rotation.angles(distances)
            cos, sin = angles[number]
            if scales is None:
                keys[target] = rotation.rotate(keys[source].float(), cos, sin).to(keys.dtype)
                values[target] = values[source]
            else:
                _move_fp8(keys, values, scales, source, target, rotation, cos, sin)

    def _upload(self, numbers: Int64s) -> torch.Tensor:
        return torch.from_numpy(numbers).to(self._pool.device, non_blocking=True)


def _slots(moves: Sequence[SegmentMove], batch: InputBatch) -> tuple[Int64s, Int64s, Int64s]:
    """Return source slot, target slot and distance of each token that is moved [n]."""
    size = batch.block_size
    sources, targets, distances = [], [], []
    for move in moves:
        positions = np.arange(move.start, move.stop)
        blocks = np.array(unpack_int32s(move.blocks), np.int64)
        canonical = positions - move.distance
        sources.append(blocks[canonical // size - move.first] * size + canonical % size)
        targets.append(batch.slot_mapping(np.full(len(positions), move.row), positions))
        distances.append(np.full(len(positions), move.distance))
    return np.concatenate(sources), np.concatenate(targets), np.concatenate(distances)


_Index = tuple[torch.Tensor, torch.Tensor]


def _move_fp8(
    keys: torch.Tensor,
    values: torch.Tensor,
    scales: KVScales,
    source: _Index,
    target: _Index,
    rotation: KeyRotation,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """The same for float8 with scales: keys are rotated in float32 and scaled anew, as ``write_kv`` does."""
    wide = keys.view(torch.uint8)[source].view(FP8).float() * scales.keys[source][..., None]
    wide = rotation.rotate(wide, cos, sin)
    scale = wide.abs().amax(-1).clamp(min=1e-12) / _FP8_MOST
    keys.view(torch.uint8)[target] = (wide / scale[..., None]).to(FP8).view(torch.uint8)
    scales.keys[target] = scale
    values.view(torch.uint8)[target] = values.view(torch.uint8)[source]
    scales.values[target] = scales.values[source]
