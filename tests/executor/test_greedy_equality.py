"""Greedy tokens equal transformers' ``generate()``, token for token, for every family."""

from pathlib import Path

import pytest
from pagewise_executor.models.packed_linear import Quantization

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.exact_inputs import keep_inputs_exact
from tests.executor.parity import check_family
from tests.model_builders import FAMILIES, LATENTS

LATENTS_IN_SHORT = ("deepseek_v2", "deepseek_v3", "mistral4")


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize(("family", "block_size"), [(f, (16, 5, 1)[i % 3]) for i, f in enumerate(FAMILIES)])
def test_greedy_tokens_equal_generate(family: str, block_size: int, kernels: str, tmp_path: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    check_family(family, tmp_path, "cpu", block_size, kernels=kernels)


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("family", "block_size"),
    [
        pytest.param(family, (5, 16, 1)[i % 3], marks=[pytest.mark.long] * (family not in LATENTS_IN_SHORT))
        for i, family in enumerate(LATENTS)
    ],
)
def test_greedy_tokens_from_latents_equal_generate(family: str, block_size: int, kernels: str, tmp_path: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    check_family(family, tmp_path, "cpu", block_size, kernels=kernels)


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("family", "block_size"), [("ministral", 5), ("minimax_m2", 16), ("glm4_moe", 1), ("olmo3", 1)]
)
def test_greedy_tokens_of_further_families_equal_generate(
    family: str, block_size: int, kernels: str, tmp_path: Path
) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    check_family(family, tmp_path, "cpu", block_size, kernels=kernels)


@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        *((one, "int8") for one in ("llama", "qwen3", "gpt2", "gemma3", "granitemoehybrid")),
        *((one, "int4") for one in ("llama", "gpt2")),
        *(
            pytest.param(one, kind, marks=pytest.mark.long)
            for one in ("qwen3_next", "nemotron_h", "lfm2", "kimi_linear")
            for kind in ("int8", "int4")
            if (one, kind) != ("qwen3_next", "int4")  # has a tie, within 0.005 of a logarithm of probabilities
        ),
    ],
)
def test_greedy_tokens_of_quantised_models_equal_those_of_generate_with_the_same_linear_layers(
    family: str, quantization: Quantization, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With four bits inputs are not rounded: a last bit, which differs with the operations beside the layer, would
    decide how one is, and so how all behind it are."""
    need_cpu_kernels()
    if quantization == "int4":
        keep_inputs_exact(monkeypatch)
    check_family(family, tmp_path, "cpu", 16, kernels="cpu", quantization=quantization)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_on_cuda(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cuda", 16)
