"""The executor on OpenVINO: the tokens of transformers, with every way that KV comes and goes, and what it refuses."""

import importlib.metadata
import logging
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models import kernel_choice, openvino_choice
from pagewise_kernels.cpu import library
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.peer import PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import unpack_float32s

from tests.cpu_kernels import kernels_without_openvino, need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.parity import check_beams, check_family, check_mixture, check_recovery
from tests.executor.references import reference
from tests.executor.runners import build_runner, peers_at
from tests.model_builders import VOCAB_SIZE, build_model, spoil_weights

if not openvino_choice.is_installed():
    pytest.skip("OpenVINO is not installed: pip install 'pagewise[openvino]'", allow_module_level=True)

import openvino as ov
import openvino.opset13 as ops
from pagewise_executor.models.openvino_merge import merge_products

# OpenVINO has the variable's oneDNN within, but looks at the processor for itself.
IN_EIGHT_BITS = pytest.mark.skipif(
    "ONEDNN_MAX_CPU_ISA" in os.environ,
    reason="OpenVINO computes nothing in eight bits if ONEDNN_MAX_CPU_ISA keeps oneDNN from what the processor has",
)
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "opt", "gpt2", "gpt_neox")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", path, seed=5)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return build_runner(model_path, kernels="openvino")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cpu", 32, kernels="openvino")


@pytest.mark.parametrize(("mode", "n"), [("swap", 1), ("recompute", 1), ("both", 1), ("auto", 1), ("both", 4)])
def test_greedy_tokens_stay_equal_whichever_method_recovers_kv(model_path: Path, mode: RecoveryMode, n: int) -> None:
    _, loaded = check_recovery(model_path, mode, 6, n=n, kernels="openvino")
    assert (loaded > 0) == (mode != "recompute")


@pytest.mark.parametrize("seed", range(4))
def test_everything_mixed_at_random(model_path: Path, seed: int) -> None:
    check_mixture(model_path, seed, kernels="openvino")


@pytest.mark.parametrize(("width", "n"), [(2, 2), (5, 5)])
def test_beams_equal_those_of_transformers(model_path: Path, runner: ModelRunner, width: int, n: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    check_beams(runner, model, width, n, False)


def test_samples_and_log_probabilities_are_those_of_the_torch_executor(model_path: Path, runner: ModelRunner) -> None:
    settings = [
        {"temperature": 1.0, "prompt_logprobs": 1},
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.8, "top_k": 7, "logprobs": 2},
        {"temperature": 1.5, "top_p": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}},
    ]
    sampled, found = [], []
    for engine in (build_runner(model_path, kernels="torch"), runner):
        requests = [
            request(list(range(3, 44 + i)), 6, f"r{i}", seed=11 + i, **setting) for i, setting in enumerate(settings)
        ]
        # Chunks of 7 tokens: many steps sample nothing.
        _, steps = run_requests(engine, requests, max_num_seqs=3, max_num_batched_tokens=7, arrive_every=2)
        sampled.append([asked.sequences[0].output_token_ids.tolist() for asked in requests])
        entries = [entry for step in steps for _, entries in step.prompt_logprobs for entry in entries]
        assert len(entries) == 40
        for asked in requests:
            entries += [step.logprobs[one] for step in steps for one in asked.sequences if one in step.logprobs]
        found.append([number for entry in entries for number in (entry.logprob, *unpack_float32s(entry.top_logprobs))])
    assert sampled[0] == sampled[1]
    assert found[1] == pytest.approx(found[0], abs=1e-4)


# ---- weights in eight bits -------------------------------------------------------------------------------


@IN_EIGHT_BITS
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_tokens_of_weights_in_eight_bits_do_not_depend_on_what_else_runs(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    runner = build_runner(tmp_path, kernels="openvino", quantization="int8")
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 3, 17, 40, 64, 90)]

    def tokens(requests: list[Request], **options: int) -> tuple[list[list[int]], int]:
        scheduler, _ = run_requests(runner, requests, **options)
        return [one.sequences[0].output_token_ids.tolist() for one in requests], scheduler.num_preemptions

    alone = [tokens([request(prompt, 40)])[0][0] for prompt in prompts]
    assert len({tuple(one) for one in alone}) == len(alone)
    together = [request(prompt, 40, name=f"r{i}") for i, prompt in enumerate(prompts)]
    assert tokens(together, max_num_batched_tokens=19, arrive_every=2)[0] == alone
    growing = [request(prompt, 40, name=f"g{i}") for i, prompt in enumerate(prompts[:3] * 2)]
    found, preemptions = tokens(growing, num_blocks=3)
    assert found == alone[:3] * 2
    assert preemptions > 0


def test_linear_layers_of_the_same_input_are_one_product() -> None:
    rng = np.random.default_rng(0)
    first, second, last = (rng.standard_normal((rows, 8), np.float32) for rows in (8, 3, 5))
    tokens = ops.parameter([-1, 8], ov.Type.f32)
    doubled = ops.matmul(tokens, ops.constant(first), False, True)
    others = [
        ops.matmul(tokens, ops.constant(second.T), False, False),
        ops.matmul(doubled, ops.constant(last), False, True),
    ]
    model = ov.Model([doubled, *others], [tokens])
    inputs = rng.standard_normal((4, 8), np.float32)
    expected = [inputs @ first.T, inputs @ second.T, inputs @ first.T @ last.T]
    assert merge_products(model) == 1
    assert [node.get_type_name() for node in model.get_ops()].count("MatMul") == 2
    found = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([inputs])
    for index, one in enumerate(expected):
        np.testing.assert_allclose(found[index], one, rtol=1e-4, atol=1e-4)


@IN_EIGHT_BITS
def test_weights_in_eight_bits_change_probabilities_a_little(
    model_path: Path, runner: ModelRunner, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rounded = build_runner(model_path, kernels="openvino", quantization="int8")
    count = sum(isinstance(one, torch.nn.Linear) for one in build_model("llama", model_path.parent / "x").modules())
    assert f"{count} linear layers with weights in eight bits" in caplog.text
    found = []
    for engine in (runner, rounded):
        _, steps = run_requests(engine, [request(list(range(3, 90)), 1, prompt_logprobs=0)])
        found.append([entry.logprob for step in steps for _, entries in step.prompt_logprobs for entry in entries])
    differences = [abs(one - other) for one, other in zip(*found, strict=True)]
    assert 1e-4 < statistics.mean(differences) < 0.05


@IN_EIGHT_BITS
def test_weights_in_eight_bits_are_another_model_than_those_of_the_cpu_operations(
    model_path: Path, runner: ModelRunner
) -> None:
    exact = runner.info.model_fingerprint
    ours = build_runner(model_path, kernels="openvino", quantization="int8").info.model_fingerprint
    assert ours == f"{exact}-int8-openvino"
    need_cpu_kernels()
    assert build_runner(model_path, kernels="cpu", quantization="int8").info.model_fingerprint == f"{exact}-int8"


# ---- beside other executors ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet(model_path: Path) -> Iterator[tuple[ModelRunner, ModelRunner, ModelRunner]]:
    """Two executors on OpenVINO, and one on torch with blocks of the same size."""
    kinds = ("openvino", "openvino", "torch")
    runners = [build_runner(model_path, exchange=peers_at(), block_size=32, kernels=kernels) for kernels in kinds]
    yield runners[0], runners[1], runners[2]
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("mode", ["swap", "both", "recompute", "auto"])
@pytest.mark.parametrize("peer_blocks", [400, 6])
def test_what_a_peer_has_computed_is_used(
    model_path: Path, fleet: tuple[ModelRunner, ...], mode: RecoveryMode, peer_blocks: int
) -> None:
    fetched = check_peers(model_path, fleet[0], fleet[1], mode, peer_blocks)
    if mode == "swap":
        assert fetched == 3 + 1 + 2
    elif mode == "recompute":
        assert fetched == 0


@pytest.mark.parametrize(("holder", "fetcher"), [(0, 2), (2, 0)])
def test_executors_on_other_engines_share_no_blocks(
    model_path: Path, fleet: tuple[ModelRunner, ...], holder: int, fetcher: int
) -> None:
    ours, theirs = fleet[0].info, fleet[2].info
    assert (ours.model_fingerprint, ours.block_size, ours.bytes_per_block) == (
        theirs.model_fingerprint,
        theirs.block_size,
        theirs.bytes_per_block,
    )
    assert ours.block_format == fleet[1].info.block_format != theirs.block_format
    assert check_peers(model_path, fleet[holder], fleet[fetcher], "swap", 400) == 0


def check_peers(
    model_path: Path, holder: ModelRunner, fetcher: ModelRunner, mode: RecoveryMode, peer_blocks: int
) -> int:
    """Let one executor compute prompts and another one continue them; return how many blocks the other has fetched."""
    rng = random.Random(3)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (100, 41, 64)]
    more = [[*prompt, 5, 6, 7] for prompt in prompts]
    expected = reference(model, prompts + more, [8] * 6, "cpu")
    directory = PrefixDirectory()
    first = [request(prompt, 8, name=f"a{i}") for i, prompt in enumerate(prompts)]
    run_requests(holder, first, num_blocks=peer_blocks, recovery="swap", directory=directory)
    again = [request(prompt, 8, name=f"b{i}") for i, prompt in enumerate(more)]
    scheduler, _ = run_requests(fetcher, again, recovery=mode, directory=directory)
    assert [one.sequences[0].output_token_ids.tolist() for one in first + again] == expected
    assert scheduler.kv.pool.counters.fetch_failed == 0
    return scheduler.kv.pool.counters.fetched


def test_nobody_is_told_that_it_is_used(model_path: Path, tmp_path: Path) -> None:
    (tmp_path / "openvino_telemetry.py").write_text("raise SystemExit('it would report')")
    program = (
        "from pagewise_executor.models.loader import load_model; from pagewise_shared.config import ExecutorConfig; "
        f"print(load_model(ExecutorConfig(model={str(model_path)!r}, device='cpu', kernels='openvino')).kernels)"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "openvino\n", done.stderr


# ---- when it is chosen -----------------------------------------------------------------------------------


def test_auto_chooses_it_where_it_is_installed_and_there_is_no_avx2(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_choice, "_has_fast_products", lambda: False)
    with caplog.at_level(logging.INFO):
        info = build_runner(model_path, kernels="auto").info
    assert (info.kernels, info.block_size, info.fallback) == ("openvino", 32, False)
    assert "kernels: openvino, the first choice on this CPU" in caplog.text
    assert "blocks of 32 tokens, as OpenVINO needs them, not of 8" in caplog.text


def test_auto_chooses_it_for_want_of_the_cpu_operations_and_says_so(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def load_library() -> None:
        raise library.LibraryMissingError("they are not there")

    monkeypatch.setattr(library, "load_library", load_library)
    monkeypatch.setattr(kernel_choice, "_has_fast_products", lambda: None)
    info = build_runner(model_path, kernels="auto").info
    assert (info.kernels, info.fallback) == ("openvino", True)
    assert "kernels: openvino, because others cannot compute this: cpu: they are not there" in caplog.text


def test_versions_with_which_it_was_not_tried_are_refused(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "2026.5.0")
    monkeypatch.setattr(kernel_choice, "_has_fast_products", lambda: False)
    with pytest.raises(ModelError, match=r"--kernels openvino: .* 2026\.4\.1, and 2026\.5\.0 is installed"):
        build_runner(model_path, kernels="openvino")
    info = build_runner(model_path, kernels="auto").info
    assert (info.kernels, info.fallback) == (kernels_without_openvino(), True)


@pytest.mark.parametrize(("family", "why"), [("gemma2", "softcap"), ("qwen3_moe", "mixture of experts")])
def test_what_it_cannot_compute_is_computed_by_others_or_refused(
    family: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build_model(family, tmp_path)
    spoiled = Path(shutil.copytree(tmp_path, tmp_path / "spoiled"))
    spoil_weights(spoiled)  # it is said before they are read
    with pytest.raises(ModelError, match=f"--kernels openvino: .*{family}.*{why}"):
        build_runner(spoiled, kernels="openvino")
    monkeypatch.setattr(kernel_choice, "_has_fast_products", lambda: False)
    info = build_runner(tmp_path, kernels="auto").info
    assert (info.kernels, info.fallback) == (kernels_without_openvino(), True)
    assert [why in record.message for record in caplog.records if "others cannot compute this" in record.message] == [
        True
    ]


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_a_conversion_that_fails_leaves_the_model_to_others(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should these families be let through, the conversion itself finds what is wrong with them."""
    monkeypatch.setattr(kernel_choice, "_has_fast_products", lambda: False)
    monkeypatch.setattr(openvino_choice, "flaw_of_config", lambda *_: "")
    check_family(family, tmp_path, "cpu", 16)


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=IN_EIGHT_BITS)])
def test_logits_that_are_others_are_found(model_path: Path, quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagewise_executor.models import openvino_model

    paged_attention = openvino_model._paged_attention

    def narrower(layer: openvino_model._AttentionLayer, *rest: object) -> object:
        layer.window = 5
        return paged_attention(layer, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(openvino_model, "_paged_attention", narrower)
    with pytest.raises(ModelError, match="its logits differ from those of torch"):
        build_runner(model_path, kernels="openvino", quantization=quantization)


@pytest.mark.parametrize(
    ("options", "why"),
    [({"dtype": "bfloat16"}, "float32 only"), ({"deterministic": True}, "--deterministic needs the Triton kernels")],
)
def test_options_that_it_has_not_are_named(model_path: Path, options: dict[str, object], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        build_runner(model_path, kernels="openvino", **options)
