"""Models that cannot be served, and why; and how large the pool becomes."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from pagewise_executor.kv.kv_pool import bytes_per_block, pool_size
from pagewise_executor.models import loader
from pagewise_executor.models.kernel_choice import candidates
from pagewise_executor.models.loader import load_model
from pagewise_kernels.cpu import library
from pagewise_shared import progress
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.cpu_kernels import built_in, need_cpu_kernels, variants
from tests.model_builders import GIVES_STATES, build_model, model_fixture, spoil_weights

llama = model_fixture("llama")


@pytest.fixture
def model(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def refused(path: Path | str, **options: object) -> str:
    with pytest.raises(ModelError) as error:
        load_model(ExecutorConfig(model=str(path), device="cpu", **options))  # type: ignore[arg-type]
    return str(error.value)


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_weights_that_transformers_loads_are_told_of_by_lines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    build_model("gpt2", tmp_path)
    monkeypatch.setattr(progress, "SECONDS", 0.0)
    caplog.set_level(logging.INFO)
    capfd.readouterr()
    load_model(ExecutorConfig(model=str(tmp_path), device="cpu"))
    told = [line for line in caplog.messages if line.startswith(f"loading {tmp_path}: ") and " weights (" in line]
    assert told[-1].endswith(" weights (100%)")
    assert "\r" not in "".join(capfd.readouterr()), "no bar is drawn into the log"


def test_missing_and_truncated_files(model: Path) -> None:
    weights = model / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-100], whole[:50], whole[:3], b""):
        weights.write_bytes(damaged)
        assert "truncated" in refused(model)
    weights.write_bytes(b"\x10" + b"\0" * 7 + b"x" * 400)
    assert "header cannot be read" in refused(model)
    weights.unlink()
    assert "has no weights" in refused(model)
    (model / "pytorch_model.bin").touch()
    assert "only safetensors are loaded" in refused(model)
    (model / "config.json").unlink()
    assert "has no config.json" in refused(model)
    assert "no such model" in refused(model / "nowhere")
    assert "is a file" in refused(model / "generation_config.json")


def test_an_index_that_names_missing_files(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors"}}')
    assert "one.safetensors" in refused(model)
    for index in ("{}", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 5}}', '{"weight_map": {"a": ["b"]}}'):
        (model / "model.safetensors.index.json").write_text(index)
        assert "index.json is unusable" in refused(model)


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])
def test_checkpoints_that_are_quantised_are_refused_by_name(model: Path, method: str) -> None:
    edit_config(model, quantization_config={"quant_method": method, "bits": 4})
    assert f"quantised (quant_method '{method}')" in refused(model)


def test_what_cannot_be_served_is_refused_by_name(model: Path) -> None:
    edit_config(model, alibi=True)
    assert "ALiBi" in refused(model)
    edit_config(model, alibi=False, is_encoder_decoder=True)
    assert "only decoder-only models are served" in refused(model)
    edit_config(model, is_encoder_decoder=False, layer_types=["linear_attention", *["full_attention"] * 2])
    assert ("cannot be tried without its weights" if GIVES_STATES else "transformers 5.21") in refused(model)
    edit_config(model, layer_types=["linear_attention"] * 3)
    assert "has no layers with attention" in refused(model)
    edit_config(model, layer_types=["compressed_sparse_attention", *["full_attention"] * 2])
    assert "layers of a kind that is not served: compressed_sparse_attention" in refused(model)
    edit_config(model, layer_types=None)
    edit_config(model, model_type="no_such_architecture")
    assert "has the model_type 'no_such_architecture', which is not known here; served are Llama" in refused(model)
    (model / "config.json").write_text("{")
    assert "config.json is unusable" in refused(model)


def test_without_the_cpu_operations_it_says_so_and_computes_in_pytorch(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(ExecutorConfig(model=str(model), device="cpu", dtype="float16"))
    assert (loaded.kernels, loaded.fallback) == ("torch", True)
    assert "do not compute in float16" in caplog.text
    with built_in(tmp_path):
        loaded = load_model(ExecutorConfig(model=str(model), device="cpu"))
        assert (loaded.kernels, loaded.fallback) == ("torch", True)
        assert f"kernels: torch, because others cannot compute this: cpu: {tmp_path}" in caplog.text
        assert "has not been built" in refused(model, kernels="cpu")


def test_where_they_are_the_cpu_operations_are_chosen(model: Path) -> None:
    need_cpu_kernels()
    loaded = load_model(ExecutorConfig(model=str(model), device="cpu"))
    assert (loaded.kernels, loaded.fallback) == ("cpu", False)
    assert load_model(ExecutorConfig(model=str(model), device="cpu", dtype="bfloat16")).kernels == "cpu"
    assert load_model(ExecutorConfig(model=str(model), device="cpu", kernels="torch")).kernels == "torch"


@pytest.mark.parametrize(
    ("options", "fallback"),
    [({}, True), ({"kernels": "cpu"}, True), ({"kernels": "torch"}, False), ({"quantization": "int8"}, True)],
)
def test_a_narrower_variant_of_the_cpu_operations_counts_as_a_fallback(
    model: Path, options: dict[str, Any], fallback: bool, tmp_path: Path
) -> None:
    need_cpu_kernels()
    built = library.load_library()
    narrower = [one for one in variants() if one != built.variant]
    if not narrower:
        pytest.skip("this processor runs one variant")
    for one in narrower:
        shutil.copy(Path(built._name).with_name(one.file), tmp_path)
    with built_in(tmp_path):
        loaded = load_model(ExecutorConfig(model=str(model), device="cpu", **options))
    assert loaded.fallback is fallback


def test_more_query_heads_than_the_cpu_operations_let_share_a_kv_head(tmp_path: Path) -> None:
    build_model("llama", tmp_path, hidden_size=193 * 4, num_attention_heads=193, num_key_value_heads=1, head_dim=8)
    assert "193 query heads share a KV head, up to 192 are supported" in refused(tmp_path, kernels="cpu")
    loaded = load_model(ExecutorConfig(model=str(tmp_path), device="cpu"))
    assert (loaded.kernels, loaded.fallback) == ("torch", True)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"kernels": "cpu", "dtype": "float16"}, "--kernels cpu: "),
        ({"quantization": "int8", "dtype": "bfloat16"}, "--quantization int8: "),
        ({"deterministic": True}, "--deterministic needs the Triton kernels"),
        ({"kv_dtype": "fp8"}, "--kv-dtype fp8 needs the Triton kernels"),
        (
            {"kv_dtype": "int8", "kernels": "torch"},
            "--kv-dtype int8 needs the Triton kernels, or the CPU operations in C",
        ),
        ({"kv_layout": "blocks"}, "--kv-layout blocks needs the Triton kernels"),
        ({"kv_mapping": "mmu", "kernels": "cpu"}, "--kv-mapping mmu needs --kernels torch: not cpu"),
        ({"kv_mapping": "mmu", "kv_dtype": "fp8"}, "--kv-dtype fp8 needs the Triton kernels"),
        ({"kv_mapping": "mmu", "deterministic": True}, "--deterministic needs the Triton kernels"),
    ],
)
def test_what_cannot_be_is_refused_before_the_weights_are_read(
    model: Path, options: dict[str, object], why: str
) -> None:
    spoil_weights(model)
    assert "cannot be loaded" in refused(model)
    assert refused(model, **options).startswith(why)


def test_a_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "owner/name is no directory here" in refused("owner/name")


def test_fingerprints_tell_models_apart(llama: Path, model: Path) -> None:
    def of(path: Path) -> str:
        return load_model(ExecutorConfig(model=str(path), device="cpu")).fingerprint

    assert of(llama) == of(model)
    edit_config(model, rms_norm_eps=0.01)
    assert of(llama) != of(model)


def test_the_pool_takes_what_it_is_given() -> None:
    shapes = [(2, 64)] * 3
    size = bytes_per_block(shapes, 16, torch.float32)
    assert size == 2 * 16 * 4 * 3 * 2 * 64
    cpu = torch.device("cpu")

    def blocks(**options: object) -> int:
        return pool_size(ExecutorConfig(**options), size, cpu, max_model_len=100)  # type: ignore[arg-type]

    assert blocks(num_blocks=17) == 17
    assert blocks(kv_memory="10MiB") == 10 * 2**20 // size
    assert blocks(max_num_seqs=3) == 3 * 7, "never more than all sequences at full length can use"
    with pytest.raises(
        ModelError,
        match=r"hold 0 tokens \(0 blocks\)\. One sequence of 100 tokens.* needs 7 blocks, 336KiB: raise --kv-memory",
    ):
        blocks(kv_memory="10KiB")
    with pytest.raises(ModelError, match="not enough memory"):
        blocks(num_blocks=10**9)


@pytest.mark.parametrize(
    ("dtype", "computes", "warned"),
    [("bfloat16", True, False), ("bfloat16", False, True), ("float16", True, True), ("float32", False, False)],
)
def test_a_type_that_this_cpu_computes_slowly_is_warned_of(
    model: Path,
    dtype: Literal["float32", "bfloat16", "float16"],
    computes: bool,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loader, "computes_bfloat16", lambda: computes)
    load_model(ExecutorConfig(model=str(model), dtype=dtype, device="cpu", kernels="torch"))
    assert (f"no instructions for {dtype}" in caplog.text) is warned


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_on_the_cpu(kind: Any, model: Path, tmp_path: Path) -> None:
    need_cpu_kernels()
    exact, quantised = (
        load_model(ExecutorConfig(model=str(model), device="cpu", quantization=quantization))
        for quantization in ("none", kind)
    )
    assert quantised.fingerprint == f"{exact.fingerprint}-{kind}", "another model: its tokens are others"
    found = {type(module).__name__ for module in quantised.model.modules() if hasattr(module, "packed")}
    assert found == {"Int8Linear", *(["Int4Linear"] if kind == "int4" else [])}, "the head has eight bits"
    on_gpu: dict[str, Any] = {"quantization_text": "t"} if kind == "int4" else {}
    why = "--quantization-text rounds weights for the CPU" if on_gpu else "it is for the CPU, not for cuda: take fp8 or"
    with pytest.raises(ModelError, match=f"--quantization {kind}: {why}"):
        candidates(ExecutorConfig(model=str(model), quantization=kind, **on_gpu), torch.device("cuda"), torch.float32)
    for options, why in (
        ({"dtype": "bfloat16"}, "in float32, not in bfloat16"),
        ({"deterministic": True}, "not with --deterministic"),
        *([] if on_gpu else [({"kernels": "triton"}, "not with --kernels triton")]),
    ):
        assert f"--quantization {kind}: {why}" in refused(model, quantization=kind, **options).replace(
            "the rest of the model computes ", ""
        )
    with built_in(tmp_path):
        assert f"--quantization {kind}: {tmp_path}" in refused(model, quantization=kind)
