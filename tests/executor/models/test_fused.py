"""The optimisations of models must not change their results."""

import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models import loader, packed_linear, preparation
from pagewise_executor.models.fused import fuse_layers
from pagewise_executor.models.operations import Operations
from pagewise_executor.models.packed_linear import PackedLinear, pack_linears
from pagewise_executor.profile import profile_run
from pagewise_shared.config import ExecutorConfig
from torch import nn

from tests.executor.driver import request, run_requests
from tests.executor.runners import tokens_and_logprobs
from tests.model_builders import FAMILIES, FUSED, MIXTURES, build_model


@pytest.mark.parametrize("family", [*FUSED, *MIXTURES])
def test_fused_layers_compute_what_the_originals_compute(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model(family, tmp_path)
    fused = loader.load_model(ExecutorConfig(model=str(tmp_path), device="cpu", num_blocks=64))
    assert sum(type(m).__name__ == "FusedDecoderLayer" for m in fused.model.modules()) == len(fused.attention)
    tokens, logprobs = tokens_and_logprobs(tmp_path, "float32")
    monkeypatch.setattr(loader, "llama_checkpoint", lambda *_: None)  # which has no layers but fused ones
    monkeypatch.setattr(preparation, "fuse_layers", lambda *_: 0)
    monkeypatch.setattr(preparation, "pack_linears", lambda *_: 0)
    plain_tokens, plain_logprobs = tokens_and_logprobs(tmp_path, "float32")
    assert tokens == plain_tokens
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-4)


def test_decoders_within_another_module_stay_as_they_are(tmp_path: Path) -> None:
    """Such a module may compute embeddings itself: GOT-OCR2 does, from images, and gives them to its decoder."""
    build_model("qwen2", tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    whole = nn.Module()
    whole.model = nn.Module()
    whole.model.language_model = model.model
    assert fuse_layers(whole, Operations()) == 0
    assert fuse_layers(model, Operations()) == len(model.model.layers)


def test_the_largest_step_runs_in_as_many_sequences_as_it_takes(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", num_blocks=64, max_model_len=100, profile=False)
    )
    profile_run(runner, 250)
    assert sorted(runner._batch.num_computed.tolist()) == [50, 100, 100]


def test_every_family_runs_in_bfloat16(tmp_path: Path) -> None:
    for family in FAMILIES:
        build_model(family, tmp_path / family)
        tokens, logprobs = tokens_and_logprobs(tmp_path / family, "bfloat16")
        assert {len(sampled) for sampled in tokens.values()} == {12}
        assert all(value <= 0 for value in logprobs)


def test_on_processors_for_which_onednn_cannot_pack_bfloat16_torch_s_layers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_model("llama", tmp_path)
    monkeypatch.setattr(packed_linear, "_packs", lambda dtype: dtype != torch.bfloat16)
    tokens, _ = tokens_and_logprobs(tmp_path, "bfloat16")
    assert {len(sampled) for sampled in tokens.values()} == {12}


TYPES_THAT_ARE_PACKED = """
import torch
from pagewise_executor.models.packed_linear import pack_linears

print([pack_linears(torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=dtype)), "torch")
       for dtype in (torch.float32, torch.bfloat16, torch.float16)])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="this limits oneDNN on x86_64")
def test_onednn_is_asked_which_types_it_packs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", TYPES_THAT_ARE_PACKED],
        env=os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[1, 0, 0]"


@pytest.mark.parametrize(("version", "packed"), [("2.10.9", 0), ("2.11.0+cu130", 1), ("2.15.1", 1), ("2.16.0", 0)])
def test_weights_are_packed_with_versions_of_pytorch_for_which_that_was_tried(
    version: str, packed: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    packed_linear._packs.cache_clear()
    try:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        assert pack_linears(model, "torch") == 2 * packed
        assert model(torch.zeros(1, 8)).shape == (1, 8)
    finally:
        packed_linear._packs.cache_clear()
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [f"tested with PyTorch 2.11 to 2.15, not {version[:4]}" in each for each in said] == [True] * (1 - packed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 5, 32, 100])
def test_a_packed_linear_layer_computes_what_the_plain_one_does(dtype: torch.dtype, bias: bool, rows: int) -> None:
    plain = nn.Linear(48, 80, bias=bias).to(dtype)
    layers = nn.Sequential(plain)
    if not pack_linears(layers, "torch"):
        assert dtype == torch.bfloat16, "oneDNN packs float32 on any processor"
        pytest.skip("oneDNN does not pack bfloat16 on this processor, so models keep torch's layers")
    (packed,) = layers
    assert isinstance(packed, PackedLinear)
    x = torch.randn(1, rows, 48, dtype=dtype)
    with torch.inference_mode():
        exact = nn.functional.linear(x.double(), plain.weight.double(), plain.bias.double() if bias else None)
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        torch.testing.assert_close(packed(x).double(), exact, **tolerance)
    assert packed.weight.dtype == dtype
    assert packed.weight.shape == plain.weight.shape


EVERY_BATCH = """
import torch
from pagewise_executor.models.packed_linear import PackedLinear

def resident():
    return int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0]) / 1024

packed, x = PackedLinear(torch.randn(512, 256), None), torch.randn(1024, 256)
with torch.inference_mode():
    packed(x)
    before = resident()
    for rows in range(1, 1025):
        packed(x[:rows])
print(resident() - before)
"""


def test_memory_does_not_grow_with_every_size_of_a_batch() -> None:
    done = subprocess.run([sys.executable, "-c", EVERY_BATCH], stdout=subprocess.PIPE, check=True)
    assert float(done.stdout) < 64


@pytest.mark.parametrize(
    ("family", "rope", "length"),
    [
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 70),
        ("llama", {"rope_type": "dynamic", "factor": 4.0}, 20),
    ],
)
def test_rope_that_would_change_with_the_batch_is_fixed_for_the_longest_sequence(
    tmp_path: Path,
    family: str,
    rope: dict[str, object],
    length: int,
) -> None:
    build_model(family, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = rope | {"rope_theta": 10000.0, "original_max_position_embeddings": 64}
    config["original_max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", max_model_len=512, num_blocks=64, block_size=8, profile=False)
    )
    prompts = [[(7 * i + k) % 90 + 3 for i in range(length)] for k in range(3)]
    requests = [request(prompt, 16, f"r{k}") for k, prompt in enumerate(prompts)]
    run_requests(runner, requests, max_num_batched_tokens=40)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for asked, prompt in zip(requests, prompts, strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, min_new_tokens=16, do_sample=False
        )
        assert asked.sequences[0].output_token_ids.tolist() == out[0, length:].tolist()
