"""Checkpoints that are not whole, or differ from their config.json: refused with the names of the weights."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pagewise_executor.collectives import ALONE, Ranks
from pagewise_executor.models.llama import LlamaForCausalLM
from pagewise_executor.models.loader import LoadedModel, load_model
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from safetensors.torch import load_file, save_file

from tests.model_builders import FAMILIES, OTHERS, build_model
from tests.quantised_checkpoints import FORMS, build_quantised, edit_config

Weights = dict[str, torch.Tensor]
FIRST_OF_TWO = Ranks(0, 2)


def load(path: Path, ranks: Ranks = ALONE, **options: Any) -> LoadedModel:
    return load_model(ExecutorConfig(model=str(path), device="cpu", kernels="torch", **options), ranks)


def refused(path: Path, ranks: Ranks = ALONE, **options: Any) -> str:
    with pytest.raises(ModelError) as error:
        load(path, ranks, **options)
    text = str(error.value)
    assert "\n" not in text
    return text


def edit_weights(path: Path, change: Callable[[Weights], Weights], file: str = "model.safetensors") -> None:
    save_file({name: weight.clone() for name, weight in change(load_file(path / file)).items()}, path / file)


def without(*parts: str) -> Callable[[Weights], Weights]:
    return lambda weights: {name: one for name, one in weights.items() if not any(part in name for part in parts)}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ---- weights that are missing ------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_models_of_all_families_are_served_whole_and_refused_without_one_of_their_weights(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for tied in (True, False):
        build_model(family, tmp_path, tie_word_embeddings=tied)
        load(tmp_path)
    assert not warnings_of(caplog), "neither tied weights nor buffers are false alarms"
    whole = load_file(tmp_path / "model.safetensors")
    last = [name for name in whole if ".2." in name][-1]
    [head] = (name for name in whole if name.startswith(("lm_head", "embed_out")))
    norm = next(name for name in whole if name.endswith(("norm.weight", "ln_1.weight")))
    for lost in (last, head, norm):
        edit_weights(tmp_path, lambda weights, lost=lost: without(lost)(whole))  # type: ignore[misc]
        text = refused(tmp_path)
        assert "its files lack 1 weight that the model has: " in text
        assert lost in text or lost.replace("embed_out", "lm_head") in text, "which of both depends on transformers"
    edit_weights(tmp_path, lambda _: {f"wrapped.{name}": weight for name, weight in whole.items()})
    text = refused(tmp_path)
    assert " more; they have " in text
    assert "that it has no place for: wrapped." in text


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_each_rank_refuses_weights_that_are_missing_or_have_another_shape_in_the_whole_model(
    family: str, tmp_path: Path
) -> None:
    """A part of a weight that is too large would look like one of the right size."""
    build_model(family, tmp_path)
    load(tmp_path, FIRST_OF_TWO)
    edit_config(tmp_path, vocab_size=150)
    assert "has the shape [199, 48]" in refused(tmp_path, FIRST_OF_TWO)
    edit_config(tmp_path, vocab_size=199, num_key_value_heads=1)
    assert "layers.0.self_attn.k_proj.weight has the shape" in refused(tmp_path, FIRST_OF_TWO)
    edit_config(tmp_path, num_key_value_heads=2)
    edit_weights(tmp_path, without("layers.2."))
    assert "model.layers.2.input_layernorm.weight" in refused(tmp_path, FIRST_OF_TWO)


def test_mixtures_without_a_weight_of_one_expert_are_refused(tmp_path: Path) -> None:
    build_model("qwen3_moe", tmp_path)
    lost = "model.layers.1.mlp.experts.2.gate_proj.weight"
    edit_weights(tmp_path, without(lost))
    for ranks in (ALONE, FIRST_OF_TWO):
        assert f"lack 1 weight that the model has: {lost}" in refused(tmp_path, ranks)
    edit_weights(tmp_path, without("model.layers.1.mlp.experts.3"))
    edit_weights(tmp_path, without("model.layers.1.mlp.experts.2"))
    assert "model.layers.1.mlp.experts.down_proj has the shape [2, 48, 32], and by its config.json [4," in refused(
        tmp_path
    )


@pytest.mark.parametrize(("family", "form"), [("llama", "fp8 of deepseek"), ("qwen3_moe", "int8 weights")])
def test_quantised_checkpoints_that_are_not_whole_are_refused(
    family: str, form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_quantised(FORMS[form], tmp_path, family)
    whole = load_file(tmp_path / "model.safetensors")
    layer = [name for name in whole if name.startswith("model.layers.1.self_attn.o_proj.")]
    for lost in [*layer, "lm_head.weight", "model.norm.weight"]:
        edit_weights(tmp_path, lambda _, lost=lost: without(lost)(whole))  # type: ignore[misc]
        assert (
            f"its files lack 1 weight that the model has: {lost.replace('_packed', '').removesuffix('_inv')}"
            in refused(tmp_path)
        )
    edit_weights(tmp_path, lambda _: {f"wrapped.{name}": weight for name, weight in whole.items()})
    assert "model.layers.0." in refused(tmp_path)
    scale = next(name for name in layer if "weight_scale" in name)
    edit_weights(tmp_path, lambda _: whole | {scale: torch.ones(3, 3)})
    assert f"its weight {scale} has the shape [3, 3]" in refused(tmp_path)
    edit_weights(tmp_path, lambda _: whole | {scale: whole[scale] * float("nan")})
    assert f"its weight {scale} in {tmp_path / 'model.safetensors'} has values that are not finite" in refused(tmp_path)
    edit_weights(tmp_path, lambda _: whole | {"model.layers.0.self_attn.o_proj.weight_scale_2": torch.ones(1)})
    assert "o_proj.weight_scale_2 is none that is known of this layer" in refused(tmp_path)
    caplog.clear()
    edit_weights(
        tmp_path, lambda _: {n.removeprefix("model."): w for n, w in whole.items()} | {"score.weight": torch.ones(2)}
    )
    load(tmp_path)
    assert "no place for 1 tensor of its files, which are not used: score.weight" in caplog.text


def test_fp8_values_that_are_no_numbers_are_found(tmp_path: Path) -> None:
    build_quantised(FORMS["fp8 per channel"], tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(weights: Weights) -> Weights:
        codes = weights[name].view(torch.uint8)
        codes[3, 5] = 0xFF
        return weights | {name: codes.view(torch.float8_e4m3fn)}

    edit_weights(tmp_path, spoil)
    assert f"its weight {name} in " in refused(tmp_path)


def test_tensors_that_are_not_used_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: weights | {"score.weight": torch.ones(1, 48), "v_head.bias": torch.ones(1)})
    load(tmp_path)
    assert "no place for 2 tensors of its files, which are not used: score.weight, v_head.bias" in caplog.text
    assert "LOAD REPORT" not in caplog.text, "one line says it"


def test_names_without_the_prefix_of_the_decoder_are_those_of_a_decoder_alone(tmp_path: Path) -> None:
    for family in ("llama", "gemma2", "gpt2"):
        build_model(family, tmp_path / family, tie_word_embeddings=True)
        before = load(tmp_path / family).model.state_dict()
        edit_weights(
            tmp_path / family,
            lambda weights: {n.removeprefix("model.").removeprefix("transformer."): w for n, w in weights.items()},
        )
        after = load(tmp_path / family).model.state_dict()
        assert all(torch.equal(before[name], weight) for name, weight in after.items())


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification", "RewardModel"])
def test_models_with_heads_of_another_kind_are_refused(kind: str, tmp_path: Path) -> None:
    build_model("qwen2", tmp_path, tie_word_embeddings=True)
    edit_config(tmp_path, architectures=[f"Qwen2For{kind}"])
    assert f"is a Qwen2For{kind}, whose head does not predict tokens" in refused(tmp_path)


def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    """Whether transformers adds it depends on whether PEFT is installed."""
    build_model("llama", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "has an adapter_config.json beside its weights: remove that file" in refused(tmp_path)


# ---- heads that are tied to the embedding ------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "family", "ranks"),
    [
        (None, "llama", ALONE),
        (None, "llama", FIRST_OF_TWO),
        (None, "gemma2", ALONE),
        (None, "gemma2", FIRST_OF_TWO),
        ("fp8 of deepseek", "llama", ALONE),
        ("fp8 of deepseek", "llama", FIRST_OF_TWO),
        ("int8 per channel", "gemma2", ALONE),
    ],
)
def test_the_head_of_a_tied_model_may_be_in_the_files(
    form: str | None, family: str, ranks: Ranks, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if form is None:
        build_model(family, tmp_path, tie_word_embeddings=True)
    else:
        build_quantised(FORMS[form], tmp_path, family, tie_word_embeddings=True)
    whole = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in whole
    embedding = whole.pop("model.embed_tokens.weight")

    def head_and_embedding(found: Weights) -> tuple[torch.Tensor, torch.Tensor]:
        edit_weights(tmp_path, lambda _: whole | found)
        loaded = load(tmp_path, ranks)
        part = loaded.model.get_submodule("model.embed_tokens")
        own = getattr(part, "own", part)
        return loaded.model.get_submodule("lm_head").forward(torch.eye(48)).T, own.weight

    both = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    for found in (both, {"lm_head.weight": embedding}, {"model.embed_tokens.weight": embedding}):
        head, own = head_and_embedding(found)
        torch.testing.assert_close(head, embedding[: len(head)])
        assert torch.equal(own, embedding[: len(own)])
    assert "have others" not in caplog.text
    head, own = head_and_embedding(both | {"lm_head.weight": embedding + 1})
    torch.testing.assert_close(head, (embedding + 1)[: len(head)])
    assert torch.equal(own, embedding[: len(own)])
    edit_weights(tmp_path, lambda _: whole)
    assert "model.embed_tokens.weight" in refused(tmp_path, ranks)


# ---- files and config.json that disagree -------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"vocab_size": 300}, "lm_head.weight has the shape [199, 48] in {}, and by its config.json [300, 48]; 1 more"),
        (
            {"intermediate_size": 64},
            "layers.0.mlp.down_proj.weight has the shape [48, 80] in {}, and by its config.json [48, 64]",
        ),
        ({"num_hidden_layers": 4}, "lack 9 weights that the model has: model.layers.3.input_layernorm.weight, "),
        ({"num_key_value_heads": 4}, "layers.0.self_attn.k_proj.weight has the shape [24, 48] in {}"),
        ({"attention_bias": True}, "lack 12 weights that the model has: model.layers.0.self_attn.k_proj.bias, "),
    ],
)
def test_a_config_that_asks_for_another_model_is_refused(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    edit_config(tmp_path, **settings)
    assert said.format(tmp_path / "model.safetensors") in refused(tmp_path)


def test_a_config_with_fewer_layers_serves_these_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    edit_config(tmp_path, num_hidden_layers=2)
    load(tmp_path)
    assert (
        "no place for 9 tensors of its files, which are not used: model.layers.2.input_layernorm.weight" in caplog.text
    )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_types_of_weights(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    mixed = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
    edit_weights(tmp_path, lambda _: {key: one.to(mixed[n % 4]) for n, (key, one) in enumerate(whole.items())})
    assert {weight.dtype for weight in load(tmp_path).model.parameters()} == {torch.float32}
    for dtype, kind in ((torch.float8_e4m3fn, "F8_E4M3"), (torch.int8, "I8"), (torch.int32, "I32")):
        edit_weights(tmp_path, lambda _, dtype=dtype: whole | {name: whole[name].to(dtype)})  # type: ignore[misc]
        text = refused(tmp_path)
        assert (
            f"its weight {name} in {tmp_path / 'model.safetensors'} is of type {kind}, and its config.json has no"
            in text
        )


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(family: str, value: float, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    name = "model.layers.1.self_attn.o_proj.weight"

    def spoil(weights: Weights) -> Weights:
        weights[name][7, 3] = value
        return weights

    edit_weights(tmp_path, spoil)
    assert f"its weight {name} in {tmp_path / 'model.safetensors'} has values that are not finite" in refused(tmp_path)


def test_weights_beyond_the_range_of_the_type_are_refused(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    edit_weights(tmp_path, lambda weights: weights | {"lm_head.weight": weights["lm_head.weight"] * 1e7})
    load(tmp_path, dtype="bfloat16")
    assert "lm_head.weight" in (text := refused(tmp_path, dtype="float16"))
    assert "not finite in float16" in text
    assert "--dtype bfloat16" in text


def test_matrices_of_zeros_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    build_model("llama", tmp_path)
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight")
    edit_weights(tmp_path, lambda weights: weights | {name: torch.zeros_like(weights[name]) for name in names})
    load(tmp_path)
    assert all(f"1 weight is zero throughout: {name}" in caplog.text for name in names)


# ---- files that are damaged, stale, or there twice ---------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    model = build_model("gemma2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    return tmp_path


def place_of(name: str, path: Path) -> str:
    index: dict[str, str] = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    return index[name]


def test_a_shard_that_lacks_what_the_index_says_is_named(shards: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    own = place_of(name, shards)
    other = next(file.name for file in sorted(shards.glob("*.safetensors")) if file.name != own)
    weight = load_file(shards / own)[name]
    edit_weights(shards, without(name), own)
    assert refused(shards).endswith(
        f"lack 1 weight that the model has: {name}; model.safetensors.index.json says that {name} is in {own}, which "
        "does not have it: download that file again"
    )
    edit_weights(shards, lambda weights: weights | {name: weight}, other)
    load(shards)
    edit_weights(shards, lambda weights: weights | {name: weight}, own)
    load(shards)
    edit_weights(shards, lambda weights: weights | {name: weight + 1}, own)
    text = refused(shards)
    assert f"have different tensors {name}" in text
    assert own in text
    assert other in text


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_of_a_single_file_and_an_index_the_file_is_read_as_by_transformers(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(family, tmp_path)
    before = load(tmp_path).fingerprint
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    (tmp_path / "consolidated.safetensors").write_bytes(b"no such file is read")
    assert load(tmp_path).fingerprint == before
    assert "has model.safetensors as well as model.safetensors.index.json: only the former is read" in caplog.text


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_errors_name_the_file_that_is_damaged(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged, said in (
        (whole[:-100], "is truncated"),
        (whole + b"more", "cannot be loaded: "),
        (whole.replace(b'"dtype":"F32"', b'"dtype":"F16"', 1), "cannot be loaded: "),
        (whole.replace(b'"shape"', b'"shopa"', 1), "its header cannot be read"),
        (whole.replace(b'"shape":[199,48]', b'"shape":"99,48"]', 1), "its header cannot be read"),
        (whole.replace(b'"dtype":"F32"', b'"dtype":12345', 1), "its header cannot be read"),
    ):
        file.write_bytes(damaged)
        text = refused(tmp_path)
        assert text.startswith(str(file))
        assert said in text


def edit_header(path: Path, **changes: object) -> None:
    """Change the entry of each tensor in the header of a file."""
    text = path.read_bytes()
    start = 8 + int.from_bytes(text[:8], "little")
    header = {name: {**tensor, **changes} for name, tensor in json.loads(text[8:start]).items()}
    header.pop("__metadata__", None)
    new = json.dumps(header).encode()
    path.write_bytes(len(new).to_bytes(8, "little") + new + text[start:])


@pytest.mark.parametrize("offsets", [["a", "b"], [], [0], {}, None, "ab", 5, [0, None]])
def test_headers_that_make_no_sense_are_refused(offsets: object, tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    edit_header(tmp_path / "model.safetensors", data_offsets=offsets)
    assert "model.safetensors is no safetensors file: its header cannot be read" in refused(tmp_path)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "model.safetensors is a pointer of Git LFS, and not the weights: run git lfs pull" in refused(tmp_path)
    file.unlink()
    file.symlink_to(tmp_path / "blobs" / "absent")
    assert "model.safetensors cannot be read: No such file" in refused(tmp_path)
    file.unlink()
    file.mkdir()
    assert "model.safetensors cannot be read: Is a directory" in refused(tmp_path)


@pytest.mark.parametrize("index", [[], {"weight_map": ["a"]}, {"weight_map": {"a": 5}}, {"weight_map": {"a": ["x"]}}])
def test_a_stale_index_of_any_form_does_not_hide_missing_weights(index: object, tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    edit_weights(tmp_path, without("model.norm"))
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "its files lack 1 weight that the model has: model.norm.weight" in refused(tmp_path)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_values_of_a_config_that_make_no_sense_end_in_one_sentence(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    whole = (tmp_path / "config.json").read_text()
    for name, value in {
        "vocab_size": 0,
        "num_hidden_layers": 0,
        "hidden_size": None,
        "num_attention_heads": "4",
        "num_key_value_heads": 0,
        "max_position_embeddings": -3,
        "model_type": ["llama"],
        "rope_parameters": [1],
        "text_config": {"tie_word_embeddings": False},
    }.items():
        edit_config(tmp_path, **{name: value})
        text = refused(tmp_path)
        if name in ("vocab_size", "hidden_size", "num_attention_heads", "max_position_embeddings"):
            assert f"{name}" in text
        (tmp_path / "config.json").write_text(whole)


def test_an_executor_ends_with_one_sentence(tmp_path: Path) -> None:
    build_model("gpt2", tmp_path)
    edit_weights(tmp_path, without("transformer.h.1.mlp.c_fc.bias"))
    command = [sys.executable, "-c", "import sys; from pagewise_executor.main import main; sys.exit(main())"]
    options = ["--model", str(tmp_path), "--device", "cpu", "--scheduler", f"ipc://{tmp_path}/none"]
    ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=240, check=False)
    lines = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert lines[-1].endswith(
        f"{tmp_path} cannot be served: its files lack 1 weight that the model has: transformer.h.1.mlp.c_fc.bias"
    )
    assert [line for line in lines if " INFO " not in line] == [lines[-1]]


def test_a_model_that_is_whole_is_built_without_transformers(tmp_path: Path) -> None:
    build_model("llama", tmp_path, tie_word_embeddings=True)
    edit_weights(tmp_path, lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert isinstance(load(tmp_path).model, LlamaForCausalLM)
