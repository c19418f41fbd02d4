"""Weights in eight bits on several ranks: each computes its part like the whole layer, scales included."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from pagewise_executor.collectives import Ranks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.checkpoint import part_of
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.quantised_linear import QuantisedLinear
from pagewise_executor.models.quantised_weight import Inputs, quantise
from pagewise_executor.models.shards import LLAMA_PLAN, Shards, UnknownShardError, VocabularyNames
from pagewise_executor.runner import Runner
from pagewise_shared.config import ExecutorConfig
from torch import nn

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import ThreadGroup, config_of
from tests.model_builders import FUSED, build_model
from tests.quantised_checkpoints import FORMS, FP8, OracleLinear, build_quantised, check_layers

SIZE = 2
FORM = FORMS["fp8 per channel"]


def parts_of_layers(oracle: Any, rank: int) -> Any:
    """The part of each layer of a model that a rank should compute: of the outputs, or of the sum over inputs."""

    def part(linear: OracleLinear, dim: int) -> OracleLinear:
        own = copy.deepcopy(linear)
        own.exact = linear.exact.chunk(SIZE, dim)[rank]
        own.weight = nn.Parameter(linear.weight.chunk(SIZE, dim)[rank])
        if linear.bias is not None:
            own.bias = linear.bias.chunk(SIZE)[rank] if dim == 0 else linear.bias * float(rank == 0)
        return own

    def layer(whole: Any) -> SimpleNamespace:
        attention, mlp = whole.self_attn, whole.mlp
        return SimpleNamespace(
            self_attn=SimpleNamespace(
                **{name: part(getattr(attention, name), 0) for name in ("q_proj", "k_proj", "v_proj")},
                o_proj=part(attention.o_proj, 1),
            ),
            mlp=SimpleNamespace(
                gate_proj=part(mlp.gate_proj, 0), up_proj=part(mlp.up_proj, 0), down_proj=part(mlp.down_proj, 1)
            ),
        )

    return SimpleNamespace(model=SimpleNamespace(layers=[layer(whole) for whole in oracle.model.layers]))


def load_rank(path: Path, rank: int, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", **options), Ranks(rank, SIZE))


@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        *((form, "torch") for form in FORMS),
        ("int8 per channel", "cpu"),
        pytest.param("fp8 of deepseek", "triton", marks=pytest.mark.interpreted),
    ],
)
def test_each_rank_computes_its_part_of_a_quantised_checkpoint(form: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "cpu":
        need_cpu_kernels()
    family = FUSED[list(FORMS).index(form) % len(FUSED)]
    oracle = build_quantised(FORMS[form], tmp_path, family, num_hidden_layers=1)
    for rank in range(SIZE):
        check_layers(load_rank(tmp_path, rank, kernels=kernels), parts_of_layers(oracle, rank))


def test_biases_are_divided_or_count_once(tmp_path: Path) -> None:
    oracle = build_quantised(FORM, tmp_path, "llama", num_hidden_layers=1, attention_bias=True, mlp_bias=True)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    for name, module in oracle.named_modules():
        if isinstance(module, OracleLinear):
            assert module.bias is not None
            module.bias = tensors[f"{name}.bias"] = torch.randn(module.bias.shape)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})
    for rank in range(SIZE):
        check_layers(load_rank(tmp_path, rank), parts_of_layers(oracle, rank))


def test_each_rank_quantises_its_part_while_it_is_loaded(tmp_path: Path) -> None:
    oracle = build_model("qwen2", tmp_path, num_hidden_layers=1)
    whole = {name: module for name, module in oracle.model.named_modules(prefix="model") if type(module) is nn.Linear}
    for rank in range(SIZE):
        for name, module in whole.items():
            one = OracleLinear(module.weight.detach(), module.bias, FORM)
            dim = int(name.endswith(("o_proj", "down_proj")))
            # A scale is that of the largest weight which the rank has of an output.
            exact = [quantise(part, FP8).dequantised() for part in module.weight.detach().chunk(SIZE, dim)]
            one.exact = torch.cat(exact, dim).double()
            oracle.set_submodule(name, one)
        check_layers(load_rank(tmp_path, rank, quantization="fp8"), parts_of_layers(oracle, rank))


def tokens(runner: Runner) -> list[list[int]]:
    requests = [request(list(range(5, 5 + n)), 12, f"r{n}") for n in (3, 17, 40)]
    run_requests(runner, requests, max_num_batched_tokens=24)
    return [one.sequences[0].output_token_ids.tolist() for one in requests]


@pytest.mark.parametrize(
    ("form", "family"), [("fp8 per tensor", "llama"), ("int8 weights", "llama"), ("int8 weights", "deepseek_v3")]
)
def test_tokens_of_ranks_equal_those_of_one(form: str, family: str, tmp_path: Path) -> None:
    """Where inputs are not rounded by scales of their own, ranks and one rank compute the same."""
    build_quantised(FORMS[form], tmp_path, family, num_hidden_layers=1 + (family == "deepseek_v3"))
    expected = tokens(ModelRunner(config_of(tmp_path, 1)))
    group = ThreadGroup(tmp_path, SIZE)
    assert group.info.fallback, "PyTorch computes these on the CPU"
    assert tokens(group) == expected  # type: ignore[arg-type]
    group.close()


def test_kv_heads_are_shared_and_a_head_that_does_not_divide_is_refused() -> None:
    weight = torch.randn(32, 16)
    linear = QuantisedLinear(quantise(weight, FP8), Inputs(), torch.float32)
    names = VocabularyNames("model.embed_tokens", "lm_head")
    shards = [Shards(Ranks(rank, 4), LLAMA_PLAN, names) for rank in range(4)]
    parts = [part_of(linear, "model.layers.0.self_attn.k_proj", [16, 16], each) for each in shards]
    whole = linear.quantised.dequantised()
    for part, start in zip(parts, (0, 0, 16, 16), strict=True):
        assert torch.equal(part.quantised.dequantised(), whole[start : start + 16])
    with pytest.raises(UnknownShardError, match="lm_head is quantised, and its 32 outputs are no multiple of 11"):
        part_of(linear, "lm_head", [11, 16], shards[0])
