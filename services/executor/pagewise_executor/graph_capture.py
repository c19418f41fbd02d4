"""Captures of CUDA graphs, and what waits for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_BYTES_PER_KERNEL = 64 * 2**10
"""What a graph takes for each kernel, as somebody measured with CUDA 11.2 (forums.developer.nvidia.com/t/244901)."""
_KERNELS_PER_LAYER = 10
"""About so many a layer of a decode step is, where it is fused."""
BYTES_PER_LAYER = _KERNELS_PER_LAYER * _BYTES_PER_KERNEL
"""About what a graph takes for each layer of the model."""


class Graphs(Protocol):
    """Graphs that are to be captured."""

    @property
    def num_graphs(self) -> int:
        """How many there will be."""


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched within into ``graph``, whose memory comes from ``pool``; None: from one of its own.

    Only what this thread does may spoil the capture: those of the host tier use the device as well. If it fails,
    nothing has run on the device, and what this thread launches next goes where it went before: torch ends a capture
    before it gives the stream back, and does not give it back if that fails.

    Raises:
        RuntimeError: the capture fails.
    """
    stream = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    except BaseException:
        torch.cuda.set_stream(stream)
        raise


def why_failed(error: RuntimeError) -> str:
    """Return what to say of graphs whose capture has failed."""
    reason = f"capturing them failed ({str(error).partition(chr(10))[0]})"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        reason += "; --gpu-memory-utilization or --kv-memory may leave them more memory"
    return reason


def graphs_bytes(graphs: Graphs | None, num_layers: int) -> int:
    """Return about how many bytes of device memory graphs of steps take beside the results of their kernels.

    This is an estimate, and has not been compared with a device. ``num_layers``: of the model.
    """
    return 0 if graphs is None else graphs.num_graphs * num_layers * BYTES_PER_LAYER


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
