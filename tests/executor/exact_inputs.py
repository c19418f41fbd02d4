"""Models in four bits whose inputs stay in float32, to compare them with exact ones."""

import functools

import pytest
from pagewise_executor.models.cpu_operations import CpuOperations
from pagewise_executor.models.operations import Operations
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.linear_int4 import Int4Weight


def keep_inputs_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the linear layers not round their inputs, and compute one by one."""
    for weight in (GroupedWeight, Int4Weight):
        monkeypatch.setattr(weight, "linear", functools.partialmethod(weight.linear, exact=True))
    for half in ("attention", "feed_forward"):
        monkeypatch.setattr(CpuOperations, half, getattr(Operations, half))
