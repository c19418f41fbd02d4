"""GGUF files: weights of each format, layers, tokens of whole models, parts of ranks, and sizes."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("gguf")
import gguf
import torch
import transformers
from pagewise_executor.collectives import Ranks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.gguf_checkpoint import GgufEmbedding
from pagewise_executor.models.gguf_weight import FORMATS, in_four_bits, join_outputs, unpack
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_executor.models.packed_linear import GroupedLinear, Int4Linear
from pagewise_executor.models.quantised_linear import JoinedLinear
from pagewise_executor.models.weight_files import checked_headers, weight_files
from pagewise_executor.models.weight_memory import stored_bytes
from pagewise_executor.sizing import sizing
from pagewise_kernels.cpu.linear_grouped import GroupedWeight
from pagewise_kernels.cpu.quantised_experts import QuantisedExperts
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.gguf_model import make_folder

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.exact_inputs import keep_inputs_exact
from tests.gguf_models import EXPERTS, GEMMA, build_gguf, quantise, round_weights
from tests.quantised_checkpoints import PROMPTS, check_served


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))


def medium(name: str) -> str:
    """As llama.cpp's Q4_K_M: a few matrices are in Q6_K."""
    return "Q6_K" if "attn_v" in name or name.startswith(("output", "token_embd")) else "Q4_K"


def load(file: Path, ranks: Ranks | None = None, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(file), device="cpu", **options), ranks or Ranks())


def loaded_by_transformers(file: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    return model.eval()


def exact(module: Any, x: torch.Tensor) -> torch.Tensor:
    """The output of a layer whose inputs are not rounded."""
    if isinstance(module, JoinedLinear):
        return torch.cat([exact(part, x) for part in module.linears], dim=-1)
    found, unrounded = module(x), module.packed.linear(x, exact=True)
    assert float((found - unrounded).abs().max()) < 0.02 * float(unrounded.abs().max()), "inputs have eight bits"
    return unrounded  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_of_each_format_are_those_of_the_file_in_memory_and_in_parts(kind: str) -> None:
    need_cpu_kernels()
    blocks = quantise(np.random.default_rng(0).standard_normal((6, 512)).astype(np.float32), kind)
    expected = torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[kind]))
    weight = unpack(torch.from_numpy(blocks), kind)
    assert torch.equal(weight.dequantised(), expected)
    packed = GroupedWeight(
        weight.codes, weight.bits, weight.zero, weight.scales, weight.steps, weight.leasts, weight.least_steps
    )
    if kind == "Q4_0":
        assert torch.equal(in_four_bits(weight).dequantised(), expected)
    assert torch.equal(packed.linear(torch.eye(512), exact=True), expected.t())
    assert torch.equal(weight.rows(1, 4).dequantised(), expected[1:4])
    for start, stop in ((0, 256), (64, 96)):
        assert torch.equal(weight.columns(start, stop).dequantised(), expected[:, start:stop])
    with pytest.raises(ValueError, match="divide groups"):
        weight.columns(8, 512)
    joined = join_outputs([weight, weight.rows(2, 3)])
    assert joined is not None
    assert torch.equal(joined.dequantised(), torch.cat([expected, expected[2:3]]))
    other = unpack(
        torch.from_numpy(quantise(expected.numpy(), "Q8_0" if kind != "Q8_0" else "Q4_1")),
        "Q8_0" if kind != "Q8_0" else "Q4_1",
    )
    assert join_outputs([weight, other]) is None


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", medium), ("llama", "Q4_0"), ("qwen2", "Q5_K"), ("mistral", "F16")]
)
def test_layers_compute_what_the_file_says(family: str, kind: str | Callable[[str], str], tmp_path: Path) -> None:
    need_cpu_kernels()
    settings = {"sliding_window": None} if family == "mistral" else {}
    build_gguf(tmp_path / "m.gguf", family, kind, num_hidden_layers=1, **settings)
    theirs, loaded = loaded_by_transformers(tmp_path / "m.gguf").model.layers[0], load(tmp_path / "m.gguf")
    ours, attention, mlp = loaded.model.model.layers[0], theirs.self_attn, theirs.mlp
    assert not loaded.fallback
    for module, parts in (
        (ours.qkv, [attention.q_proj, attention.k_proj, attention.v_proj]),
        (ours.out, [attention.o_proj]),
        (ours.gate_up, [mlp.gate_proj, mlp.up_proj]),
        (ours.down, [mlp.down_proj]),
    ):
        x = torch.randn(5, parts[0].weight.shape[1])
        found = module(x) if kind == "F16" else exact(module, x)
        expected = torch.cat([part.double()(x.double()) for part in parts], dim=-1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    if kind is medium:
        assert [type(part) for part in ours.qkv.linears] == [GroupedLinear] * 2, "queries and keys were joined"
        assert isinstance(loaded.model.model.embed_tokens, GgufEmbedding)
    if kind == "Q4_0":
        assert isinstance(ours.qkv, Int4Linear)


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        ("llama", medium, {"tie_word_embeddings": True}),
        ("qwen3", "Q5_K", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
        ("qwen2", "Q8_0", {}),
        ("gemma2", "Q5_0", GEMMA | {"tie_word_embeddings": True}),
        ("gemma3", "Q6_K", GEMMA | {"num_hidden_layers": 6, "tie_word_embeddings": True}),
    ],
)  # transformers 5.23 reads heads of Qwen3 as ones of 128, whatever the file says
def test_greedy_tokens_are_those_of_transformers(
    family: str, kind: Any, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cpu_kernels()
    file = tmp_path / "m.gguf"
    build_gguf(file, family, kind, **settings)
    theirs = loaded_by_transformers(file)
    check_served(file, theirs, within=0.15)
    keep_inputs_exact(monkeypatch)
    runner = ModelRunner(ExecutorConfig(model=str(file), device="cpu", num_blocks=64, profile=False))
    asked = [request(prompt, 12, f"r{n}") for n, prompt in enumerate(PROMPTS)]
    run_requests(runner, asked, max_num_batched_tokens=24)
    for prompt, one in zip(PROMPTS, asked, strict=True):
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert one.sequences[0].output_token_ids.tolist() == made[0, len(prompt) :].tolist()


def medium_experts(name: str) -> str:
    """As llama.cpp's Q4_K_M of mixtures: down is in Q6_K in some layers."""
    return "Q6_K" if "ffn_down_exps" in name else medium(name)


def unlike_experts(name: str) -> str:
    return {"ffn_up_exps": "Q5_K", "ffn_down_exps": "Q4_0"}.get(name.split(".")[-2], "Q8_0")


@torch.no_grad()
def sums_of_float64(experts: Any, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    found = torch.zeros(x.shape, dtype=torch.float64)
    for token, place in itertools.product(range(len(x)), range(chosen.shape[1])):
        gate_up, down = (part[chosen[token, place]].double() for part in (experts.gate_up_proj, experts.down_proj))
        gate, up = (gate_up @ x[token].double()).chunk(2)
        found[token] += weights[token, place] * (down @ (torch.nn.functional.silu(gate) * up))
    return found


@pytest.mark.parametrize(
    ("family", "kind", "joined"),
    [
        ("mixtral", medium_experts, True),
        ("mixtral", "Q8_0", True),
        ("qwen3_moe", "Q4_0", True),
        ("qwen3_moe", unlike_experts, False),
        ("glm4_moe", medium_experts, True),
    ],
)
def test_mixtures_compute_what_the_file_says(
    family: str, kind: Any, joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    need_cpu_kernels()
    file = tmp_path / "m.gguf"
    theirs = build_gguf(file, family, kind, **EXPERTS[family])
    round_weights(theirs, kind)
    check_served(file, theirs, within=0.15)
    keep_inputs_exact(monkeypatch)
    loaded = load(file)
    experts = loaded.model.model.layers[1].mlp.experts  # type: ignore[union-attr, index]
    assert not loaded.fallback
    assert isinstance(getattr(experts, "packed", None), QuantisedExperts) is joined
    assert ("not all can be joined" in caplog.text) is not joined
    x, chosen, weights = torch.randn(5, 256), torch.rand(5, 4).argsort(dim=1)[:, :2].contiguous(), torch.rand(5, 2)
    expected = sums_of_float64(theirs.model.layers[1].mlp.experts, x, chosen, weights)
    torch.testing.assert_close(experts(x, chosen, weights).double(), expected, rtol=1e-5, atol=1e-4)
    if joined:
        with monkeypatch.context() as rounding:
            rounding.setattr(QuantisedExperts, "exact", False)
            within = 0.02 * float(expected.abs().max())
            torch.testing.assert_close(experts(x, chosen, weights).double(), expected, rtol=1e-5, atol=within)
    check_served(file, theirs, within=1e-3)


def test_each_rank_computes_its_part_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_cpu_kernels()
    keep_inputs_exact(monkeypatch)
    file = tmp_path / "m.gguf"
    theirs = build_gguf(file, "mixtral", medium_experts, num_hidden_layers=1, **EXPERTS["mixtral"])
    round_weights(theirs, medium_experts)
    models: list[Any] = [load(file, Ranks(rank, 2)).model for rank in (0, 1)]
    x, chosen, weights = torch.randn(3, 256), torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.rand(3, 2)
    parts = [model.model.layers[0].mlp.experts.forward(x, chosen, weights) for model in models]
    expected = sums_of_float64(theirs.model.layers[0].mlp.experts, x, chosen, weights)
    torch.testing.assert_close((parts[0] + parts[1]).double(), expected, rtol=1e-5, atol=1e-4)
    rows = torch.cat([model.model.embed_tokens.own.weight for model in models])
    assert torch.equal(rows, theirs.model.embed_tokens.weight)


def test_each_rank_computes_its_part(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_gguf(tmp_path / "m.gguf", "llama", medium, num_hidden_layers=1)
    theirs = loaded_by_transformers(tmp_path / "m.gguf")
    models: list[Any] = [load(tmp_path / "m.gguf", Ranks(rank, 2)).model for rank in (0, 1)]
    mlp, layers = theirs.model.layers[0].mlp, [model.model.layers[0] for model in models]
    rows = torch.cat([model.model.embed_tokens.own.weight for model in models])
    assert torch.equal(rows, theirs.model.embed_tokens.weight)
    x, inner = torch.randn(3, 256), torch.randn(3, 512)
    halves = [exact(layer.gate_up, x).chunk(2, dim=1) for layer in layers]
    for at, whole in enumerate((mlp.gate_proj, mlp.up_proj)):
        torch.testing.assert_close(torch.cat([half[at] for half in halves], dim=1), whole(x), rtol=1e-4, atol=1e-4)
    parts = [exact(layer.down, part.contiguous()) for layer, part in zip(layers, inner.chunk(2, dim=1), strict=True)]
    torch.testing.assert_close(parts[0] + parts[1], mlp.down_proj(inner), rtol=1e-4, atol=1e-4)


def test_a_model_in_floats_may_be_quantised_while_it_is_loaded(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_gguf(tmp_path / "m.gguf", "llama", "BF16", num_hidden_layers=1)
    loaded = load(tmp_path / "m.gguf", quantization="int4")
    assert isinstance(loaded.model.model.layers[0].down, Int4Linear)  # type: ignore[union-attr, index]
    build_gguf(tmp_path / "q.gguf", "llama", "Q8_0", num_hidden_layers=1)
    for options, why in (
        ({"quantization": "int4"}, "are quantised already"),
        ({"dtype": "bfloat16"}, "in blocks of GGUF, for the CPU in float32: the rest of the model computes in float32"),
    ):
        with pytest.raises(ModelError, match=why):
            load(tmp_path / "q.gguf", **options)


def test_gemma_is_not_divided(tmp_path: Path) -> None:
    build_gguf(tmp_path / "m.gguf", "gemma3", "Q8_0", num_hidden_layers=1, tie_word_embeddings=True, **GEMMA)
    with pytest.raises(ModelError, match="are not divided among ranks"):
        load(tmp_path / "m.gguf", Ranks(0, 2), tensor_parallel=2)


def test_sizes_are_those_of_packed_weights(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    build_gguf(file, "llama", medium, num_hidden_layers=1, tie_word_embeddings=True)
    config, folder = ExecutorConfig(model=str(file), dtype="float32"), make_folder([file])
    weights = {"Q4_K": 256 * (512 * 3 + 256 * 2 + 128), "Q6_K": 256 * (128 + 288)}
    expected = weights["Q4_K"] * 4.625 / 8 + weights["Q6_K"] * 8.5625 / 8 + 288 * 256 * 210 / 256 + 3 * 256 * 4
    assert sizing(config, folder, 8 << 30).weights == expected
    assert stored_bytes(checked_headers(weight_files(str(file), folder)), torch.float32) == expected


def test_damaged_and_incomplete_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    build_gguf(file, "llama", "Q4_K", num_hidden_layers=1, skip="blk.0.ffn_up.weight")
    with pytest.raises(ModelError, match=r"lack 1 weight that the model has: model.layers.0.mlp.up_proj.weight"):
        load(file)
    build_gguf(file, "llama", "Q4_K", num_hidden_layers=1, fields={"feed_forward_length": 256})
    with pytest.raises(
        ModelError, match=r"down_proj.weight has the shape \[256, 512\].* and by its config.json \[256, 256"
    ):
        load(file)
    build_gguf(file, "llama", "TQ2_0", num_hidden_layers=1)
    with pytest.raises(ModelError, match=r"its tensor \S+.weight is in TQ2_0, and GGUF files are served in Q4_0, Q4_1"):
        load(file)
    build_gguf(file, "llama", "Q4_K", num_hidden_layers=1)
    reader = gguf.GGUFReader(file, "r+")
    next(tensor for tensor in reader.tensors if tensor.name == "blk.0.ffn_down.weight").data[0, :2] = 255
    reader.data.flush()
    with pytest.raises(ModelError, match=r"scales of its tensor model.layers.0.mlp.down_proj.weight are not finite"):
        load(file)
