"""Captures of CUDA graphs, and the detection of calls that wait for the device."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

_BYTES_PER_KERNEL = 64 * 2**10
"""Memory of a graph for each kernel, by a measurement with CUDA 11.2 (forums.developer.nvidia.com/t/244901)."""
_KERNELS_PER_LAYER = 10
"""About the number of kernels of a fused layer in a decode step."""
BYTES_PER_LAYER = _KERNELS_PER_LAYER * _BYTES_PER_KERNEL
"""About the memory of a graph for each layer of the model."""


class Graphs(Protocol):
    """Graphs that are to be captured."""

    @property
    def num_graphs(self) -> int:
        """How many there will be."""


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture the launches within into ``graph``, whose memory comes from ``pool``; None: from a pool of its own.

    Calls of this thread alone can fail the capture, because threads of the host tier use the device as well. After a
    failure nothing has run on the device, and this thread has its former stream, which torch may not restore.

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
    """Return the reason of a failed capture, with the options that may help."""
    reason = f"capturing them failed ({str(error).partition(chr(10))[0]})"
    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        reason += "; --gpu-memory-utilization or --kv-memory may leave them more memory"
    return reason


def graphs_bytes(graphs: Graphs | None, num_layers: int) -> int:
    """Return an estimate of the device memory of graphs beside the results of their kernels, in bytes.

    It has not been compared with a device. ``num_layers``: of the model.
    """
    return 0 if graphs is None else graphs.num_graphs * num_layers * BYTES_PER_LAYER


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Let calls within that wait for the CUDA device raise a RuntimeError, as far as torch detects them.

    The mode is of the whole process. After the change torch warns once that it is a prototype: where warnings are
    errors, this would end the change back.
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
