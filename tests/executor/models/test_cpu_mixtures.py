"""Which routers and experts the operations in C compute, and that their results equal transformers'."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.models.cpu_mixtures import CpuExperts, CpuRouter, pack_mixtures
from pagewise_kernels.cpu.library import has_fast_products
from torch import nn

from tests.cpu_kernels import need_cpu_kernels
from tests.model_builders import build_model


@pytest.fixture(autouse=True)
def fast_products() -> None:
    need_cpu_kernels()
    if not has_fast_products():
        pytest.skip("this processor has no AVX2, or the library is not built for it")


def count(model: nn.Module) -> tuple[int, int]:
    """Return the numbers of routers and of experts by operations in C."""
    modules = list(model.modules())
    return sum(isinstance(each, CpuRouter) for each in modules), sum(isinstance(each, CpuExperts) for each in modules)


@pytest.mark.parametrize(
    "family", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "axk1"]
)
@torch.inference_mode()
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = build_model(family, tmp_path)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.3)
    packed = copy.deepcopy(model)
    pack_mixtures(packed, "model.layers.1")
    assert count(packed) == (1, 1), "only within that part"
    pack_mixtures(packed, "")
    layers = sum(hasattr(module, "gate_up_proj") and hasattr(module, "num_experts") for module in model.modules())
    assert count(packed) == (layers, layers)
    assert layers > 1
    tokens = torch.arange(3, 40)[None]
    torch.testing.assert_close(packed(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["gemma4_moe", "llama4"])
def test_mixtures_with_another_computation_stay_as_they_are(family: str, tmp_path: Path) -> None:
    """They have another activation, or experts that multiply their inputs by the weights."""
    model = build_model(family, tmp_path)
    pack_mixtures(model, "")
    assert count(model) == (0, 0)


def test_experts_with_a_limit_of_activations_stay_as_they_are(tmp_path: Path) -> None:
    model = build_model("qwen3_moe", tmp_path)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    experts.act_fn = nn.Sequential(nn.SiLU(), nn.Hardtanh(-7.0, 7.0))
    pack_mixtures(model, "")
    assert count(model) == (3, 2)
    assert model.get_submodule("model.layers.0.mlp.experts") is experts


def test_a_router_that_limits_its_logits_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model("mixtral", tmp_path)
    router: Any = model.get_submodule("model.layers.0.mlp.gate")

    def limited(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = 50 * torch.tanh(torch.nn.functional.linear(x, router.weight) / 50)
        weights, chosen = torch.softmax(logits, -1).topk(router.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen

    monkeypatch.setattr(router, "forward", limited)
    pack_mixtures(model, "")
    assert count(model) == (2, 3)
    assert model.get_submodule("model.layers.0.mlp.gate") is router


def test_mixtures_in_bfloat16_stay_as_they_are(tmp_path: Path) -> None:
    model = build_model("qwen3_moe", tmp_path).bfloat16()
    pack_mixtures(model, "")
    assert count(model) == (0, 0)
