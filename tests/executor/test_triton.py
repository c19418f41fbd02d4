"""The executor on the Triton kernels: interpreted on the CPU with tiny models, compiled on a GPU."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor import model_runner
from pagewise_executor.attention.triton_attention import LayerKind
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_executor.uploads import Array, Uploads
from pagewise_executor.warm_up import warm_up
from pagewise_kernels.attention import DecodePlan
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.executor.runners import outputs
from tests.model_builders import EAGER, VOCAB_SIZE, build_model

LENGTHS = [(1, 6), (3, 4), (17, 5), (9, 7)]


def check(
    family: str, path: Path, device: str, lengths: list[tuple[int, int]], pool_blocks: int = 14, **options: object
) -> None:
    """``pool_blocks``: the scheduler's blocks, few enough that sequences are preempted."""
    build_model(family, path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager" if family in EAGER else "sdpa"
    ).to(device)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in lengths]
    expected = reference(model, prompts, [length for _, length in lengths], device)
    # Few sequences, because each number of them gets a CUDA graph.
    settings = {"block_size": 4, "num_blocks": 60, "profile": False, "max_num_seqs": 32} | options
    runner = ModelRunner(
        ExecutorConfig(model=str(path), device=device, dtype="float32", kernels="triton", **settings)  # type: ignore[arg-type]
    )
    requests = [
        request(prompt, length, f"r{i}") for i, (prompt, (_, length)) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run_requests(runner, requests, num_blocks=pool_blocks, max_num_seqs=3, max_num_batched_tokens=11, arrive_every=2)
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected


def test_blocks_may_lie_together_and_go_to_the_host(tmp_path: Path, device: torch.device) -> None:
    check("llama", tmp_path, device.type, LENGTHS, kv_layout="blocks", host_memory="1MiB", verify_copies=True)


@pytest.mark.interpreted
def test_latents_are_attended_to(tmp_path: Path, device: torch.device) -> None:
    check("deepseek_v3", tmp_path, device.type, LENGTHS, host_memory="1MiB", verify_copies=True)


@pytest.mark.interpreted
def test_all_products_may_be_those_for_few_rows(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewise_executor.models.skinny_linear.SkinnyLinear.few_rows", 64)
    check("qwen2", tmp_path, device.type, LENGTHS[:2])


def test_kv_that_comes_back_in_a_step_that_computes_nothing_is_found(tmp_path: Path, device: torch.device) -> None:
    build_model("llama", tmp_path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).to(device)
    prompts = [[3, *range(10, 26)], [4, *range(40, 56)], [3, *range(10, 26)]]
    expected = reference(model, prompts, [3] * 3, device.type)
    config = ExecutorConfig(
        model=str(tmp_path), device=device.type, kernels="triton", block_size=4, num_blocks=60, profile=False,
        host_memory="1MiB", verify_copies=True,
    )  # fmt: skip
    requests = [request(prompt, 3, f"r{i}") for i, prompt in enumerate(prompts)]
    runner = ModelRunner(config)
    scheduler, _ = run_requests(runner, requests, num_blocks=6, arrive_every=1000, recovery="swap")
    assert scheduler.kv.pool.counters.loaded > 0
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected


@pytest.mark.parametrize("layout", ["layers", "blocks"])
def test_fp8_kv_is_nearly_what_it_was(layout: str, tmp_path: Path, device: torch.device) -> None:
    build_model("llama", tmp_path, seed=7)
    found = []
    for kv_dtype in ("auto", "fp8"):
        config = ExecutorConfig(
            model=str(tmp_path), device=device.type, kernels="triton", kv_dtype=kv_dtype, kv_layout=layout,
            block_size=4, num_blocks=60, profile=False, host_memory="1MiB", verify_copies=True,
        )  # type: ignore[arg-type]  # fmt: skip
        runner = ModelRunner(config)
        asked = request(list(range(5, 30)), 1, prompt_logprobs=0)
        _, outputs = run_requests(runner, [asked], max_num_batched_tokens=7)
        found.append([entry.logprob for out in outputs for _, entries in out.prompt_logprobs for entry in entries])
        sizes = runner.info.bytes_per_block
        heads, dim = runner._pool.keys[0].shape[2:]
    assert sizes == 2 * len(runner._pool.keys) * 4 * heads * (dim + 4)
    assert len(found[0]) == 24
    assert found[0] != found[1]
    assert found[1] == pytest.approx(found[0], abs=0.1)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "family",
    [
        *("llama", "qwen3_moe", "gpt_oss", "glm4_moe", "mistral4"),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (
                *("mistral", "qwen3", "gemma2", "gemma4", "gemma4_moe", "llama4", "gpt2", "mixtral", "qwen2_moe"),
                *("olmo3", "ministral", "minimax_m2", "glm4_moe_lite"),
            )
        ),
    ],
)
def test_greedy_tokens_equal_transformers_in_the_interpreter(family: str, tmp_path: Path) -> None:
    check(family, tmp_path, "cpu", LENGTHS)


@pytest.mark.interpreted
def test_seeded_samples_are_those_of_the_torch_executor(tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=7)
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 7, "logprobs": 2},
        {"temperature": 1.5, "top_p": 0.7, "presence_penalty": 1.0, "repetition_penalty": 1.2},
        {"temperature": 1.0, "min_p": 0.05, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}},
    ]
    sampled = []
    for kernels in ("torch", "triton"):
        config = ExecutorConfig(
            model=str(tmp_path), device="cpu", kernels=kernels, block_size=4, num_blocks=60, profile=False
        )
        requests = [request([3, 4, 5 + i], 6, f"r{i}", seed=11 + i, **setting) for i, setting in enumerate(settings)]
        run_requests(ModelRunner(config), requests, num_blocks=20, max_num_seqs=3, arrive_every=2)
        sampled.append([asked.sequences[0].output_token_ids.tolist() for asked in requests])
    assert sampled[0] == sampled[1]


@pytest.mark.long  # tests/kernels has the same of the kernels alone
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_deterministic_results_are_the_same_bits_whatever_else_runs(
    family: str, tmp_path: Path, device: torch.device
) -> None:
    build_model(family, tmp_path, seed=7)
    config = ExecutorConfig(
        model=str(tmp_path), device=device.type, kernels="triton", deterministic=True, block_size=4, num_blocks=60,
        profile=False,
    )  # fmt: skip
    runner = ModelRunner(config)
    shared = list(range(20, 31))
    prompts = {0: [*shared, 3], 1: [*shared, 4, 5], 2: [7], 3: [*shared[:6], 9]}
    alone = {}
    for i, prompt in prompts.items():
        alone |= outputs(runner, {i: prompt}, max_num_seqs=1)
    together = outputs(runner, prompts, max_num_seqs=4, max_num_batched_tokens=64)
    crowded = outputs(runner, prompts, num_blocks=9, max_num_seqs=3, max_num_batched_tokens=5, arrive_every=1)
    assert alone == together == crowded


@pytest.mark.interpreted
@pytest.mark.parametrize("family", ["gpt2", "qwen3_moe"])
def test_deterministic_mode_says_what_it_cannot_do(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    with pytest.raises(ModelError, match="none of the families"):
        ModelRunner(
            ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", deterministic=True, num_blocks=8)
        )
    with pytest.raises(ModelError, match="needs the Triton kernels"):
        ModelRunner(ExecutorConfig(model=str(tmp_path), device="cpu", deterministic=True, num_blocks=8))


def test_triton_without_a_gpu_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pagewise_kernels import launch

    build_model("llama", tmp_path)
    monkeypatch.setattr(launch, "device_type", lambda: "cuda")
    with pytest.raises(ModelError, match="TRITON_INTERPRET=1"):
        ModelRunner(ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", num_blocks=8))


@pytest.mark.interpreted
def test_activations_are_measured_of_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most rows possible, log-probabilities of all prompts, and the memory that all steps keep."""
    build_model("llama", tmp_path)
    options = ExecutorConfig(
        model=str(tmp_path), device="cpu", kernels="triton", block_size=4, num_blocks=8, profile=False,
        max_model_len=8, max_num_seqs=2, max_num_batched_tokens=64, deterministic=True,
    )  # fmt: skip
    loaded = load_model(options)
    monkeypatch.setattr(model_runner, "load_model", lambda *_: loaded)
    runner = ModelRunner(options)
    plans: dict[LayerKind, DecodePlan] = {}
    for name in ("reset_peak_memory_stats", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    assert runner._graphs is not None
    backend = runner._graphs.decodes._backend
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: (plans.update(backend._plans), 0)[1])
    kept: list[int] = []
    compute = runner._forward_pass.compute
    monkeypatch.setattr(
        runner._forward_pass, "compute", lambda *given: (kept.append(len(given[1])), compute(*given))[1]
    )
    runner._measure_activations(with_step_limits(options, None), loaded, torch.float32)
    assert runner._batch.num_computed.tolist() == [8, 8]
    assert kept == [2 + 2 * 7], "the last of each prompt is sampled, and the others predict a token of it"
    (plan,) = plans.values()
    assert plan is backend.decode_plan(*plans), "its scratch was there before, so what is free is without it"


@pytest.mark.interpreted
def test_plans_of_prefills_go_through_pinned_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path)
    runner = ModelRunner(
        ExecutorConfig(model=str(tmp_path), device="cpu", kernels="triton", num_blocks=8, profile=False)
    )
    assert runner._graphs is not None
    backend = runner._graphs.decodes._backend
    uploaded: list[torch.Tensor] = []
    together, prepare, steps = Uploads.together, backend.prepare, []

    def watched(self: Uploads, *arrays: Array) -> tuple[torch.Tensor, ...]:
        found = together(self, *arrays)
        uploaded.extend(found)
        return found

    monkeypatch.setattr(Uploads, "together", watched)
    monkeypatch.setattr(backend, "prepare", lambda work: (steps.append(prepare(work)), steps[-1])[1])
    run_requests(runner, [request([3, 4, 5], 2, f"r{i}") for i in range(2)], num_blocks=8, arrive_every=1)
    kinds = [list(step.prefill_plans.values()) for step in steps]
    assert len(kinds) == 2, "before its layers have computed for the first time, a runner does not know their kinds"
    for (plan,) in kinds:
        assert plan.units.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in uploaded}


@pytest.mark.interpreted
def test_warming_up_takes_as_much_as_there_is_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path)
    runner = ModelRunner(
        ExecutorConfig(
            model=str(tmp_path), device="cpu", kernels="triton", block_size=4, num_blocks=5, profile=False,
            max_num_seqs=3,
        )
    )  # fmt: skip
    sizes: list[int] = []
    execute = runner.execute
    monkeypatch.setattr(runner, "execute", lambda plan: (sizes.append(plan.chunks[0][1]), execute(plan))[1])
    warm_up(runner, runner._pool, torch.bfloat16, max_num_batched_tokens=64)
    assert sizes == [1, 2, 4, 8, 16]
    assert runner._graphs is not None
    with torch.inference_mode():
        runner._graphs.decodes.warm_up()
    assert runner.inventory() is None


@pytest.mark.gpu
def test_tokens_are_the_same_where_kernels_begin_early(tmp_path: Path) -> None:
    """Through CUDA graphs and chunks, bit for bit, with as many requests and steps as a race may need."""
    build_model("qwen3", tmp_path, seed=7)
    found = []
    for early in (False, True):
        config = ExecutorConfig(
            model=str(tmp_path), device="cuda", dtype="bfloat16", kernels="triton", block_size=4, num_blocks=1000,
            profile=False, max_num_seqs=16, dependent_launch=early,
        )  # fmt: skip
        prompts = {seed: [3 + (seed * i) % 50 for i in range(1 + 5 * seed)] for seed in range(16)}
        requests = [
            request(prompt, 100, f"r{seed}", temperature=1.0, seed=seed, top_k=20, logprobs=0)
            for seed, prompt in prompts.items()
        ]
        _, steps = run_requests(
            ModelRunner(config), requests, num_blocks=900, max_num_seqs=16, max_num_batched_tokens=64
        )
        tokens = [asked.sequences[0].output_token_ids.tolist() for asked in requests]
        found.append((tokens, [entry.logprob for step in steps for entry in step.logprobs.values()]))
    assert found[0] == found[1]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "gemma4", "phi3", "gpt2", "opt"]
)
def test_greedy_tokens_equal_transformers_on_a_gpu(family: str, tmp_path: Path) -> None:
    check(family, tmp_path, "cuda", [(1, 30), (3, 40), (17, 25), (40, 9), (33, 1), (64, 20)], pool_blocks=30)
