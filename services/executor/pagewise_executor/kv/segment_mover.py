"""Moves the KV of segments from their canonical position to their position in a sequence, by rotating the keys."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from pagewise_shared.protocol import SegmentMove, unpack_int32s

from pagewise_executor.input_batch import InputBatch
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.step_work import Int64s

_TOKENS_AT_ONCE = 8192
"""The most tokens that are moved at once: their keys of one layer take memory in float32 meanwhile."""


class KeyRotation(NamedTuple):
    """RoPE (arXiv 2104.09864) of one layer's keys.

    ``frequencies``: float32 [pairs], radians per position, of the first ``2 * pairs`` elements of a head; empty: the
    keys of this layer know no positions. ``interleaved``: the elements of a pair are adjacent, else ``pairs`` elements
    apart.
    """

    frequencies: torch.Tensor
    interleaved: bool = False

    def angles(self, distances: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin [n, pairs] float32 for distances [n]."""
        # In float64: the product of a large distance and a frequency would lose digits of the angle.
        angles = distances[:, None].double() * self.frequencies.double()
        return angles.cos().float(), angles.sin().float()

    def rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return keys float32 [n, heads, head_dim], rotated by cos and sin [n, pairs]."""
        pairs = cos.shape[1]
        if not pairs:
            return keys
        cos, sin = cos[:, None], sin[:, None]
        if self.interleaved:
            first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        else:
            first, second = slice(0, pairs), slice(pairs, 2 * pairs)
        rotated = keys.clone()
        rotated[..., first] = keys[..., first] * cos - keys[..., second] * sin
        rotated[..., second] = keys[..., second] * cos + keys[..., first] * sin
        return rotated


class SegmentMover:
    """Moves tokens between blocks of ``pool``. ``rotations``: of each layer's keys."""

    def __init__(self, pool: KVPool, rotations: Sequence[KeyRotation], *, triton: bool) -> None:
        self._pool, self._rotations, self._triton = pool, rotations, triton

    def warm_up(self) -> None:
        """Compile the kernels by moving one token; the pool holds no KV yet."""
        if self._rotations and self._pool.num_blocks * self._pool.block_size > 1:
            self._move(*(torch.tensor([number], device=self._pool.device) for number in (0, 1, 1)))

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
        for layer, rotation in zip(pool.layers, self._rotations, strict=True):
            number = rotation.frequencies.data_ptr()
            if number not in angles:
                angles[number] = rotation.angles(distances)
            cos, sin = angles[number]
            if self._triton and not layer.latent:
                from pagewise_kernels.segment_move import move_tokens

                move_tokens(layer, sources, targets, cos, sin, interleaved=rotation.interleaved)
            else:  # latents, whose values are parts of the keys; float8 is moved by the Triton kernel
                keys, scales = layer.keys[source].float(), layer.scales
                if scales is None:
                    keys = rotation.rotate(keys, cos, sin)
                else:  # int8: keys are scaled anew
                    keys = rotation.rotate(keys * scales.keys[source][..., None], cos, sin)
                    own = keys.abs().amax(-1).clamp_min(1e-12) / 127
                    keys, scales.keys[target] = (keys / own[..., None]).round(), own
                    scales.values[target] = scales.values[source]
                layer.keys[target] = keys.to(layer.dtype)
                layer.values[target] = layer.values[source]

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
