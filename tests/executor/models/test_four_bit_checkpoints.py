"""Checkpoints in four bits: unpacked weights, layers, tokens of whole models, parts of ranks, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from pagewise_executor.collectives import Ranks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.four_bit_checkpoint import UNPACK, FourBitScheme
from pagewise_executor.models.four_bit_linear import CpuFourBitExperts, FourBitLinear, TritonInt4Linear
from pagewise_executor.models.four_bit_weight import FourBitWeight, quantise
from pagewise_executor.models.kernel_choice import candidates
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.packed_linear import Int4Linear
from pagewise_executor.models.quantised_checkpoint import QuantisedCheckpoint, read_quantisation
from pagewise_executor.models.quantised_families import Experts
from pagewise_executor.models.quantised_linear import JoinedLinear, TritonQuantisedLinear, make_fast
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.exact_inputs import keep_inputs_exact
from tests.four_bit_checkpoints import FORMS, FourBits, build_four_bits, quantised
from tests.model_builders import FUSED, build_model, spoil_weights
from tests.quantised_checkpoints import PROMPTS, check_served, edit_config

SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}


def load(path: Path, ranks: Ranks | None = None, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", **options), ranks or Ranks())


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        load(path, **options)
    return str(error.value)


def exact(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer whose inputs are not rounded."""
    if isinstance(module, JoinedLinear):
        return torch.cat([exact(part, x) for part in module.linears], dim=-1)
    assert isinstance(module, Int4Linear)
    found = module(x)
    unrounded = module.packed.linear(x, exact=True)
    assert float((found - unrounded).abs().max()) < 0.015 * float(unrounded.abs().max()), "inputs have eight bits"
    return unrounded


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_unpacked_to_the_weights_of_its_formula(name: str) -> None:
    form = FORMS[name]
    weight = torch.randn(20 if form.form == "compressed" else 24, 96)
    layer = quantised(weight, form, (torch.arange(96) // 32)[torch.randperm(96)])
    kind = "compressed-tensors" if form.form == "compressed" else form.form.removesuffix("_v2")
    scheme = FourBitScheme(kind, form.group, zero_offset=int(form.form == "gptq"))  # type: ignore[arg-type]
    found = UNPACK[kind](layer.stored, scheme)
    torch.testing.assert_close(found.dequantised().double(), layer.exact, rtol=1e-6 * scheme.in_nvfp4, atol=0)
    assert (found.zeros is None) is not form.zeros
    assert float((layer.exact - weight).abs().max()) < 0.7, "the formula itself rounds"


@pytest.mark.parametrize("name", FORMS)
def test_layers_of_checkpoints_in_four_bits_compute_what_the_files_say(name: str, tmp_path: Path) -> None:
    need_cpu_kernels()
    family = FUSED[list(FORMS).index(name) % len(FUSED)]
    model: Any = build_four_bits(FORMS[name], tmp_path, family, **SHAPE)
    loaded = load(tmp_path, kernels="torch" if name == "gptq" else "auto")
    assert not loaded.fallback
    ours, theirs = loaded.model.model.layers[0], model.model.layers[0]
    attention, mlp = theirs.self_attn, theirs.mlp
    for module, parts in (
        (ours.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (ours.out, [attention.o_proj]),
        (ours.gate_up, [mlp.gate_proj, mlp.up_proj]),
        (ours.down, [mlp.down_proj]),
    ):
        x = torch.randn(5, parts[0].weight.shape[1])
        expected = torch.cat([part.double()(x.double()) for part in parts], dim=-1)
        assert isinstance(module, Int4Linear), "its parts were joined"
        torch.testing.assert_close(exact(module, x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", ["gptq, symmetric, act-order", "awq", "compressed-tensors, zeros"])
def test_greedy_tokens_are_those_of_the_dequantised_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cpu_kernels()
    model: Any = build_four_bits(FORMS[name], tmp_path, "qwen3", **SHAPE | {"num_hidden_layers": 2})
    check_served(tmp_path, model)
    keep_inputs_exact(monkeypatch)
    runner = ModelRunner(ExecutorConfig(model=str(tmp_path), device="cpu", num_blocks=64, profile=False))
    asked = [request(prompt, 12, f"r{n}") for n, prompt in enumerate(PROMPTS)]
    run_requests(runner, asked, max_num_batched_tokens=24)
    for prompt, one in zip(PROMPTS, asked, strict=True):
        made = model.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert one.sequences[0].output_token_ids.tolist() == made[0, len(prompt) :].tolist()


def test_weights_in_nvfp4_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs are not, unless they stay in float32."""
    need_cpu_kernels()
    model = build_four_bits(FORMS["nvfp4"], tmp_path, "qwen3", **SHAPE)
    check_served(tmp_path, model)
    keep_inputs_exact(monkeypatch)
    check_served(tmp_path, model, within=1e-3)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("family", "name"), [("qwen3", "gptq, symmetric, act-order"), ("mixtral", "awq"), ("llama", "modelopt nvfp4")]
)
def test_triton_kernels_compute_models_in_four_bits(family: str, name: str, tmp_path: Path) -> None:
    """Inputs are not rounded; experts are computed one after the other."""
    model: Any = build_four_bits(FORMS[name], tmp_path, family, **SHAPE)
    loaded = load(tmp_path, kernels="triton").model
    kind = TritonQuantisedLinear if "nvfp4" in name else TritonInt4Linear
    assert sum(isinstance(module, kind) for module in loaded.modules()) >= 4
    check_served(tmp_path, model, within=1e-3, prompts=PROMPTS[:1], kernels="triton")


@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "dtype"), [("qwen2", "float32"), ("mixtral", "bfloat16")])
def test_triton_kernels_compute_models_that_are_quantised_while_they_are_loaded(
    family: str, dtype: Any, tmp_path: Path
) -> None:
    """Head and experts stay as they are."""
    model: Any = build_model(family, tmp_path, **SHAPE)
    options = {"kernels": "triton", "quantization": "int4", "dtype": dtype}
    loaded = load(tmp_path, **options)
    found = {name for name, module in loaded.model.named_modules() if isinstance(module, TritonInt4Linear)}
    ends = {name.removeprefix("model.layers.0.") for name in found}
    assert ends == {"qkv", "out"} | ({"gate_up", "down"} if family == "qwen2" else set())
    for name, module in model.model.layers.named_modules():
        if type(module) is torch.nn.Linear and (family == "qwen2" or "self_attn" in name):
            module.weight.data = quantise(module.weight.detach().to(loaded.dtype))[0].dequantised()
    within = 1e-3 if dtype == "float32" else 0.05
    check_served(tmp_path, model, within=within, prompts=PROMPTS[:1], **options)
    config = ExecutorConfig(model=str(tmp_path), quantization="int4")
    assert candidates(config, torch.device("cuda"), torch.bfloat16).kernels[0] == "triton"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("mixtral", "compressed-tensors"),
        ("mixtral", "gptq, symmetric, act-order"),
        ("qwen3_moe", "awq"),
        ("qwen3_moe", "nvfp4"),
    ],
)
def test_experts_in_four_bits_are_one_operation(family: str, name: str, tmp_path: Path) -> None:
    need_cpu_kernels()
    model: Any = build_four_bits(FORMS[name], tmp_path, family, num_hidden_layers=1)
    (found,) = (module for module in load(tmp_path).model.modules() if isinstance(module, CpuFourBitExperts))
    theirs = model.model.layers[0].mlp.experts
    x = torch.randn(9, theirs.gate_up_proj.shape[2])
    chosen = torch.rand(9, len(theirs.gate_up_proj)).argsort(dim=1)[:, :2].contiguous()
    given = x, chosen, torch.rand(9, 2)
    with torch.no_grad():
        expected = theirs(*given)
    assert float((found(*given) - expected).abs().max()) < 0.02 * float(expected.abs().max()), "inputs have eight bits"
    check_served(tmp_path, model, within=0.1)


@pytest.mark.parametrize("name", ["compressed-tensors", "awq"])
def test_latents_and_experts_of_deepseek_v3(name: str, tmp_path: Path) -> None:
    need_cpu_kernels()
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 32, "num_hidden_layers": 2}
    model: Any = build_four_bits(FORMS[name], tmp_path, "deepseek_v3", **sizes)
    dense, mixture = load(tmp_path).model.model.layers
    assert isinstance(mixture.mlp.experts, CpuFourBitExperts)
    assert isinstance(dense.mlp.down_proj, Int4Linear)
    weight = model.model.layers[0].self_attn.kv_b_proj.weight.detach().view(4, -1, 32)
    assert torch.equal(dense.self_attn.absorbed.to_latents, weight[:, :12])
    check_served(tmp_path, model, within=0.1)


def test_experts_whose_gate_and_up_have_other_orders_are_computed_one_by_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_cpu_kernels()
    build_four_bits(FORMS["gptq, symmetric, act-order"], tmp_path, "mixtral", num_hidden_layers=1)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.block_sparse_moe.experts.0.w3.g_idx"
    tensors[name] = tensors[name].flip(0)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    found = [module for module in load(tmp_path).model.modules() if isinstance(module, Experts)]
    assert {type(linear) for linear in found[0].modules() if hasattr(linear, "packed")} == {Int4Linear}
    assert "are computed one after the other: not all can be joined" in caplog.text


@pytest.mark.parametrize("name", ["gptq", "gptq_v2, act-order", "compressed-tensors, zeros", "modelopt nvfp4"])
def test_each_rank_computes_its_part(name: str, tmp_path: Path) -> None:
    need_cpu_kernels()
    model: Any = build_four_bits(FORMS[name], tmp_path, "llama", **SHAPE)
    mlp, layers = model.model.layers[0].mlp, [load(tmp_path, Ranks(rank, 2)).model.model.layers[0] for rank in (0, 1)]
    x, inner = torch.randn(3, 64), torch.randn(3, 128)
    halves = [exact(layer.gate_up, x).chunk(2, dim=1) for layer in layers]
    for at, theirs in enumerate((mlp.gate_proj, mlp.up_proj)):
        torch.testing.assert_close(torch.cat([half[at] for half in halves], dim=1), theirs(x), rtol=1e-4, atol=1e-4)
    parts = [exact(layer.down, part.contiguous()) for layer, part in zip(layers, inner.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(parts[0] + parts[1], mlp.down_proj(inner), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("family", "name"), [("mixtral", "gptq"), ("qwen3_moe", "nvfp4")])
def test_each_rank_computes_its_part_of_experts(family: str, name: str, tmp_path: Path) -> None:
    need_cpu_kernels()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 1}
    model: Any = build_four_bits(FORMS[name], tmp_path, family, **sizes)
    theirs = model.model.layers[0]
    x, chosen, weights = torch.randn(5, 64), torch.tensor([[0, 1]] * 5), torch.rand(5, 2)
    layers = [load(tmp_path, Ranks(rank, 2)).model.model.layers[0] for rank in (0, 1)]
    with torch.no_grad():
        expected, attended = theirs.mlp.experts(x, chosen, weights), theirs.self_attn.q_proj(x)
    parts = [layer.mlp.experts for layer in layers]
    assert all(isinstance(part, CpuFourBitExperts) and part.packed.inner == 32 for part in parts)
    assert all(hasattr(part, "rank_sum") for part in parts)
    found = sum(part.forward(x, chosen, weights) for part in parts)
    assert float((found - expected).abs().max()) < 0.02 * float(expected.abs().max())
    queries = torch.cat([layer.self_attn.q_proj.packed.linear(x, exact=True) for layer in layers], dim=1)
    torch.testing.assert_close(queries, attended, rtol=1e-4, atol=1e-4)


def test_a_bias_that_the_model_does_not_have_is_added_as_gptq_does(tmp_path: Path) -> None:
    need_cpu_kernels()
    model: Any = build_four_bits(FORMS["gptq"], tmp_path, "llama", **SHAPE)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.down_proj.bias"] = torch.ones(64)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    x = torch.randn(3, 128)
    expected = model.model.layers[0].mlp.down_proj(x) + 1
    torch.testing.assert_close(exact(load(tmp_path).model.model.layers[0].down, x), expected, rtol=1e-4, atol=1e-4)


def test_layers_whose_inputs_are_in_other_groups_are_computed_one_by_one(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_four_bits(FORMS["gptq, symmetric, act-order"], tmp_path, "llama", **SHAPE)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.g_idx"] = tensors["model.layers.0.mlp.up_proj.g_idx"].flip(0)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    layer = load(tmp_path).model.model.layers[0]
    assert [type(one) for one in layer.gate_up.linears] == [Int4Linear, Int4Linear]


def test_the_most_specific_target_decides_in_any_order_of_groups() -> None:
    schemes = [FourBitScheme("compressed-tensors", group, zeros=False) for group in (128, 64, 32)]
    targets = ["Linear"], ["re:.*down_proj"], ["model.layers.0.mlp.down_proj"]
    found = QuantisedCheckpoint("m", list(zip(targets, schemes, strict=True)), ["re:.*lm_head"], strict=True)
    names = ("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.0.mlp.down_proj")
    assert [found.scheme(name, "I32") for name in names] == schemes
    assert found.scheme("lm_head", "BF16") is None


GPTQ, AWQ = FORMS["gptq"].config, FORMS["awq"].config


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (GPTQ | {"bits": 3}, "to 3 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "in the format marlin"),
        (GPTQ | {"is_marlin_format": True}, "in the format marlin"),
        (GPTQ | {"pack_dtype": "int64"}, "packed in int64"),
        (GPTQ | {"group_size": 0}, "in groups of 0"),
        (
            GPTQ | {"dynamic": {"-:.*up.*": {}, "+:.*down.*": {"bits": 8}}},
            "with other settings for some modules (dynamic: +:.*down.*)",
        ),
        (AWQ | {"bits": 8}, "to 8 bits"),
        (AWQ | {"version": "gemv"}, "in the version gemv"),
        (AWQ | {"zero_point": False}, "without zero points"),
        (AWQ | {"group_size": None}, "without a group_size"),
    ],
)
def test_other_forms_in_four_bits_are_refused_by_name_before_the_weights_are_read(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    spoil_weights(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    assert f"(quant_method '{config['quant_method']}') {why}, which cannot be served; take" in refused(tmp_path)


def test_what_cannot_compute_four_bits_is_refused(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_four_bits(FourBits("awq"), tmp_path, "llama", **SHAPE)
    assert "in four bits: the rest of the model computes in float32" in refused(tmp_path, dtype="bfloat16")
    assert "the weights of this checkpoint are quantised already" in refused(tmp_path, quantization="int4")
    config, found = ExecutorConfig(model="m", kernels="torch"), read_quantisation("m", tmp_path, "auto")
    with pytest.raises(ModelError, match="in four bits: on cuda not with --kernels torch"):
        candidates(config, torch.device("cuda"), torch.bfloat16, found)
    linear = FourBitLinear(
        FourBitWeight(torch.zeros(2, 32).byte(), torch.ones(2, 1), None, torch.zeros(32).long()), None
    )
    with pytest.raises(ValueError, match="need the Triton kernels, which cannot compute this model"):
        make_fast(torch.nn.Sequential(torch.nn.Linear(1, 1), linear), "torch", torch.device("cuda"), "")
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = tensors["model.layers.0.mlp.up_proj.qweight"][:-1].contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    assert "up_proj.qweight" in refused(tmp_path)
