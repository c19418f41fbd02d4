"""Recurrent modules by the Triton kernels: which have a known form, and greedy tokens of whole models."""

from pathlib import Path
from typing import Any

import pytest
from pagewise_executor.models.triton_recurrence import find_form
from torch import nn

from tests.executor.models.recurrent_models import Squared, recurrent_model
from tests.model_builders import RECURRENT


@pytest.mark.parametrize("family", RECURRENT)
def test_forms_are_found(family: str, tmp_path: Path) -> None:
    """They give the outputs and states of the modules, or else are none."""
    model, layers = recurrent_model(family, tmp_path)
    for layer in layers:
        form = find_form(model.get_submodule(layer.name), layer, model.config.hidden_size)
        assert form is not None
        assert isinstance(form.out, nn.Linear)


def test_projections_may_be_any_function(tmp_path: Path) -> None:
    model, layers = recurrent_model("qwen3_next", tmp_path)
    module: Any = model.get_submodule(layers[0].name)
    forward = module.in_proj_qkvz.forward
    module.in_proj_qkvz.forward = lambda x: forward(x).tanh()
    assert find_form(module, layers[0], model.config.hidden_size) is not None
    scaled = {"ssm_multipliers": [0.5, 2.0, 0.3, 1.0, 0.7], "ssm_in_multiplier": 0.3}
    model, layers = recurrent_model("falcon_h1", tmp_path, **scaled)
    assert find_form(model.get_submodule(layers[0].name), layers[0], model.config.hidden_size) is not None


def test_other_computations_have_no_form(tmp_path: Path) -> None:
    model, layers = recurrent_model("qwen3_next", tmp_path)
    module: Any = model.get_submodule(layers[0].name)
    module.norm = Squared(module.norm)
    assert find_form(module, layers[0], model.config.hidden_size) is None
