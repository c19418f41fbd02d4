"""Shapes: arithmetic, and the rule by which functions check the tensors that they are called with."""

from collections.abc import Collection

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)

Wanted = tuple[torch.Tensor | None, tuple[str, ...], Collection[torch.dtype]]
"""An argument, None if it is left out; the names of its dimensions; the types that it may have."""


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def check_tensors(function: str, sizes: dict[str, int] | None = None, /, **wanted: Wanted) -> None:
    """Check the arguments of ``function``: a name of a dimension stands for one size in all of them, and the elements
    of the last dimension lie next to each other. ``sizes``: of dimensions, as far as they are known.

    Raises:
        ValueError: a shape or a stride does not fit. TypeError: a type does not.
    """
    known = {} if sizes is None else sizes
    for name, (tensor, dimensions, types) in wanted.items():
        if tensor is None:
            continue
        shape = tensor.shape
        # Every launch comes here, so sizes are compared without a loop in Python.
        if len(shape) != len(dimensions) or shape != tuple(map(known.setdefault, dimensions, shape)):
            dims = ", ".join(f"{size} = {known[size]}" if size in known else size for size in dimensions)
            others = ", ".join(
                f"{other} {list(each[0].shape)}" for other, each in wanted.items() if each[0] is not None
            )
            raise ValueError(f"{function} takes {name} [{dims}], not {list(shape)}; given are {others}")
        if tensor.stride(-1) != 1 and shape[-1] > 1:
            raise ValueError(f"{function} takes a contiguous last dimension, {name} has strides {tensor.stride()}")
        if tensor.dtype not in types:
            raise TypeError(f"{function} takes {name} in {' or '.join(map(str, types))}, not {tensor.dtype}")


def check_contiguous(function: str, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError if one of the tensors is not contiguous as a whole."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{function} takes a contiguous {name}, not one with strides {tensor.stride()}")


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Rows and vocabulary of ``logits``.

    Raises:
        ValueError: they are no rows, or too long.
    """
    if logits.dim() != 2 or logits.stride(1) != 1 or not 1 <= logits.shape[1] < 1 << 24:
        raise ValueError(f"logits are [rows, vocab] with contiguous rows, not {list(logits.shape)}")
    return logits.shape[0], logits.shape[1]
