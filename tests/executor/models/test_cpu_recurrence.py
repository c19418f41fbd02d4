"""Recurrent modules that the CPU operations compute, and modules that PyTorch computes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.models.cpu_recurrence import CpuRecurrence, find_recurrences
from pagewise_executor.models.packed_linear import pack_linears
from pagewise_executor.models.recurrent import (
    PagedRecurrence,
    RecurrentContext,
    RecurrentLayer,
    StateBatch,
)

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.models.recurrent_models import Squared, recurrent_model
from tests.model_builders import RECURRENT


@pytest.fixture(autouse=True)
def _kernels() -> None:
    need_cpu_kernels()


class Steps:
    """Sequences with states in the pages of blocks, which a layer with ``operation`` computes, or without one."""

    def __init__(self, module: Any, layer: RecurrentLayer, size: int) -> None:
        self.module, self.layer, page = module, layer, 100
        self.count, self.per_block = 5, -(-(layer.num_bytes + 4) // page)
        self.pages = torch.randperm(2 * self.count * self.per_block).int().view(2, self.count, self.per_block)
        self.memory = torch.zeros(2 * self.count * self.per_block, page, dtype=torch.uint8)
        self.hidden = torch.randn(1, 64, size)
        self.held = [torch.randn(self.count, *state.shape).mul(0.5).to(state.dtype) for state in layer.states]

    def compute(
        self, operation: CpuRecurrence | None, module: Any, sizes: tuple[int, ...], dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Outputs and states. Batches of as many tokens of three sequences that go on, and of two that begin."""
        context, memory = RecurrentContext(), self.memory.clone()
        paged = PagedRecurrence(module, self.layer, context, operation)
        paged.attach(memory, 4)
        for place, held in zip(paged._places, self.held, strict=True):
            place.store(memory, self.pages[0], held)
        order, batches = torch.randperm(64, generator=torch.Generator().manual_seed(0)), []
        for size in sizes:
            for begins, rows in ((False, slice(0, 3)), (True, slice(3, 5))):
                count = rows.stop - rows.start
                tokens, order = order[: count * size].view(count, size), order[count * size :]
                read = None if begins else self.pages[0, rows]
                batches.append(StateBatch(tokens, read, self.pages[1, rows]))
        context.batches = batches
        with torch.no_grad():
            out = paged(self.hidden.to(dtype))[0]
        computed = torch.cat([batch.tokens.flatten() for batch in batches])
        return [out[computed].float(), *(place.load(memory, self.pages[1]).float() for place in paged._places)]


@pytest.mark.parametrize("family", RECURRENT)
def test_tokens_are_those_of_the_module(family: str, tmp_path: Path) -> None:
    model, layers = recurrent_model(family, tmp_path)
    found = find_recurrences(model, layers)
    assert list(found) == [layer.name for layer in layers]
    for layer in layers:
        operation, module = found[layer.name], model.get_submodule(layer.name)
        assert operation.chunks
        steps = Steps(module, layer, model.config.hidden_size)
        for sizes in ((1,), (2,), (9,)):
            expected = steps.compute(None, module, sizes, torch.float32)
            for one, computed in zip(expected, steps.compute(operation, module, sizes, torch.float32), strict=True):
                torch.testing.assert_close(computed, one, atol=5e-5, rtol=5e-4)


@pytest.mark.parametrize("family", ["qwen3_5", "nemotron_h", "falcon_h1", "lfm2", "kimi_linear"])
def test_bfloat16_is_as_near_to_float32_as_the_module(family: str, tmp_path: Path) -> None:
    """Also with packed linear layers. States stay in the types in which transformers has them."""
    model, layers = recurrent_model(family, tmp_path, torch.bfloat16)
    exact = copy.deepcopy(model).float()
    whole = copy.deepcopy(model)
    pack_linears(model, "cpu")
    found = find_recurrences(model, layers)
    assert list(found) == [layer.name for layer in layers]
    layer = layers[-1]
    steps = Steps(None, layer, model.config.hidden_size)
    steps.hidden = steps.hidden.bfloat16().float()
    in_float32 = layer.__class__(layer.name, tuple(state._replace(dtype=torch.float32) for state in layer.states))
    wide = Steps(None, in_float32, model.config.hidden_size)
    wide.hidden, wide.held = steps.hidden, [held.float() for held in steps.held]
    for sizes in ((1,), (7,)):
        expected = wide.compute(None, exact.get_submodule(layer.name), sizes, torch.float32)
        rounded = steps.compute(None, whole.get_submodule(layer.name), sizes, torch.bfloat16)
        computed = steps.compute(found[layer.name], model.get_submodule(layer.name), sizes, torch.bfloat16)
        for one, by_module, by_operation in zip(expected, rounded, computed, strict=True):
            error = (by_operation - one).abs().mean()
            assert error <= 1.1 * (by_module - one).abs().mean() + 1e-6
            assert error < 0.02 * one.abs().max()


def test_what_computes_otherwise_stays_with_pytorch(tmp_path: Path) -> None:
    model, layers = recurrent_model("qwen3_next", tmp_path)
    first, second, _ = (model.get_submodule(layer.name) for layer in layers)
    first.activation = "gelu"
    forward = second.in_proj_ba.forward
    second.in_proj_ba.forward = lambda x: forward(x).tanh()
    assert list(find_recurrences(model, layers)) == [layer.name for layer in layers[1:]], "a projection is any function"
    second.in_proj_ba.forward, second.norm = forward, Squared(second.norm)
    assert list(find_recurrences(model, layers)) == [layers[2].name]


def test_chunks_that_are_computed_otherwise_stay_with_pytorch(tmp_path: Path) -> None:
    model, layers = recurrent_model("nemotron_h", tmp_path)
    module: Any = model.get_submodule(layers[0].name)
    plain = type(module).forward

    def forward(self: Any, hidden: torch.Tensor, cache_params: Any = None) -> torch.Tensor:
        result: torch.Tensor = plain(self, hidden, cache_params)
        return result * (2 if hidden.shape[1] > 1 else 1)

    module.__class__ = type("Other", (type(module),), {"forward": forward})
    found = find_recurrences(model, layers)
    assert [one.chunks for one in found.values()] == [False, True]
    steps = Steps(module, layers[0], model.config.hidden_size)
    for sizes in ((1,), (3,)):
        expected = steps.compute(None, module, sizes, torch.float32)
        for one, computed in zip(
            expected, steps.compute(found[layers[0].name], module, sizes, torch.float32), strict=True
        ):
            torch.testing.assert_close(computed, one, atol=5e-5, rtol=5e-4)


def test_scaled_projections_are_computed(tmp_path: Path) -> None:
    model, layers = recurrent_model(
        "falcon_h1", tmp_path, ssm_multipliers=[0.5, 2.0, 0.3, 1.0, 0.7], ssm_in_multiplier=0.3
    )
    found = find_recurrences(model, layers)
    assert list(found) == [layer.name for layer in layers]
    module = model.get_submodule(layers[0].name)
    steps = Steps(module, layers[0], model.config.hidden_size)
    for sizes in ((1,), (6,)):
        expected = steps.compute(None, module, sizes, torch.float32)
        computed = steps.compute(found[layers[0].name], module, sizes, torch.float32)
        for one, other in zip(expected, computed, strict=True):
            torch.testing.assert_close(other, one, atol=5e-5, rtol=5e-4)
