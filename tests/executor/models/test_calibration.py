"""Weights in four bits that are rounded by a text, ``--quantization-text``."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.models import balanced_rounding, calibration, preparation
from pagewise_executor.models.balanced_rounding import add_products, quantise_balanced
from pagewise_executor.models.checkpoint import Checkpoint
from pagewise_executor.models.four_bit_weight import quantise
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from tokenizers import Tokenizer

from tests.cpu_kernels import need_cpu_kernels
from tests.model_builders import build_model

pytest.importorskip("jsonschema")
from tests.structured import VOCAB_SIZE, save_tokenizer

PIECES, PIECE = 2, 48


def error_of(weight: torch.Tensor, x: torch.Tensor, rounded: torch.Tensor) -> float:
    return float((x @ (rounded - weight).T).square().mean() / (x @ weight.T).square().mean())


@pytest.mark.parametrize(("ins", "neighbours"), [(256, 4096), (150, 64), (150, 4096)])
def test_errors_of_inputs_that_go_together_cancel(ins: int, neighbours: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balanced_rounding, "_NEIGHBOURS", neighbours)
    torch.manual_seed(0)
    weight, mixed = torch.randn(40, ins), torch.randn(24, ins) * torch.rand(ins).exp2()
    x, others = (torch.randn(500, 24) @ mixed + 0.1 * torch.randn(500, ins) for _ in range(2))
    x[:, 5] = others[:, 5] = 0
    products = add_products(x[250:], add_products(x[:250]))
    assert len(products) == -(-ins // neighbours)
    made, error = quantise_balanced(weight, products)
    found, alone = made.dequantised(), quantise(weight)[0].dequantised()
    assert error == pytest.approx(float((found - weight).square().sum()), rel=1e-4)
    assert (found - weight).abs().max() < 4 * float(made.scales.max()), "weights of inputs that are 0 stay as well"
    assert error_of(weight, others, found) < (0.6 if neighbours < ins else 0.25) * error_of(weight, others, alone)
    assert torch.equal(quantise_balanced(weight, [torch.zeros(size, size) for size in map(len, products)])[0].codes,
                       quantise(weight)[0].codes)  # fmt: skip


def write_text(path: Path, seed: int, tokens: int = PIECES * PIECE) -> Path:
    path.write_text("".join(random.Random(seed).choices("cdefghij", k=tokens)))
    return path


def load(path: Path, text: Path) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", quantization="int4", quantization_text=str(text)))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Tensor]]:
    """The shapes of the weights that are rounded by inputs, and the products of these."""
    found: list[tuple[torch.Size, torch.Tensor]] = []

    def recorded(weight: torch.Tensor, products: list[torch.Tensor]) -> Any:
        found.append((weight.shape, products[0].clone()))
        return quantise_balanced(weight, products)

    monkeypatch.setattr(calibration, "quantise_balanced", recorded)
    monkeypatch.setattr(calibration, "_PIECE", PIECE)
    return found


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "deepseek_v3", "qwen3_moe"])
def test_layers_are_rounded_by_the_inputs_that_they_have_in_transformers(
    family: str, tmp_path: Path, seen: list[tuple[torch.Size, torch.Tensor]]
) -> None:
    """Of fused layers, which are read one by one, windows, transposed weights, latents, and experts."""
    need_cpu_kernels()
    model = build_model(family, tmp_path, vocab_size=VOCAB_SIZE, tie_word_embeddings=family == "llama")
    save_tokenizer(tmp_path)
    text = write_text(tmp_path / "text", 0)
    inputs: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...]) -> None:
        inputs.append(x := args[0].flatten(0, -2))
        for expert, weight in enumerate(getattr(module, "gate_up_proj", [])):
            rows = x[(args[1] == expert).any(dim=1)]
            gate, up = (rows @ weight.T).chunk(2, dim=-1)
            inputs.extend([rows, torch.nn.functional.silu(gate) * up])

    for name, module in model.named_modules():
        if ".layers." in name or ".h." in name:
            linear = type(module).__name__ in ("Linear", "Conv1D")
            if linear or isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter):
                module.register_forward_pre_hook(keep)
    ids = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text.read_text()).ids
    with torch.no_grad():
        model(torch.tensor(ids).view(PIECES, PIECE))
    load(tmp_path, text)
    expected = [x.T @ x for x in inputs]
    assert len(seen) > 11
    for shape, products in seen:
        same_size, least = [x for x in expected if x.shape == products.shape], 1e-3 * float(products.diagonal().mean())
        assert any(torch.allclose(x, products, rtol=2e-3, atol=least) for x in same_size), shape


def test_a_layer_is_quantised_before_the_next_one_is_read_and_always_alike(
    tmp_path: Path, seen: list[tuple[torch.Size, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    need_cpu_kernels()
    build_model("llama", tmp_path, vocab_size=VOCAB_SIZE)
    save_tokenizer(tmp_path)
    steps: list[str] = []
    read, replace = Checkpoint.read, preparation.replace_linears

    def reading(self: Checkpoint, part: str, dtype: torch.dtype) -> None:
        steps.append(f"read {part}")
        read(self, part, dtype)

    def replacing(*args: Any, **options: Any) -> int:
        steps.append(f"replace {args[4]}")
        return replace(*args, **options)

    monkeypatch.setattr(Checkpoint, "read", reading)
    monkeypatch.setattr(preparation, "replace_linears", replacing)
    first = load(tmp_path, write_text(tmp_path / "text", 0))
    layers = [f"{step} model.layers.{layer}" for layer in range(3) for step in ("read", "replace")]
    assert [step for step in steps if ".layers." in step] == layers
    assert steps[-len(layers) :] == layers
    monkeypatch.undo()
    monkeypatch.setattr(calibration, "_PIECE", PIECE)
    same, other = (load(tmp_path, write_text(tmp_path / "text", seed)) for seed in (0, 1))
    assert re.search("-int4-[0-9a-f]{8}$", first.fingerprint)
    assert first.fingerprint == same.fingerprint != other.fingerprint


def test_texts_that_cannot_be_used(tmp_path: Path) -> None:
    need_cpu_kernels()
    build_model("llama", tmp_path, vocab_size=VOCAB_SIZE)
    text = write_text(tmp_path / "text", 0, 511)
    with pytest.raises(ModelError, match=r"--quantization-text .*text: tokenizer.json of .* cannot be read"):
        load(tmp_path, text)
    save_tokenizer(tmp_path)
    with pytest.raises(ModelError, match=r"text has 511 tokens of .*, and 512 are needed, better 4096"):
        load(tmp_path, text)
    for wrong in (tmp_path / "missing", tmp_path, tmp_path / "binary"):
        (tmp_path / "binary").write_bytes(b"\xff\xfe")
        with pytest.raises(ModelError, match=f"--quantization-text {wrong} cannot be read as text in UTF-8: "):
            load(tmp_path, wrong)
