"""Checkpoints of gpt-oss with experts in MXFP4: tokens, the memory that they take, and refusals."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.collectives import Ranks
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.mxfp4_experts import CpuMxfp4Experts, Mxfp4Experts, TritonMxfp4Experts
from pagewise_executor.sizing import sizing
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from safetensors.torch import load_file, save_file
from torch import nn

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import ThreadGroup
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import VOCAB_SIZE, build_model
from tests.quantised_checkpoints import edit_config

BLOCK = 32
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
Weights = dict[str, torch.Tensor]


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Values of four bits: a sign, two bits of exponent with a bias of 1, a bit of mantissa; no infinities."""
    sign, exponent, mantissa = codes >> 3, (codes >> 1) & 3, codes & 1
    size = torch.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * 2.0 ** (exponent - 1))
    return torch.where(sign == 1, -size, size)


def quantised(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks uint8 [experts, outs, ins / 32, 16] and scales uint8 [experts, outs, ins / 32] of a weight [experts, ins,
    outs], and the values that they have, like the weight."""
    blocked = weight.transpose(1, 2).unflatten(-1, (-1, BLOCK))
    exponents = torch.frexp(blocked.abs().amax(-1))[1] - 3  # the largest value of a code is 6, below 2**3
    values = e2m1(torch.arange(16))
    codes = (torch.ldexp(blocked, -exponents[..., None])[..., None] - values).abs().argmin(-1)
    stored = torch.ldexp(values[codes], exponents[..., None]).flatten(-2).transpose(1, 2).contiguous()
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), (exponents + 127).to(torch.uint8), stored


def load(path: Path, dtype: str, kernels: str) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", dtype=dtype, kernels=kernels))  # type: ignore[arg-type]


def build(path: Path) -> transformers.PreTrainedModel:
    """Save a tiny model as openai/gpt-oss-20b is saved; return the model of the values that it has."""
    model = build_model("gpt_oss", path, seed=7, **SIZES)
    weights = load_file(path / "model.safetensors")
    values: Weights = {}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[f"{name}_blocks"], weights[f"{name}_scales"], values[name] = quantised(weights.pop(name))
    assert model.load_state_dict(values, strict=False).unexpected_keys == []
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        path,
        quantization_config={
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"],
        },
    )
    return model


@pytest.mark.parametrize(
    ("kernels", "kind"),
    [
        pytest.param("torch", Mxfp4Experts, id="torch"),
        pytest.param("cpu", CpuMxfp4Experts, id="cpu"),
        pytest.param("triton", TritonMxfp4Experts, id="triton", marks=[pytest.mark.interpreted, pytest.mark.long]),
    ],
)
def test_its_tokens_are_those_of_the_values_in_the_files(kernels: str, kind: type[nn.Module], tmp_path: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    model = build(tmp_path)
    model.set_attn_implementation("eager")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (3, 30, 17)]
    expected = reference(model, prompts, [12] * 3, "cpu")
    loaded = load(tmp_path, "float32", kernels)
    assert sum(isinstance(module, kind) for module in loaded.model.modules()) == 2
    runner = build_runner(tmp_path, kernels=kernels)
    requests = [request(prompt, 12, f"r{i}") for i, prompt in enumerate(prompts)]
    run_requests(runner, requests, max_num_batched_tokens=19)
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "kernels"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "cpu")])
def test_logits_are_those_of_transformers(dtype: str, kernels: str, tmp_path: Path) -> None:
    """Which has experts of the weights that it dequantises itself."""
    build(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).to(getattr(torch, dtype))
    loaded = load(tmp_path, dtype, kernels)
    x = torch.randn(40, SIZES["hidden_size"], generator=torch.Generator().manual_seed(1)).to(loaded.dtype)
    for name in ("model.layers.0.mlp", "model.layers.1.mlp"):
        expected, found = (each.get_submodule(name)(x[None])[0] for each in (model, loaded.model))
        assert found.dtype == loaded.dtype
        error = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
        assert float(error) <= (1e-6 if dtype == "float32" else 2e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_that_is_counted_is_what_it_takes(dtype: str, tmp_path: Path) -> None:
    model = build(tmp_path)
    loaded = load(tmp_path, dtype, "torch")
    counted = sizing(ExecutorConfig(model=str(tmp_path), dtype=dtype), tmp_path, 2**33).weights  # type: ignore[arg-type]
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if name.endswith("_proj"))
    assert counted == (sum(sizes.values()) - experts) * loaded.dtype.itemsize + experts * 17 // 32
    parts = dict(loaded.model.named_parameters())
    for name in ("gate_up_proj", "down_proj"):
        path = f"model.layers.1.mlp.experts.{name}"
        assert parts[f"{path}_blocks"].dtype == torch.uint8
        assert parts[f"{path}_blocks"].numel() == sizes[path] // 2


@pytest.mark.parametrize(("layers", "experts", "gib"), [(24, 32, 12.8), (36, 128, 60.8)], ids=["20b", "120b"])
def test_the_published_models_take_as_much_as_their_files(
    layers: int, experts: int, gib: float, tmp_path: Path
) -> None:
    config = transformers.GptOssConfig(num_hidden_layers=layers, num_local_experts=experts, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    found = sizing(ExecutorConfig(model=str(tmp_path)), tmp_path, 80 * 2**30).weights
    assert found / 2**30 == pytest.approx(gib, abs=0.05)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    build(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 150
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"not finite in torch\.float16"):
        load(tmp_path, "float16", "torch")
    load(tmp_path, "float32", "torch")


def test_each_rank_reads_its_part_of_the_experts(tmp_path: Path) -> None:
    """In parts whose width, 48, is no multiple of the weights that share a scale."""
    model = build(tmp_path)
    experts = [
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", dtype="bfloat16"), Ranks(rank, 2))
        .model.get_submodule("model.layers.1.mlp.experts")
        .state_dict()
        for rank in range(2)
    ]
    for name, whole in model.get_submodule("model.layers.1.mlp.experts").state_dict().items():
        first, second = (part[name].float() for part in experts)
        if name == "down_proj_bias":
            assert not second.any(), "the sum has it once"
            assert torch.equal(first, whole.bfloat16().float())
        else:
            joined = torch.cat([first, second], dim=1 if name == "down_proj" else -1)
            assert torch.equal(joined, whole.bfloat16().float()), name
    model.set_attn_implementation("eager")
    group = ThreadGroup(tmp_path, 2)
    asked = request(list(range(5, 22)), 12)
    run_requests(group, [asked], max_num_batched_tokens=9)  # type: ignore[arg-type]
    group.close()
    expected = reference(model, [list(range(5, 22))], [12], "cpu")
    assert [asked.sequences[0].output_token_ids.tolist()] == expected


def test_files_that_lack_a_part_are_refused(tmp_path: Path) -> None:
    build(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for part in ("1.mlp.experts.down_proj_scales", "0.mlp.experts.gate_up_proj_blocks"):
        left = {name: weight for name, weight in whole.items() if not name.endswith(part)}
        save_file(left, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelError, match=f"lack 1 weight that the model has: model.layers.{part}"):
            load(tmp_path, "float32", "torch")


def test_other_models_in_mxfp4_are_refused(tmp_path: Path) -> None:
    build_model("qwen3_moe", tmp_path)
    edit_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(ModelError, match=r"quant_method 'mxfp4'.*cannot be served"):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu"))
