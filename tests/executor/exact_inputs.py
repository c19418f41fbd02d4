"""Models in four bits whose inputs stay in float32, to compare them with exact ones."""

import functools

import pytest
from pagewise_executor.models.cpu_operations import CpuOperations
from pagewise_executor.models.operations import Operations
from pagewise_kernels.cpu.linear_grouped import WeightInGroups
from pagewise_kernels.cpu.quantised_experts import QuantisedExperts


def keep_inputs_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let linear layers and experts not round their inputs, and layers compute one by one."""
    monkeypatch.setattr(WeightInGroups, "linear", functools.partialmethod(WeightInGroups.linear, exact=True))
    monkeypatch.setattr(QuantisedExperts, "exact", True)
    for part in ("layers", "attention", "feed_forward"):
        monkeypatch.setattr(CpuOperations, part, getattr(Operations, part))
