"""Finds out what waits for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """What waits for the CUDA device inside raises a RuntimeError that says so, as far as torch notices.

    The mode is of the whole process. Torch warns once that it is a prototype, after it has changed the mode: where
    warnings are errors, nobody would change it back.
    """
    before = torch.cuda.get_sync_debug_mode()
    try:
        _set_mode("error")
        yield
    finally:
        _set_mode(before)


def _set_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode(mode)
