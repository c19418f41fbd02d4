"""The results that a check yields: a kernel's beside PyTorch's."""

from typing import NamedTuple

import torch
from pagewise_kernels.kv_layer import FP8, INT4, INT8

TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2, FP8: 8e-2, INT8: 5e-2, INT4: 0.25}
"""The most by which a result may differ from PyTorch's, as a part of the largest value. Kernels that work stay below a
quarter of it; one that reads another token, head or tile is wrong by about 1."""


class Compared(NamedTuple):
    """A result of a kernel, PyTorch's, and how far they may be apart, as a part of the largest value; 0: not at all."""

    found: torch.Tensor
    expected: torch.Tensor
    tolerance: float = 0.0
