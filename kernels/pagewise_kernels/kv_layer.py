"""K and V of one layer of the KV pool, as kernels take them."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

FP8, INT8, INT4 = torch.float8_e4m3fn, torch.int8, torch.bits4x2
GROUP, RECORD = 32, 20
"""In four bits, the numbers of a key or value that share a step and a zero, and the bytes that they take with these."""
_SLOT_TYPES = (torch.int32, torch.int64)


class Scales(NamedTuple):
    """Scales of KV in eight bits, by token, head: ``keys``, ``values`` float32 [num_blocks, block_size, kv_heads]."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True, eq=False)
class KVLayer:
    """``keys`` and ``values`` [num_blocks, block_size, kv_heads, head_dim], of equal strides; scales of eight bits.

    In four bits (``INT4``) the last dimension has the bytes of a head: its records of ``GROUP`` numbers.

    A layer of latents (MLA) keeps one vector per token: ``values`` are views of the last ``latent`` elements of each
    key, so that writing the keys writes them as well. In other layers ``latent`` is 0. There the end of a key and the
    beginning of its value may be the same ``shared`` elements, to which both write the same numbers.

    They are checked here, once for a pool, and not at each launch. ``pointers``: keys and values as Triton kernels take
    them, in four bits as words of 32 bits; ``strides``: of a block, a token and a head there. ``scale_strides``: the
    same of the scales, or zeros. ``scale_pointers``: the scales, or placeholders.

    Raises:
        ValueError: shapes, strides or devices do not fit. TypeError: types do not.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: Scales | None = None
    block_size: int = field(init=False)
    kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    latent: int = field(init=False)
    shared: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    strides: tuple[int, ...] = field(init=False)
    pointers: tuple[torch.Tensor, torch.Tensor] = field(init=False)
    scale_strides: tuple[int, ...] = field(init=False)
    scale_pointers: Scales = field(init=False)

    def __post_init__(self) -> None:
        keys, values = self.keys, self.values
        if (
            keys.dim() != 4
            or (keys.shape[:3], keys.device) != (values.shape[:3], values.device)
            or (keys.shape[3] < values.shape[3])
        ):
            raise ValueError(
                "keys and values are [num_blocks, block_size, kv_heads, head_dim] on one device, not "
                f"{list(keys.shape)} on {keys.device} and {list(values.shape)} on {values.device}"
            )
        if keys.stride() != values.stride() or keys.stride(3) != 1:
            raise ValueError(
                "keys and values have equal strides, and the elements of a head lie next to each other, not "
                f"{keys.stride()} and {values.stride()}"
            )
        if keys.dtype != values.dtype or (keys.dtype in (FP8, INT8)) != (self.scales is not None):
            raise TypeError(
                "keys and values are of one type, and KV in eight bits comes with scales, and no other KV does, not "
                f"{keys.dtype} and {values.dtype}{', with scales' if self.scales else ''}"
            )
        _, self.block_size, self.kv_heads, self.head_dim = keys.shape
        if keys.dtype == INT4:
            if self.head_dim % RECORD or values.shape != keys.shape:
                raise ValueError(f"a head in four bits has records of {RECORD} bytes, not {list(keys.shape)}")
            self.head_dim = self.head_dim // RECORD * GROUP
        size = keys.shape[3]
        self.latent = values.shape[3] if values.shape[3] < size else 0
        distance = (values.data_ptr() - keys.data_ptr()) // keys.itemsize
        self.shared = size - distance if not self.latent and 0 < distance < size else 0
        self.pointers = (keys.view(torch.int32), values.view(torch.int32)) if keys.dtype == INT4 else (keys, values)
        self.dtype, self.strides, self.scale_strides = keys.dtype, self.pointers[0].stride()[:3], (0, 0, 0)
        self.scale_pointers = Scales(*self.pointers)
        if self.scales is not None:
            _check_scales(self.scales, keys)
            self.scale_pointers, self.scale_strides = self.scales, self.scales.keys.stride()

    def check_new(self, new: torch.Tensor, slots: torch.Tensor) -> None:
        """Check that ``new`` [tokens, kv_heads, head_dim] can be written to ``slots`` [tokens].

        Raises:
            ValueError: shapes or strides do not fit. TypeError: types do not.
        """
        if new.dim() != 3 or new.shape[1:] != (self.kv_heads, self.head_dim) or slots.shape != new.shape[:1]:
            raise ValueError(
                f"new keys and values {list(new.shape)} do not go into a pool {list(self.keys.shape)} by slots "
                f"{list(slots.shape)}"
            )
        if new.stride(2) != 1:
            raise ValueError("the elements of a head lie next to each other in new keys and values")
        check_slots(slots)
        if self.dtype not in (new.dtype, FP8, INT8, INT4):
            raise TypeError(f"a pool of {self.dtype} does not take {new.dtype}")


def _check_scales(scales: Scales, keys: torch.Tensor) -> None:
    """Check the scales of ``keys`` in eight bits, and whether the device knows their type.

    Raises:
        ValueError: shapes, types, strides or devices do not fit.
    """
    is_fp8 = keys.device.type == "cuda" and keys.dtype == FP8
    if is_fp8 and (found := torch.cuda.get_device_capability(keys.device)) < (8, 9):
        raise ValueError(f"float8 KV needs compute capability 8.9, {keys.device} has {found}")
    for scale in scales:
        if (scale.shape, scale.dtype, scale.device) != (keys.shape[:3], torch.float32, keys.device):
            raise ValueError(
                f"scales are float32 {list(keys.shape[:3])} on {keys.device}, not {scale.dtype} {list(scale.shape)} on "
                f"{scale.device}"
            )
    if scales.keys.stride() != scales.values.stride():
        raise ValueError(f"scales have equal strides, not {scales.keys.stride()} and {scales.values.stride()}")


def check_slots(*slots: torch.Tensor) -> None:
    """Raise TypeError if slots are not int32 or int64."""
    if wrong := [each.dtype for each in slots if each.dtype not in _SLOT_TYPES]:
        raise TypeError(f"slots are int32 or int64, not {wrong[0]}")
