"""Shapes: arithmetic, and the checks of rows of logits."""

import torch


def power_of_two(value: int) -> int:
    """The smallest power of two that is at least ``value``."""
    return 1 << max(0, value - 1).bit_length()


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """Rows and vocabulary of ``logits``.

    Raises:
        ValueError: they are no rows, or too long.
    """
    if logits.dim() != 2 or logits.stride(1) != 1 or not 1 <= logits.shape[1] < 1 << 24:
        raise ValueError(f"logits are [rows, vocab] with contiguous rows, not {list(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def check_rows(name: str, tensor: torch.Tensor, rows: int, dtype: torch.dtype) -> None:
    """Raises ValueError or TypeError if ``tensor`` has not one value of ``dtype`` for each row."""
    if tensor.shape != (rows,):
        raise ValueError(f"{name} has one value for each of {rows} rows, not {list(tensor.shape)}")
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {dtype}, not {tensor.dtype}")
