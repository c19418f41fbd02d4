"""Recurrent modules whose single tokens the CPU operations compute, and those that stay with PyTorch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.models.cpu_recurrence import find_recurrences
from pagewise_executor.models.recurrent import (
    PagedRecurrence,
    RecurrentContext,
    StateBatch,
)

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.models.recurrent_models import Squared, recurrent_model
from tests.model_builders import RECURRENT

COMPUTED = [
    "qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "nemotron_h", "granitemoehybrid", "falcon_h1", "bamba",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _kernels() -> None:
    need_cpu_kernels()


@pytest.mark.parametrize("family", RECURRENT)
def test_single_tokens_are_those_of_the_module(family: str, tmp_path: Path) -> None:
    model, layers = recurrent_model(family, tmp_path)
    found = find_recurrences(model, layers)
    assert list(found) == [layer.name for layer in layers if family in COMPUTED]
    context = RecurrentContext()
    for name, single in found.items():
        module: Any = model.get_submodule(name)
        layer = next(layer for layer in layers if layer.name == name)
        count, page = 5, 100
        per_block = -(-(layer.num_bytes + 4) // page)
        pages = torch.randperm(2 * count * per_block).int().view(2, count, per_block)
        states = torch.randn(len(pages[0]), per_block * page // 4).mul(0.5).view(torch.uint8)
        tokens = torch.tensor([[1], [2], [4], [5], [7]])
        context.batches = [StateBatch(tokens, pages[0], pages[1])]
        hidden = torch.randn(1, 8, model.config.hidden_size)
        results = []
        for one in (None, single):
            memory = torch.zeros(2 * count * per_block, page, dtype=torch.uint8)
            memory[pages[0]] = states.view(count, per_block, page)
            paged = PagedRecurrence(module, layer, context, one)
            paged.attach(memory, 4)
            with torch.no_grad():
                out = paged(hidden)[0, tokens[:, 0]]
            new = memory[pages[1]].flatten(1)[:, 4 : 4 + layer.num_bytes].contiguous().view(torch.float32)
            results.append((out, new))
        for expected, computed in zip(*results, strict=True):
            torch.testing.assert_close(computed, expected, atol=2e-5, rtol=2e-4)


def test_what_computes_otherwise_stays_with_pytorch(tmp_path: Path) -> None:
    model, layers = recurrent_model("qwen3_next", tmp_path)
    first, second, _ = (model.get_submodule(layer.name) for layer in layers)
    first.activation = "gelu"
    forward = second.in_proj_ba.forward
    second.in_proj_ba.forward = lambda x: forward(x).tanh()
    assert list(find_recurrences(model, layers)) == [layer.name for layer in layers[1:]], "a projection is any function"
    second.in_proj_ba.forward, second.norm = forward, Squared(second.norm)
    assert list(find_recurrences(model, layers)) == [layers[2].name]


def test_scaled_projections_stay_with_pytorch(tmp_path: Path) -> None:
    model, layers = recurrent_model("falcon_h1", tmp_path, ssm_multipliers=[0.5, 2.0, 0.3, 1.0, 0.7])
    assert not find_recurrences(model, layers)
