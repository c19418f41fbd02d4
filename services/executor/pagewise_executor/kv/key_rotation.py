"""The rotation of keys by their position, with which KV moves to another position."""

from typing import NamedTuple

import torch


class KeyRotation(NamedTuple):
    """RoPE (arXiv 2104.09864) of one layer's keys.

    ``frequencies``: float32 [pairs], radians per position, of the first ``2 * pairs`` elements of a head; empty: the
    keys of this layer know no positions. ``interleaved``: a pair lies side by side, else ``pairs`` elements apart.
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
