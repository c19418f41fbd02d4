"""How many CPU threads torch uses."""

import torch
from pagewise_shared.cpu_threads import available_cores


def set_cpu_threads(threads: int | None) -> int:
    """Give torch ``threads`` threads, or as many as this process has cores of its own; return the number."""
    count = threads or available_cores()
    torch.set_num_threads(count)
    return count
