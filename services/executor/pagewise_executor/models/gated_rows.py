"""Decides up to how many tokens gate, up and their activation are one kernel: measured when the executor starts.

The kernel saves a launch and a pass over memory in each layer. Whether its product is as fast as the library's, only
the device can tell. CUDA graphs are timed, because that is how decode steps run.
"""

import logging
import statistics
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pagewise_executor.graph_capture import captured
from pagewise_executor.models.fused import FusedDecoderLayer
from pagewise_executor.models.operations import TritonOperations

log = logging.getLogger(__name__)

_ROWS = (16, 32, 64)
"""The sizes of its tile. A batch takes as long as the largest one of the same tile."""
_REPEATS = 7

Time = Callable[[Callable[[], None]], float]
"""Measures a call."""


@torch.inference_mode()
def choose_gated_rows(model: nn.Module, operations: TritonOperations, time: Time | None = None) -> None:
    """Set ``operations.gated_rows`` to the largest batch up to which the kernel is not slower than two kernels.

    All layers are computed one after the other, so that weights come from memory as they do in a step. ``time``: what
    measures, by default replays of a CUDA graph. If they cannot be measured, they stay two kernels, and the log says
    so.
    """
    layers = [module.gate_up for module in model.modules() if isinstance(module, FusedDecoderLayer)]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    if not plain:
        return
    try:
        operations.gated_rows = _most_rows(plain, operations, time or graph_milliseconds)
    except Exception as error:  # whatever torch, Triton or the device raise
        operations.gated_rows = 0
        log.warning("gate, up and their activation are two kernels: they could not be measured (%s)", error)
        return
    log.info("gate, up and their activation are one kernel up to %d tokens", operations.gated_rows)


def _most_rows(layers: Sequence[nn.Linear], operations: TritonOperations, time: Time) -> int:
    most = 0
    for rows in _ROWS:
        x = layers[0].weight.new_zeros(rows, layers[0].in_features)

        def compute(x: torch.Tensor = x) -> None:
            for layer in layers:
                operations.gated(layer, x)

        operations.gated_rows = 0
        two = time(compute)
        operations.gated_rows = rows
        one = time(compute)
        log.debug("gate and up of %d tokens: %.3f ms as one kernel, %.3f as two", rows, one, two)
        if one > two:
            break
        most = rows
    return most


def graph_milliseconds(call: Callable[[], None]) -> float:
    """Return the median time of a call as a CUDA graph."""
    call()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        call()
    times = []
    for _ in range(_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return float(statistics.median(times))
