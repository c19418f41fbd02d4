"""Models of Llama's structure are loaded without transformers, and compute exactly the same results as with it."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from pagewise_executor.models import loader
from pagewise_executor.models.families import llama_checkpoint, read_llama_config
from pagewise_executor.models.llama import LlamaForCausalLM
from pagewise_executor.models.llama_config import NotReadableError
from pagewise_executor.models.weight_files import checked_headers, weight_files
from pagewise_shared.config import ExecutorConfig

from tests.executor.runners import tokens_and_logprobs
from tests.model_builders import FUSED, build_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 1000.0,
}
VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((family, {}) for family in FUSED),
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"head_dim": 20, "num_key_value_heads": 4}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3, "rope_theta": 500_000}}),
    ("mistral", {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 2, "attention_bias": True}),
]


def edit(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change config.json in place."""
    settings = json.loads((path / "config.json").read_text())
    change(settings)
    (path / "config.json").write_text(json.dumps(settings))


def edit_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the weights in place."""
    weights = safetensors.torch.load_file(path / "model.safetensors")
    change(weights)
    safetensors.torch.save_file(weights, path / "model.safetensors", {"format": "pt"})


def load(path: Path) -> torch.nn.Module:
    return loader.load_model(ExecutorConfig(model=str(path), device="cpu")).model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "settings"), VARIANTS)
def test_it_computes_exactly_what_it_computes_when_transformers_loads_it(
    family: str, settings: dict[str, object], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(family, tmp_path, **settings)
    assert isinstance(load(tmp_path), LlamaForCausalLM)
    own = tokens_and_logprobs(tmp_path, dtype)
    monkeypatch.setattr(loader, "llama_checkpoint", lambda *_: None)
    assert not isinstance(load(tmp_path), LlamaForCausalLM)
    assert own == tokens_and_logprobs(tmp_path, dtype)


@pytest.mark.parametrize(("family", "settings"), VARIANTS)
def test_its_configuration_means_what_it_means_to_transformers(
    family: str, settings: dict[str, object], tmp_path: Path
) -> None:
    theirs = build_model(family, tmp_path, **settings)
    config = read_llama_config(tmp_path)
    assert config.head_dim is not None
    frequencies = config.rope_parameters.frequencies(config.head_dim)
    assert torch.equal(frequencies, theirs.model.rotary_emb.inv_freq)
    attention = [layer.self_attn for layer in theirs.model.layers]
    in_config = theirs.config.sliding_window if family == "mistral" else None
    assert config.windows == [getattr(one, "sliding_window", in_config) for one in attention]


@pytest.mark.parametrize(
    "scaling",
    [None, {"type": "linear", "factor": 2.0}, {key: value for key, value in LLAMA3.items() if key != "rope_theta"}],
)
def test_what_transformers_4_wrote_about_rope_means_the_same(scaling: dict[str, object] | None, tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    edit(tmp_path, lambda settings: settings.pop("rope_parameters"))
    edit(tmp_path, lambda settings: settings.update(rope_theta=20000.0, rope_scaling=scaling, torch_dtype="bfloat16"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    config = read_llama_config(tmp_path)
    assert torch.equal(config.rope_parameters.frequencies(12), theirs.model.rotary_emb.inv_freq)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"hidden_act": "gelu"}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("llama", {"rope_parameters": LLAMA3 | {"no_such_key": 1}}),
        ("llama", {"no_such_key": 1}),
        ("llama", {"pretraining_tp": 2}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}),
        ("llama", {"sliding_window": 16}),
        ("llama", {"num_key_value_heads": None}),
        ("llama", {"num_attention_heads": 5}),
        ("llama", {"rms_norm_eps": "0.1"}),
        ("qwen2", {"attention_bias": True}),
        ("qwen2", {"use_mrope": True}),
        ("qwen2", {"layer_types": ["full_attention"]}),
        ("qwen3", {"head_dim": None}),
        ("gemma2", {}),
    ],
)
def test_what_is_unusual_is_left_to_transformers(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    build_model(family, tmp_path)
    edit(tmp_path, lambda read: read.update(settings))
    with pytest.raises(NotReadableError):
        read_llama_config(tmp_path)


@pytest.mark.parametrize("key", ["tie_word_embeddings", "num_key_value_heads", "vocab_size", "sliding_window"])
def test_nothing_is_taken_for_granted(key: str, tmp_path: Path) -> None:
    build_model("mistral", tmp_path)
    edit(tmp_path, lambda settings: settings.pop(key))
    with pytest.raises(NotReadableError):
        read_llama_config(tmp_path)


def test_the_device_does_not_matter(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    headers = checked_headers(weight_files("", tmp_path))
    checkpoint = llama_checkpoint(ExecutorConfig(model=str(tmp_path)), tmp_path, headers, torch.device("meta"), None)
    assert checkpoint is not None


def test_an_adapter_is_left_to_transformers(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    read_llama_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(NotReadableError, match="adapter"):
        read_llama_config(tmp_path)


def test_the_log_says_why_transformers_loads_a_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    edit(tmp_path, lambda settings: settings.update(no_such_key=1))
    with caplog.at_level(logging.INFO):
        assert not isinstance(load(tmp_path), LlamaForCausalLM)
    assert "no_such_key" in caplog.text


def test_weights_of_other_names_or_shapes_are_left_to_transformers(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    name = "model.layers.1.mlp.up_proj.weight"
    own: list[Callable[[dict[str, torch.Tensor]], object]] = [
        lambda weights: weights.update({"model.rotary_emb.inv_freq": torch.ones(6)}),  # old checkpoints have these
        lambda weights: weights.update({name: weights[name].double()}),
        lambda weights: weights.update({name: weights[name].bfloat16()}),
    ]
    for change in own:
        (tmp_path / "model.safetensors").write_bytes(whole)
        edit_weights(tmp_path, change)
        assert isinstance(load(tmp_path), LlamaForCausalLM)
    (tmp_path / "model.safetensors").write_bytes(whole)
    edit_weights(tmp_path, lambda weights: weights.update(another=torch.ones(1)))
    assert not isinstance(load(tmp_path), LlamaForCausalLM)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    model = build_model("llama", tmp_path)
    one = load(tmp_path).state_dict()
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    several = load(tmp_path)
    assert isinstance(several, LlamaForCausalLM)
    assert all(torch.equal(one[name], weight) for name, weight in several.state_dict().items() if not weight.is_meta)


def test_weights_do_not_depend_on_their_file_any_more(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    model = load(tmp_path)
    before = model.get_parameter("model.embed_tokens.weight").clone()
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\0" * file.stat().st_size)
    assert torch.equal(model.get_parameter("model.embed_tokens.weight"), before)


def test_an_executor_starts_and_computes_without_transformers_and_compilers(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    code = (
        "import sys; from pagewise_executor.main import build_runner; "
        "from pagewise_executor.profile import profile_run; from pagewise_shared.config import ExecutorConfig; "
        "runner = build_runner(ExecutorConfig(model=sys.argv[1], device='cpu', num_blocks=64)); "
        "profile_run(runner, 100); runner.close(); "
        "kept_out = {'transformers', 'torch._dynamo', 'torch._inductor', 'triton', 'sympy', 'huggingface_hub'}; "
        "loaded = kept_out & set(sys.modules); assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
