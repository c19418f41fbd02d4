"""Quantised checkpoints, and quantisation while loading: loaded weights, results, and refusals."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from packaging.version import Version
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.packed_linear import Int8Linear
from pagewise_executor.models.quantised_linear import (
    JoinedLinear,
    QuantisedLinear,
    ScaledMMLinear,
    TritonQuantisedLinear,
    has_exact_inputs,
    make_fast,
)
from pagewise_executor.models.quantised_weight import Inputs, QuantisedWeight, join_outputs, quantise
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import run_requests
from tests.executor.runners import build_runner
from tests.lora_adapters import build_adapter, read, with_adapter
from tests.model_builders import FUSED, build_model, spoil_weights
from tests.quantised_checkpoints import (
    FORMS,
    FP8,
    PROMPTS,
    OracleLinear,
    build_quantised,
    check_layers,
    check_served,
    edit_config,
)


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", **options))


def refused(path: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        load(path, **options)
    return str(error.value)


INTERPRETED = ("fp8 per tensor", "fp8 of deepseek", "int8 per channel", "int8 weights")


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        *((form, kernels) for form in FORMS for kernels in ("torch", "cpu")),
        *(pytest.param(form, "triton", marks=pytest.mark.interpreted) for form in INTERPRETED),
    ],
)
def test_quantised_checkpoints_compute_what_they_should(form: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    family = FUSED[list(FORMS).index(form) % len(FUSED)]
    oracle = build_quantised(FORMS[form], tmp_path, family, num_hidden_layers=1)
    loaded = load(tmp_path, kernels=kernels)
    check_layers(loaded, oracle)
    kinds = {type(module) for module in loaded.model.modules() if isinstance(module, QuantisedLinear)}
    fast = kernels == "cpu" and form == "int8 per channel"
    assert kinds == (set() if fast else {TritonQuantisedLinear if kernels == "triton" else QuantisedLinear})
    assert loaded.fallback is (kernels != "triton" and not fast)
    assert type(loaded.model.lm_head).__name__ in ("Linear", "PackedLinear", "CpuLinear"), "it is not quantised"


@pytest.mark.parametrize("form", ["fp8 of deepseek", "int8 per channel"])
def test_quantised_checkpoints_are_served(form: str, tmp_path: Path) -> None:
    check_served(tmp_path, build_quantised(FORMS[form], tmp_path, "qwen3", tie_word_embeddings=True), dtype="float32")


@pytest.mark.long
@pytest.mark.interpreted
def test_a_quantised_checkpoint_is_served_by_the_triton_kernels(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 per block"], tmp_path, "llama", num_hidden_layers=1)
    check_served(tmp_path, oracle, dtype="float32", kernels="triton")


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("few_rows", "prompts"), [(64, PROMPTS[1:2]), *(pytest.param(n, PROMPTS, marks=pytest.mark.long) for n in (64, 0))]
)
def test_an_fp8_checkpoint_in_bfloat16_is_served_by_the_kernel_for_few_rows_and_by_the_library(
    few_rows: int, prompts: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewise_executor.models.quantised_linear.FEW_ROWS", few_rows)
    oracle = build_quantised(FORMS["fp8 per channel"], tmp_path, "llama", num_hidden_layers=1)
    layers = [module for module in load(tmp_path, dtype="bfloat16", kernels="triton").model.modules()
              if isinstance(module, QuantisedLinear)]  # fmt: skip
    assert [(type(layer), layer.few_rows) for layer in layers] == 4 * [(ScaledMMLinear, few_rows)]  # type: ignore[attr-defined]
    check_served(tmp_path, oracle, within=0.2, prompts=prompts, dtype="bfloat16", kernels="triton")


def test_the_rest_of_a_model_may_be_in_bfloat16(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 per channel"], tmp_path, "qwen2", num_hidden_layers=1)
    check_layers(load(tmp_path, dtype="bfloat16"), oracle, torch.bfloat16)


def test_adapters_are_added_to_quantised_layers(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 weights"], tmp_path / "quantised", "qwen2", num_hidden_layers=1)
    # Where inputs are not rounded, a checkpoint with the same weights in float32 is the same model.
    build_model("qwen2", tmp_path / "exact", num_hidden_layers=1)
    weights = safetensors.torch.load_file(tmp_path / "exact" / "model.safetensors")
    weights |= {f"{n}.weight": m.exact.float() for n, m in oracle.named_modules() if isinstance(m, OracleLinear)}
    safetensors.torch.save_file(weights, tmp_path / "exact" / "model.safetensors", {"format": "pt"})
    adapter = read(build_adapter(tmp_path / "exact", tmp_path / "adapter", 3), "tuned")
    found = []
    for folder in ("exact", "quantised"):
        runner = build_runner(tmp_path / folder, kernels="torch", enable_lora=True)
        asked = [with_adapter(one, PROMPTS[1], 12, f"r{n}", logprobs=0) for n, one in enumerate((adapter, None))]
        _, outputs = run_requests(runner, asked, max_num_batched_tokens=24)
        logprobs = [
            [entry.logprob for output in outputs for sequence, entry in output.logprobs.items()
             if sequence.request is one] for one in asked
        ]  # fmt: skip
        found.append(([one.sequences[0].output_token_ids.tolist() for one in asked], logprobs))
    (tokens, logprobs), (others, other_logprobs) = found
    assert tokens == others
    assert tokens[0] != tokens[1], "the adapter matters"
    for one, other in zip(logprobs, other_logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_layers_that_are_ignored_stay_as_they_are(tmp_path: Path) -> None:
    form = FORMS["fp8 per channel"]
    oracle = build_quantised(form, tmp_path)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    plain = build_model("llama", tmp_path / "plain")
    ignored = ["model.layers.0.self_attn.v_proj", *(f"model.layers.{n}.mlp.down_proj" for n in range(3))]
    for name in ignored:
        del weights[f"{name}.weight_scale"]
        weights[f"{name}.weight"] = plain.get_submodule(name).weight.detach()
        oracle.set_submodule(name, plain.get_submodule(name).double().requires_grad_(False))
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert "self_attn.v_proj is of type F32, but by config.json it is float8_e4m3fn" in refused(tmp_path)
    edit_config(tmp_path, quantization_config=form.config | {"ignore": ["lm_head", "re:.*down_proj$", ignored[0]]})
    loaded = load(tmp_path)
    check_layers(loaded, oracle)
    assert isinstance(loaded.model.model.layers[0].qkv, JoinedLinear), "its parts are of two kinds"
    edit_config(tmp_path, quantization_config=form.config | {"ignore": ["lm_head", "re:.*_proj$"]})
    assert "is of type F8_E4M3, but by config.json it is not quantised" in refused(tmp_path)


def test_scales_of_a_kv_cache_and_zero_points_are_left_out_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = FORMS["int8 per channel"]
    oracle = build_quantised(form, tmp_path, num_hidden_layers=1)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    for end in ("self_attn.k_scale", "self_attn.v_scale", "self_attn.k_proj.output_scale"):
        weights[f"model.layers.0.{end}"] = torch.ones(1)
    weights["model.layers.0.mlp.up_proj.weight_zero_point"] = torch.zeros(80, 1, dtype=torch.int8)
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    edit_config(tmp_path, quantization_config=form.config | {"kv_cache_scheme": scheme})
    check_layers(load(tmp_path), oracle)
    assert "has a kv_cache_scheme, whose scales are not used: KV is kept in the model's type" in caplog.text


# ---- kernels of a layer -------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.skipif(Version(torch.__version__) < Version("2.13"), reason="torch 2.11's CPU takes no scale for each row")
@pytest.mark.parametrize("static", [None, torch.tensor([0.01])])
def test_scaled_mm_computes_what_pytorch_does(static: torch.Tensor | None) -> None:
    weight, bias = quantise(torch.randn(64, 48), FP8), torch.randn(64).bfloat16()
    x = torch.randn(2, 5, 48).bfloat16()
    plain, fast = (
        kind(weight, Inputs(static=static is not None), torch.bfloat16, bias, static)
        for kind in (QuantisedLinear, ScaledMMLinear)
    )
    try:
        result = fast(x)
    except NotImplementedError:
        pytest.skip("PyTorch 2.11 multiplies like this on a GPU only")
    torch.testing.assert_close(result, plain(x), atol=0.1, rtol=0.02)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("capability", "dtype", "outs", "group", "kind", "dropped"),
    [
        (90, FP8, 64, None, ScaledMMLinear, False),
        (90, FP8, 64, 32, TritonQuantisedLinear, False),
        (90, FP8, 64, 16, QuantisedLinear, False),
        (80, FP8, 64, 16, TritonQuantisedLinear, True),
        (90, FP8, 65, None, TritonQuantisedLinear, False),
        (90, FP8, 64, 12, QuantisedLinear, False),
        (89, FP8, 64, None, TritonQuantisedLinear, False),
        (80, FP8, 64, None, TritonQuantisedLinear, True),
        (80, torch.int8, 64, None, TritonQuantisedLinear, False),
    ],
)
def test_what_computes_a_layer_depends_on_the_gpu_and_on_the_scales(
    capability: int,
    dtype: torch.dtype,
    outs: int,
    group: int | None,
    kind: type,
    dropped: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagewise_kernels.launch.capability", lambda _: capability)
    layer = QuantisedLinear(quantise(torch.randn(outs, 48), dtype), Inputs(group=group), torch.bfloat16)
    model = torch.nn.ModuleDict({"layer": layer})
    make_fast(model, "triton", torch.device("cuda"), "")
    made = model["layer"]
    assert type(made) is kind
    assert isinstance(made, QuantisedLinear)
    assert (made.inputs_dropped, made.inputs.quantised) == (dropped, not dropped)
    assert has_exact_inputs(model) is dropped


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_quantised_checkpoints_on_cuda(form: str, tmp_path: Path) -> None:
    oracle = build_quantised(FORMS[form], tmp_path, num_hidden_layers=1)
    loaded = load_model(ExecutorConfig(model=str(tmp_path), device="cuda", dtype="bfloat16"))
    check_layers(loaded, oracle, torch.bfloat16, "cuda")
    assert not loaded.fallback


# ---- quantisation while loading -----------------------------------------------------------------------------


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kernels", ["torch", pytest.param("triton", marks=pytest.mark.interpreted)])
def test_linear_layers_become_fp8_while_they_are_loaded(
    own: bool, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = build_model("qwen3", tmp_path, num_hidden_layers=1)
    for name, module in list(oracle.model.named_modules(prefix="model")):
        if type(module) is torch.nn.Linear:
            one = OracleLinear(module.weight.detach(), None, FORMS["fp8 per channel"])
            one.exact = quantise(module.weight.detach(), FP8).dequantised().double()
            largest = (one.exact - one.weight.double()).abs().amax(dim=1) / one.weight.abs().amax(dim=1)
            assert float(largest.max()) < 1 / 16, "three bits of mantissa, rounded"
            oracle.set_submodule(name, one)
    if not own:
        monkeypatch.setattr("pagewise_executor.models.loader.llama_checkpoint", lambda *_: None)
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path, quantization="fp8", kernels=kernels)
    check_layers(loaded, oracle)
    by = {"torch": "PyTorch", "triton": "Triton"}[kernels]
    assert f"weights are in eight bits (4 linear layers by {by})" in caplog.text
    assert ("FP8 needs a GPU" in caplog.text) is (kernels == "torch")
    assert isinstance(loaded.model.lm_head, torch.nn.Module)
    assert not isinstance(loaded.model.lm_head, QuantisedLinear)


def test_other_families_are_quantised_while_they_are_loaded(tmp_path: Path) -> None:
    for family, layers in (("gemma3", 7 * 7), ("gpt2", 3 * 4)):
        build_model(family, tmp_path / family)
        loaded = load(tmp_path / family, quantization="fp8")
        assert sum(isinstance(module, QuantisedLinear) for module in loaded.model.modules()) == layers


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_a_gate_of_one_output_is_not_quantised(quantization: str, tmp_path: Path) -> None:
    build_model("qwen2_moe", tmp_path, num_hidden_layers=1)
    if quantization == "int8":
        need_cpu_kernels()
    layer = load(tmp_path, quantization=quantization).model.model.layers[0]
    assert not isinstance(layer.mlp.shared_expert_gate, QuantisedLinear | Int8Linear)
    kind = QuantisedLinear if quantization == "fp8" else Int8Linear
    assert isinstance(layer.mlp.shared_expert.gate_proj, kind)
    assert isinstance(layer.out, kind)


def test_fingerprints_tell_quantised_weights_apart(tmp_path: Path) -> None:
    build_model("llama", tmp_path / "exact")
    build_quantised(FORMS["fp8 per channel"], tmp_path / "stored")
    exact, online = (load(tmp_path / "exact", quantization=kind).fingerprint for kind in ("none", "fp8"))
    assert online == f"{exact}-fp8"
    stored = load(tmp_path / "stored").fingerprint
    assert len({exact, online, stored}) == 3


# ---- refused checkpoints ------------------------------------------------------------------------------------


COMPRESSED = FORMS["fp8 per channel"].config
OF_DEEPSEEK = FORMS["fp8 of deepseek"].config


def group_of(**changes: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors whose only group differs."""
    group = json.loads(json.dumps(COMPRESSED["config_groups"]["group_0"]))
    for key, value in changes.items():
        group[key] = group[key] | value if isinstance(value, dict) and group[key] else value
    return COMPRESSED | {"config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        *(({"quant_method": name}, f"(quant_method '{name}')") for name in ("awq", "gptq", "bitsandbytes", "mxfp4")),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "(quant_method 'modelopt') by NVFP4_AWQ"),
        (COMPRESSED | {"config_groups": group_of(format="nvfp4-pack-quantized")["config_groups"]}, "nvfp4-pack-quant"),
        (group_of(weights={"num_bits": 4, "type": "int"}), "to int4 weights"),
        (group_of(weights={"symmetric": False}), "asymmetrically (with zero points)"),
        (group_of(weights={"actorder": "group"}), "actorder"),
        (group_of(weights={"strategy": "tensor_group"}), "weights by the strategy tensor_group"),
        (group_of(input_activations={"type": "int"}), "to float8 weights with int8 inputs"),
        (group_of(input_activations={"dynamic": "local"}), "local inputs by the strategy token"),
        (group_of(output_activations={"num_bits": 8}), "outputs"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "with a sparsity_config"),
        (COMPRESSED | {"config_groups": 3}, "config_groups"),
        (COMPRESSED | {"ignore": ["lm_head", "re:.*(mlp"]}, "by a pattern 're:.*(mlp' that is no regular expression"),
        (COMPRESSED | {"config_groups": group_of(targets=["re:*lm_head"])["config_groups"]}, "by a pattern 're:*lm_h"),
        (OF_DEEPSEEK | {"scale_fmt": "e5m2"}, "with scales in the format e5m2"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "with scales in the format ue8m0, and not per block"),
        (OF_DEEPSEEK | {"expert_dtype": "fp4"}, "with experts in fp4"),
        (OF_DEEPSEEK | {"modules_to_convert": ["model.embed_tokens"]}, "other modules than linear layers (model.embed"),
        (OF_DEEPSEEK | {"rounding": "up"}, "unknown field `rounding`"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "in the format e5m2"),
        ({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}, "per block and"),
    ],
)
def test_other_forms_are_refused_by_name_before_the_weights_are_read(
    config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    spoil_weights(tmp_path)
    edit_config(tmp_path, quantization_config=config)
    found = refused(tmp_path)
    assert why in found
    assert "which cannot be served; take a checkpoint in FP8 or int8" in found


def test_modelopt_is_read_in_fp8_and_refused_by_name_and_gguf_beside_a_configuration(tmp_path: Path) -> None:
    oracle = build_quantised(FORMS["fp8 of autofp8"], tmp_path, num_hidden_layers=1)
    edit_config(tmp_path, quantization_config=None)
    settings = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": settings}))
    check_layers(load(tmp_path), oracle)
    (tmp_path / "hf_quant_config.json").write_text("{}")
    assert "(quant_method 'modelopt') by None, which cannot be served; take" in refused(tmp_path)
    (tmp_path / "hf_quant_config.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "model.gguf")
    assert f"to serve its GGUF model, give the file: {tmp_path / 'model.gguf'}" in refused(tmp_path)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_static_scales_by_which_nothing_can_be_divided_are_refused(scale: float, tmp_path: Path) -> None:
    build_quantised(FORMS["int8 static"], tmp_path, num_hidden_layers=1)
    weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor([scale])
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    assert f"input_scale of a layer is {scale}: inputs cannot be divided by that" in refused(tmp_path)


def test_options_that_do_not_go_with_quantised_weights_are_refused(tmp_path: Path) -> None:
    build_quantised(FORMS["fp8 per channel"], tmp_path, num_hidden_layers=1)
    assert "--quantization fp8: the weights of this checkpoint are quantised already" in refused(
        tmp_path, quantization="fp8"
    )
    assert "does not go together with --deterministic" in refused(tmp_path, deterministic=True, kernels="triton")
    edit_config(tmp_path, no_such_key=1)
    assert "served of Llama, Mistral, Qwen2 and Qwen3" in refused(tmp_path)
    build_model("llama", tmp_path / "plain", num_hidden_layers=1)
    assert "--quantization fp8: not with --deterministic" in refused(
        tmp_path / "plain", quantization="fp8", deterministic=True
    )


# ---- the layout of scales -----------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 96), (64, 96), (16, 32), (1, 32), (24, 20)])
@pytest.mark.parametrize("dtype", [FP8, torch.int8])
def test_weights_are_cut_and_joined_with_their_scales(block: tuple[int, int], dtype: torch.dtype) -> None:
    values = (torch.randn(64, 96) * 40).clamp(-127, 127).to(dtype)
    scales = torch.rand(-(-64 // block[0]), -(-96 // block[1]))
    weight = QuantisedWeight(values, scales, block)
    spread = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:64, :96]
    exact = values.float() * spread
    assert torch.equal(weight.dequantised(), exact)
    for start, stop in ((0, 32), (32, 64), (16, 50), (63, 64)):
        assert torch.equal(weight.rows(start, stop).dequantised(), exact[start:stop])
    for start, stop in ((0, 48), (48, 96), (20, 60)):
        assert torch.equal(weight.columns(start, stop).dequantised(), exact[:, start:stop])
    parts = [weight.rows(0, 16), weight.rows(16, 24), weight.rows(24, 64)]
    assert torch.equal(join_outputs(parts).dequantised(), exact)
    with pytest.raises(ValueError, match="other scales than"):
        QuantisedWeight(values, scales, (7, 7))
