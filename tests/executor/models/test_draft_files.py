"""Draft models that are no draft models, or none of the model that is served, are refused with the reason."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_shared.errors import ModelError
from safetensors.torch import load_file, save_file

from tests.draft_models import build_head, quantise_head
from tests.executor.runners import build_runner
from tests.four_bit_checkpoints import FORMS as FOUR_BITS
from tests.model_builders import build_model
from tests.quantised_checkpoints import FORMS


def eagle3(head: Path) -> str:
    return json.dumps({"method": "eagle3", "model": str(head)})


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("llama", {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}, "has no embedding"),
        ("llama", {"num_hidden_layers": 2}, "inputs of layers"),
        ("llama", {"vocab_size": 90}, "d2t names tokens outside"),
        ("llama", {}, "multi-token prediction"),
        ("glm4_moe", {}, "neither mtp.fc nor model.layers.3.eh_proj"),
        ("qwen3_5", {"num_key_value_heads": 1}, "K and V of another shape than the model"),
    ],
)
def test_draft_models_that_do_not_fit_are_refused(
    tmp_path: Path, family: str, settings: dict[str, Any], why: str
) -> None:
    build_model(family, tmp_path / "model", **settings)
    build_head(tmp_path / "head", eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    with pytest.raises(ModelError, match=why):
        build_runner(
            tmp_path / "model", speculative_config=eagle3(tmp_path / "head") if settings else '{"method": "mtp"}'
        )


def in_eight_bits(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight.to(torch.float8_e4m3fn) if weight.ndim == 2 else weight for name, weight in weights.items()}


WRONG_HEADS: list[tuple[dict[str, Any], Any, str]] = [
    ({"intermediate_size": 64}, None, r"is no EAGLE-3 head for this model: its weight midlayer.mlp.*, not \[48, 64\]"),
    ({"num_hidden_layers": 2}, None, "2 layers"),
    ({"num_attention_heads": 0}, None, "config.json is of no EAGLE-3 head: Expected `int` >= 1"),
    ({"transformer_layer_config": 3}, None, "config.json is of no EAGLE-3 head: Expected `object`"),
    ({"target_hidden_size": 64}, None, "is for a model with 64 numbers in a state, not 48"),
    (
        {},
        lambda one: one | {"embed_tokens.weight": torch.ones(100, 48)},
        "embed_tokens.* not .199",
    ),
    ({}, lambda one: one | {"d2t": one["d2t"][:, None]}, "d2t is no list"),
    ({}, lambda one: {name: one[name] for name in one if name != "d2t"}, "has no d2t"),
    ({}, lambda one: one | {"norm.weight": torch.full((48,), torch.nan)}, "norm.weight .* not finite"),
    ({}, in_eight_bits, "is of type F8_E4M3, and its config.json has no quantization_config"),
    ({"quantization_config": {"quant_method": "bitsandbytes"}}, None, "quant_method 'bitsandbytes'"),
]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build_model("llama", path)
    return path


@pytest.mark.parametrize(("settings", "change", "why"), WRONG_HEADS)
def test_heads_with_other_weights_or_settings_are_refused(
    llama: Path, tmp_path: Path, settings: dict[str, Any], change: Any, why: str
) -> None:
    build_head(tmp_path, **settings)
    if change is not None:
        save_file(change(load_file(tmp_path / "model.safetensors")), tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"--speculative-config: .*{why}"):
        build_runner(llama, speculative_config=eagle3(tmp_path))


def test_folders_without_a_head_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "head"
    for prepare, why in (
        (lambda: None, "no such model"),
        (folder.mkdir, "has no config.json"),
        (partial(build_head, folder), ""),
        (lambda: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "convert it: python -c"),
        ((folder / "config.json").unlink, "no model directory|convert it"),
    ):
        prepare()
        if why:
            with pytest.raises(ModelError, match=f"--speculative-config: .*({why})"):
                build_runner(llama, speculative_config=eagle3(folder))


def test_a_head_in_four_bits_is_refused_where_they_cannot_be_computed(llama: Path, tmp_path: Path) -> None:
    build_head(tmp_path / "head")
    quantise_head(tmp_path / "head", FOUR_BITS["awq"])
    with pytest.raises(ModelError, match=r"-config: .*head: its weights are in four bits: .*not in bfloat16"):
        build_runner(llama, dtype="bfloat16", speculative_config=eagle3(tmp_path / "head"))


def test_a_head_with_invalid_scales_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    build_head(tmp_path / "head")
    quantise_head(tmp_path / "head", FORMS["fp8 per tensor"])
    weights = load_file(tmp_path / "head" / "model.safetensors")
    weights["fc.input_scale"] = torch.zeros(1)
    save_file(weights, tmp_path / "head" / "model.safetensors")
    with pytest.raises(ModelError, match=r"-config: .*head cannot be loaded: input_scale of a layer is 0.0"):
        build_runner(llama, speculative_config=eagle3(tmp_path / "head"))
