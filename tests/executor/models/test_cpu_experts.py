"""Which experts the operations in C compute on the CPU, and that their results are those of transformers."""

import copy
from pathlib import Path

import pytest
import torch
from pagewise_executor.models.grouped_experts import CpuExperts, pack_experts
from pagewise_kernels.cpu.library import has_fast_products
from torch import nn

from tests.cpu_kernels import need_cpu_kernels
from tests.model_builders import build_model


@pytest.fixture(autouse=True)
def fast_products() -> None:
    need_cpu_kernels()
    if not has_fast_products():
        pytest.skip("this processor has no AVX2, or the library is not built for it")


def count(model: nn.Module) -> int:
    return sum(isinstance(module, CpuExperts) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3"])
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = build_model(family, tmp_path)
    packed = copy.deepcopy(model)
    pack_experts(packed, "model.layers.1")
    assert count(packed) == 1, "only within that part"
    pack_experts(packed, "")
    layers = sum(hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") for module in model.modules())
    assert count(packed) == layers > 1
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(packed(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4_moe", "llama4"])
def test_experts_with_another_computation_stay_as_they_are(family: str, tmp_path: Path) -> None:
    """They have biases and a limit, another activation, and transposed weights."""
    model = build_model(family, tmp_path)
    pack_experts(model, "")
    assert count(model) == 0


def test_experts_with_a_limit_of_activations_stay_as_they_are(tmp_path: Path) -> None:
    model = build_model("qwen3_moe", tmp_path)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.act_fn = nn.Sequential(nn.SiLU(), nn.Hardtanh(-7.0, 7.0))
    pack_experts(model, "")
    assert count(model) == 2
    assert model.get_submodule("model.layers.0.mlp.experts") is experts


def test_experts_in_bfloat16_stay_as_they_are(tmp_path: Path) -> None:
    model = build_model("qwen3_moe", tmp_path).bfloat16()
    pack_experts(model, "")
    assert count(model) == 0
