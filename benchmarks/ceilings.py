"""The highest rates of a GPU, which benchmarks measure in the same run as the rates that they compare with them."""

import statistics

import torch

_BYTES, _COPIES = 2**31, 20


def copy_bandwidth() -> float:
    """Return the bytes per second that a copy inside the GPU reads and writes, a median; 0 without a GPU.

    Each copy is launched by itself. Inside a CUDA graph, where it becomes a node of another kind, the same copy reached
    2,770 GB/s on an H200 on which this function measured 4,188, and kernels seemed to be faster than the limit.
    """
    if not torch.cuda.is_available():
        return 0.0
    source = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(_COPIES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return 2 * _BYTES / float(statistics.median(times))
