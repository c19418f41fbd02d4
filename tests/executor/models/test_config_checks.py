"""A config.json with values that cannot be is refused by a sentence that names the key, before a module is made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from pagewise_executor.models.config_checks import unusable_size
from pagewise_executor.models.loader import load_model
from pagewise_executor.sizing import main
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from safetensors.torch import save_file

from tests.every_causal_lm import causal_lms, tiny_config
from tests.model_builders import need_states

SIZE = "and not a positive whole number"


def refused(kind: str, changes: dict[str, Any], path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence by which ``pagewise size`` and an executor refuse a tiny model whose config.json is changed."""
    config = tiny_config(kind)
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(path)
    settings = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(settings))
    save_file({"unused": torch.zeros(1)}, path / "model.safetensors")
    assert main([str(path), "--gpu-memory", "80GiB"]) == 1
    printed = capsys.readouterr().err.strip()
    with pytest.raises(ModelError) as error:
        load_model(ExecutorConfig(model=str(path), device="cpu", dtype="float32"))
    assert printed == f"pagewise size: {error.value}"
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("mistral", {"sliding_window": -5}, f"sliding_window is -5, {SIZE}"),
        ("gemma3_text", {"sliding_window": 0}, f"sliding_window is 0, {SIZE}"),
        ("mistral", {"sliding_window": 2.5}, f"sliding_window is 2.5, {SIZE}"),
        ("gpt_oss", {"sliding_window": "9"}, f"sliding_window is '9', {SIZE}"),
        ("llama4_text", {"attention_chunk_size": -16}, f"attention_chunk_size is -16, {SIZE}"),
        ("llama", {"num_key_value_heads": 0}, f"num_key_value_heads is 0, {SIZE}"),
        ("llama", {"num_key_value_heads": 3}, "num_attention_heads is 4, and no multiple of num_key_value_heads"),
        ("gemma4_text", {"num_global_key_value_heads": 3}, "no multiple of num_global_key_value_heads, which is 3"),
        ("mixtral", {"head_dim": 0}, f"head_dim is 0, {SIZE}"),
        ("mixtral", {"hidden_size": "64"}, f"hidden_size is '64', {SIZE}"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and at most 10,000 is served"),
        ("mixtral", {"intermediate_size": 10**30}, "and at most 2,147,483,647 is served"),
        ("mixtral", {"num_local_experts": 1}, "num_experts_per_tok is 2, and not from 1 to num_local_experts"),
        ("gpt_oss", {"num_local_experts": 0}, f"num_local_experts is 0, {SIZE}"),
        ("deepseek_v3", {"n_routed_experts": 0}, f"n_routed_experts is 0, {SIZE}"),
        ("llama4_text", {"no_rope_layers": [1]}, "no_rope_layers is [1], with fewer entries than num_hidden_layers"),
        ("deepseek_v3", {"n_group": 3}, "n_routed_experts is 4, and no multiple of n_group, which is 3"),
        ("deepseek_v3", {"kv_lora_rank": 0}, f"kv_lora_rank is 0, {SIZE}"),
        ("granitemoehybrid", {"mamba_n_heads": 0}, f"mamba_n_heads is 0, {SIZE}"),
        ("gemma2", {"query_pre_attn_scalar": -1}, f"query_pre_attn_scalar is -1, {SIZE}"),
        ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta of RoPE is 0, and not"),
        ("mixtral", {"rope_parameters": "x"}, "rope_parameters is 'x', and not an object"),
        ("llama", {"quantization_config": "fp8"}, "quantization_config is 'fp8', and not an object"),
        ("mixtral", {"text_config": 5}, "text_config is 5, and not an object"),
        ("mixtral", {"architectures": 5}, "architectures is 5, and not a list"),
        ("mixtral", {"dtype": "float99"}, "dtype is 'float99', and no type of floating-point numbers"),
    ],
)
def test_values_that_cannot_be(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(kind, changes, tmp_path, capsys)
    assert "config.json is unusable: " in error
    assert said in error


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gemma3_text", {"layer_types": ["full_attention"]}, "`num_hidden_layers` (4) must be equal to the number of"),
        ("gemma3_text", {"layer_types": ["what"] * 4}, "The `layer_types` entries must be in"),
        ("mixtral", {"rms_norm_eps": "x"}, "Field 'rms_norm_eps' expected float, got str (value: 'x')"),
    ],
)
def test_what_transformers_finds_is_told_in_its_words(
    kind: str, changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(kind, changes, tmp_path, capsys)
    assert f"config.json is unusable: {said}" in error
    assert "StrictDataclass" not in error
    assert "validation error" not in error.lower()


def test_errors_of_a_models_own_code_are_told_with_their_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused("mixtral", {"hidden_act": "nope"}, tmp_path / "activation", capsys)
    assert "(model_type mixtral) cannot be built with paged attention: KeyError: 'nope'" in error
    need_states()
    error = refused("zamba2", {"hybrid_layer_ids": [0, 2]}, tmp_path / "zamba2", capsys)
    assert "(model_type zamba2) cannot be tried without its weights: KeyError: 1" in error


def test_layers_may_have_no_experts() -> None:
    for kind in ("qwen3_moe", "granitemoehybrid"):
        key = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
        assert not unusable_size(transformers.CONFIG_MAPPING[kind](**{key: 0}))


def test_no_configuration_of_transformers_is_unusable() -> None:
    """Whose defaults are the sizes of models that people have, and have 0 or none where that means something."""
    wrong = {}
    for kind, made in causal_lms().items():
        try:
            config = made().get_text_config(decoder=True)
        except StrictDataclassError:  # its default is refused by itself, in the oldest transformers of more kinds
            continue
        if why := unusable_size(config):
            wrong[kind] = why
    assert wrong == {"xlnet": "max_position_embeddings is -1, and not a positive whole number"}
