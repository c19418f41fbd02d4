"""Quantised checkpoints of families whose modules are transformers': Gemma 3, mixtures of experts, and others."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from pagewise_executor.collectives import Ranks
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.packed_linear import Int8Linear
from pagewise_executor.models.quantised_families import Experts
from pagewise_executor.models.quantised_linear import QuantisedLinear, TritonQuantisedLinear
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.cpu_kernels import need_cpu_kernels
from tests.model_builders import FEW_LAYERS, MIXTURES, build_model
from tests.quantised_checkpoints import ERROR, FORMS, OracleLinear, build_quantised, check_served, edit_config

BUILT = {
    family: "gemma3" if family.startswith("gemma3") else family
    for family in ("gemma2", "gemma3_text", "mixtral", "phi3", "qwen2_moe", "qwen3_moe")
}
"""The names of families in ``build_model``, by model_type."""
WITH_MTP = ("glm4_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Families whose checkpoints bring MTP layers, with which ``test_model_drafts`` serves them."""
TWO_KINDS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def load(path: Path, ranks: Ranks | None = None, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", **options), ranks or Ranks())


def refused(path: Path, ranks: Ranks | None = None) -> str:
    with pytest.raises(ModelError) as error:
        load(path, ranks)
    return str(error.value)


def settings_of(family: str) -> dict[str, Any]:
    return TWO_KINDS if family.startswith("gemma") else {"num_hidden_layers": 1}


def check_linears(loaded: LoadedModel, oracle: Any, dtype: torch.dtype = torch.float32) -> int:
    """Check each linear layer against float64 with the tensors on disk; return how many there are."""
    generator = torch.Generator().manual_seed(1)
    found = [(name, module) for name, module in oracle.named_modules() if isinstance(module, OracleLinear)]
    for name, linear in found:
        x = torch.randn(5, linear.weight.shape[1], generator=generator).to(dtype)
        expected = linear(x.double())
        made = loaded.model.get_submodule(name)(x)
        assert made.dtype == dtype
        error = (made.double() - expected).abs().max() / expected.abs().max()
        assert float(error) <= (ERROR if dtype == torch.float32 else 0.01), name
    return len(found)


@pytest.mark.parametrize("family", BUILT)
@pytest.mark.parametrize("form", ["fp8 per channel", "fp8 of deepseek", "int8 per channel"])
def test_each_linear_layer_and_expert_computes_what_the_files_say(form: str, family: str, tmp_path: Path) -> None:
    if form == "int8 per channel":
        need_cpu_kernels()
    settings = settings_of(family)
    oracle = build_quantised(FORMS[form], tmp_path, BUILT[family], **settings)
    loaded = load(tmp_path)
    kind = Int8Linear if form == "int8 per channel" else QuantisedLinear
    count = sum(isinstance(module, kind) for module in loaded.model.modules())
    assert check_linears(loaded, oracle) == count
    assert count >= 4 * settings["num_hidden_layers"]
    assert sum(isinstance(module, Experts) for module in loaded.model.modules()) == (family in MIXTURES)


@pytest.mark.parametrize("family", WITH_MTP)
def test_hybrid_models_and_shared_experts_compute_what_the_files_say(family: str, tmp_path: Path) -> None:
    settings = FEW_LAYERS["qwen3_next"] if family.startswith("qwen") else {"num_hidden_layers": 2}
    oracle = build_quantised(FORMS["fp8 of deepseek"], tmp_path, family, **settings)
    loaded = load(tmp_path, kernels="torch")
    count = sum(isinstance(module, QuantisedLinear) for module in loaded.model.modules())
    assert check_linears(loaded, oracle) == count > 10
    if family == "qwen3_next":
        check_served(tmp_path, oracle, dtype="float32", kernels="torch")


def without_inputs(oracle: Any) -> list[Any]:
    """Let the weights that expand latents have inputs that are not rounded; return their attention modules."""
    found = [module for module in oracle.modules() if hasattr(module, "kv_b_proj")]
    for attention in found:
        attention.kv_b_proj.form = attention.kv_b_proj.form._replace(inputs="none")
    return found


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_latents_are_those_of_the_dequantised_weight(family: str, tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 of deepseek"], tmp_path, family, num_hidden_layers=2)
    attention = without_inputs(oracle)
    if family == "deepseek_v3":
        edit_config(tmp_path, model_type="kimi_k2")
    check_served(tmp_path, oracle, dtype="float32", kernels="torch")
    for module in attention:
        del module.kv_b_proj
    loaded = load(tmp_path, kernels="torch")
    count = sum(isinstance(module, QuantisedLinear) for module in loaded.model.modules())
    assert check_linears(loaded, oracle) == count > 3 * 8
    if family != "deepseek_v2":
        router = load(tmp_path, kernels="torch", dtype="bfloat16").model.model.layers[1].mlp.gate
        assert (router.weight.dtype, router.e_score_correction_bias.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe_lite"])
def test_each_rank_computes_its_part_of_latents(family: str, tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 of deepseek"], tmp_path, family, num_hidden_layers=2)
    weight = oracle.model.layers[1].self_attn.kv_b_proj.exact.float().view(4, -1, 24)
    for rank in (0, 1):
        loaded = load(tmp_path, Ranks(rank, 2), kernels="torch", tensor_parallel=2)
        absorbed = loaded.model.model.layers[1].self_attn.absorbed  # type: ignore[union-attr, index]
        own = torch.cat([absorbed.to_latents, absorbed.from_latents.transpose(1, 2)], dim=1)
        torch.testing.assert_close(own, weight[2 * rank : 2 * rank + 2])


@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", "fp8 of deepseek"), ("gemma3_text", "fp8 per channel")])
def test_the_triton_kernels_compute_them(family: str, form: str, tmp_path: Path) -> None:
    oracle = build_quantised(FORMS[form], tmp_path, BUILT[family], **settings_of(family))
    loaded = load(tmp_path, kernels="triton")
    kinds = {type(module) for module in loaded.model.modules() if isinstance(module, QuantisedLinear)}
    assert kinds == {TritonQuantisedLinear}
    assert not loaded.no_segments
    check_linears(loaded, oracle)


@pytest.mark.parametrize("family", BUILT)
def test_buffers_are_those_of_a_model_that_transformers_loads(family: str, tmp_path: Path) -> None:
    build_quantised(FORMS["fp8 per tensor"], tmp_path, BUILT[family], **settings_of(family))
    found = dict(load(tmp_path, kernels="torch").model.named_buffers())
    plain = build_model(BUILT[family], tmp_path / "plain", **settings_of(family))
    expected = dict(plain.named_buffers())
    assert expected
    for name, buffer in expected.items():
        assert torch.equal(found[name].to(buffer.dtype), buffer), name


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("gemma3_text", "fp8 per channel"),
        pytest.param("gemma2", "int8 weights", marks=pytest.mark.long),
        pytest.param("phi3", "fp8 of autofp8", marks=pytest.mark.long),
        ("mixtral", "fp8 per tensor"),
        pytest.param("qwen2_moe", "fp8 per channel", marks=pytest.mark.long),
        ("qwen3_moe", "fp8 of deepseek"),
    ],
)
def test_they_are_served(family: str, form: str, tmp_path: Path) -> None:
    """Tokens of sequences that are batched have the probabilities that the oracle gives them."""
    oracle = build_quantised(FORMS[form], tmp_path, BUILT[family], **settings_of(family))
    check_served(tmp_path, oracle, dtype="float32")


def test_experts_are_computed_in_bfloat16_too(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 per channel"], tmp_path, "qwen3_moe", num_hidden_layers=1)
    loaded = load(tmp_path, dtype="bfloat16")
    check_linears(loaded, oracle, torch.bfloat16)
    experts = loaded.model.model.layers[0].mlp.experts
    x, chosen = torch.randn(6, 48).bfloat16(), torch.tensor([[0, 3], [3, 1], [1, 0], [0, 1], [0, 3], [1, 3]])
    weights = torch.rand(6, 2).bfloat16()
    made = experts(x, chosen, weights)
    expected = oracle.model.layers[0].mlp.experts(x.double(), chosen, weights.double())
    assert made.dtype == torch.bfloat16
    assert float((made.double() - expected).abs().max() / expected.abs().max()) < 0.05


def test_experts_that_are_not_quantised_stay_as_they_are(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 per channel"], tmp_path, "qwen3_moe", num_hidden_layers=1)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for name, linear in oracle.named_modules():
        if isinstance(linear, OracleLinear) and ".experts." in name:
            del weights[f"{name}.weight_scale"]
            weights[f"{name}.weight"] = linear.weight.detach().contiguous()
            linear.form, linear.exact = FORMS["fp8 weights"], linear.weight.detach().double()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert "experts.0.gate_proj is of type F32, but by config.json it is float8_e4m3fn" in refused(tmp_path)
    edit_config(
        tmp_path, quantization_config=FORMS["fp8 per channel"].config | {"ignore": ["re:.*experts.*", "lm_head"]}
    )
    check_linears(load(tmp_path), oracle)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_gemma_3_that_looks_at_images_the_text_is_served(prefix: str, tmp_path: Path) -> None:
    """Files name its weights in two ways, by the version of transformers that wrote them."""
    form = FORMS["fp8 per channel"]
    oracle = build_quantised(form, tmp_path, "gemma3", **TWO_KINDS)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    weights = {name.replace("model.", prefix, 1): tensor for name, tensor in weights.items()}
    weights["vision_tower.vision_model.post_layernorm.weight"] = torch.zeros(8)
    weights["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(8, 48)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").unlink()
    transformers.Gemma3Config(text_config=oracle.config.to_dict()).save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config=form.config, architectures=["Gemma3ForConditionalGeneration"])
    loaded = load(tmp_path)
    assert check_linears(loaded, oracle) == 14
    assert not [name for name, _ in loaded.model.named_parameters() if "vision" in name]


def test_what_is_not_known_is_refused(tmp_path: Path) -> None:
    form = FORMS["fp8 per channel"]
    build_quantised(form, tmp_path / "moe", "qwen3_moe", num_hidden_layers=1)
    file = tmp_path / "moe" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    lacking = {name: tensor for name, tensor in weights.items() if "experts.2.up_proj.weight_scale" not in name}
    safetensors.torch.save_file(lacking, file, {"format": "pt"})
    assert "lack 1 weight that the model has: model.layers.0.mlp.experts.2.up_proj.weight_scale" in refused(
        tmp_path / "moe"
    )
    router = "model.layers.0.mlp.gate.weight"
    safetensors.torch.save_file(weights | {router: weights[router].to(torch.float8_e4m3fn)}, file, {"format": "pt"})
    assert f"its weight {router} is of type F8_E4M3" in refused(tmp_path / "moe")
    build_quantised(form, tmp_path / "gemma", "gemma2", num_hidden_layers=1)
    assert "--tensor-parallel 2: quantised checkpoints of gemma2" in refused(tmp_path / "gemma", Ranks(0, 2))
    build_quantised(form, tmp_path / "opt", "opt", num_hidden_layers=1)
    assert "and of deepseek_v2, deepseek_v3, gemma2, gemma3, gemma3_text, glm4_moe, glm4_moe_lite, mixtral, phi3, " in (
        refused(tmp_path / "opt")
    )
