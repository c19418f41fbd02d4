"""LongRoPE by the length of each sequence: transformers generates the same tokens for it alone."""

import json
from collections import deque
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.long_rope import LongRope
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_shared.config import ExecutorConfig, SpeculativeConfig
from pagewise_shared.protocol import NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.executor.driver import request, run_requests
from tests.model_builders import build_model
from tests.sampling import sampling_params
from tests.scheduler.core.builders import create_scheduler

SHORT_LEN, LONGEST = 32, 128
FACTORS: dict[str, Any] = {"short_factor": [1.1] * 6, "long_factor": [4.0, *[3.0] * 5]}
LENGTHS = [3, 20, 31, 32, 33, 60]
"""Of prompts: below the border, at it, and beyond it. Outputs of 40 tokens cross it."""


@pytest.fixture(scope="module", params=["phi3", "llama"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(request.param, tmp_path_factory.mktemp(request.param), FACTORS)


@pytest.fixture(scope="module")
def phi3_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("phi3", tmp_path_factory.mktemp("phi3"), FACTORS)


def build(family: str, path: Path, factors: dict[str, Any]) -> Path:
    build_model(family, path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = factors | {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": SHORT_LEN,
    }  # fmt: skip
    config |= {"original_max_position_embeddings": SHORT_LEN, "max_position_embeddings": LONGEST}
    (path / "config.json").write_text(json.dumps(config))
    return path


def runner_of(path: Path, **options: Any) -> ModelRunner:
    given: dict[str, Any] = {"device": "cpu", "num_blocks": 64, "block_size": 8, "profile": False}
    return ModelRunner(ExecutorConfig(model=str(path), **(given | options)))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(7 * index + 11 * seed + index * index) % 90 + 3 for index in range(length)]


@cache
def reference(path: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return model


def generated(path: Path, prompt: list[int], count: int) -> list[int]:
    """Return transformers' tokens, without a cache: of the families, Phi-3 alone drops its cache at the border.

    In transformers 5.17, Phi-3 then computes one token without the tokens before it; in 5.23 it does not.
    """
    model, ids = reference(path), torch.tensor([prompt])
    drops = model.config.model_type == "phi3" and Version(transformers.__version__) >= Version("5.23")
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, use_cache=drops
    )
    return out[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def tokens_of(requests: list[Any]) -> list[list[list[int]]]:
    return [[sequence.output_token_ids.tolist() for sequence in one.sequences] for one in requests]


def check(path: Path, runner: ModelRunner, prompts: list[list[int]], count: int = 40, **options: Any) -> Any:
    requests = [request(prompt, count, f"r{number}") for number, prompt in enumerate(prompts)]
    scheduler, _ = run_requests(runner, requests, **options)
    assert tokens_of(requests) == [[generated(path, prompt, count)] for prompt in prompts]
    return scheduler


def test_the_two_sets_of_factors_make_other_tokens(phi3_path: Path, tmp_path: Path) -> None:
    other = build("phi3", tmp_path, FACTORS | {"long_factor": FACTORS["short_factor"]})
    for length in (20, 31, 32, 33):
        assert generated(phi3_path, prompt_of(length, length), 40) != generated(other, prompt_of(length, length), 40)


@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_sequences_of_all_lengths_beside_each_other(model_path: Path, kernels: str) -> None:
    runner = runner_of(model_path, kernels=kernels)
    assert runner.info.short_rope_len == SHORT_LEN
    assert "LongRoPE" in runner.info.no_segments
    scheduler = check(model_path, runner, [prompt_of(length, length) for length in LENGTHS], max_num_batched_tokens=40)
    assert scheduler.num_preemptions == 0


def test_one_after_the_other_with_what_was_cached_of_both_kinds(phi3_path: Path) -> None:
    runner = runner_of(phi3_path)
    prompts = [prompt_of(length) for length in (20, 31, 60, 33, 32, 24, 60, 32)]
    scheduler = check(phi3_path, runner, prompts, arrive_every=24)
    assert scheduler.prefix_hits[1] >= 2 * 16 + 3 * 24


@pytest.mark.parametrize("recovery", ["swap", "recompute"])
def test_preempted_around_the_border(phi3_path: Path, recovery: str) -> None:
    runner = runner_of(phi3_path, num_blocks=14, host_memory="1MiB")
    prompts = [prompt_of(12 + number, number) for number in range(6)]
    scheduler = check(phi3_path, runner, prompts, count=40, recovery=recovery, max_num_batched_tokens=24)
    assert scheduler.num_preemptions > 0


def test_drafts_end_at_the_border(phi3_path: Path) -> None:
    prompts = [[5, 6, 7, 8] * 7, [9, 10, 11] * 10, [5, 6] * 20]
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=5, prompt_lookup_min=1)
    scheduler = check(phi3_path, runner_of(phi3_path), prompts, count=40, speculative=speculative)
    assert scheduler.features.drafts.num_accepted_tokens > 0


def test_several_outputs_cross_the_border_in_their_own_time(phi3_path: Path) -> None:
    runner = runner_of(phi3_path)
    both = request(prompt_of(28), 16, "both", n=3, temperature=1.0, seed=4)
    run_requests(runner, [both], max_num_seqs=2)
    alone = [request(prompt_of(28), 16, f"{n}", n=n, temperature=1.0, seed=4) for n in (1, 2, 3)]
    for one in alone:
        run_requests(runner, [one], max_num_seqs=1)
    assert tokens_of([both])[0] == [tokens_of([one])[0][-1] for one in alone]


def test_beams_cross_the_border(phi3_path: Path) -> None:
    searched = request(prompt_of(29), 10, "beam")
    change(searched, beam=BeamParams(2))
    run_requests(runner_of(phi3_path), [searched])
    ids = torch.tensor([prompt_of(29)])
    out = reference(phi3_path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, num_beams=2, do_sample=False, use_cache=False
    )
    assert tokens_of([searched])[0] == [out[0, 29:].tolist()]


def test_abort_at_the_border_frees_all_blocks(phi3_path: Path) -> None:
    """After each number of steps, so that once a token is in flight which brings the sequence over the border."""
    runner = runner_of(phi3_path)
    for most in range(1, 9):
        scheduler = create_scheduler(num_blocks=64, block_size=8, short_rope_len=SHORT_LEN)
        runner.reset(Welcome(1, 8, 32))
        asked, in_flight = request(prompt_of(30), 20), deque[Any]()
        scheduler.add(asked)
        for _ in range(most):
            while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(0.0)) is not None:
                in_flight.append(runner.execute(plan))
            scheduler.update(in_flight.popleft().result())
        scheduler.abort("r")
        while in_flight:
            scheduler.update(in_flight.popleft().result())
        assert (scheduler.kv.pool.num_in_use, scheduler.num_waiting, scheduler.num_running) == (0, 0, 0)


def test_one_set_serves_where_no_sequence_comes_to_the_other(phi3_path: Path, tmp_path: Path) -> None:
    runner = runner_of(phi3_path, max_model_len=SHORT_LEN)
    assert runner.info.short_rope_len == 0
    check(phi3_path, runner, [prompt_of(12)], count=20)
    path = build("phi3", tmp_path, FACTORS | {"long_factor": FACTORS["short_factor"]})
    runner = runner_of(path)
    assert (runner.info.short_rope_len, runner.info.no_segments) == (0, "")
    check(path, runner, [prompt_of(25), prompt_of(40)])


def test_a_row_that_joined_with_short_factors_goes_no_further() -> None:
    batch = InputBatch(num_rows=1, max_model_len=LONGEST, block_size=8, pool_blocks=8, short_rope_len=SHORT_LEN)
    new = NewSequence(0, pack_int32s([5] * SHORT_LEN), SHORT_LEN, 0, pack_int32s(range(8)), sampling_params())
    batch.advance(batch.apply(StepPlan(epoch=1, step=1, joined=(new,), chunks=((0, SHORT_LEN),))))
    with pytest.raises(InvalidPlanError, match="no slot for its next token"):
        batch.apply(StepPlan(epoch=1, step=2))


def test_longer_tables_hold_the_long_factors_of_the_first_positions(phi3_path: Path) -> None:
    runner = runner_of(phi3_path, kernels="torch")
    (rope,) = [one for one in runner._forward_pass.model.modules() if isinstance(one, LongRope)]
    assert rope.num_positions == LONGEST + SHORT_LEN
    shifted = rope(torch.zeros(1), torch.arange(LONGEST, LONGEST + SHORT_LEN)[None])
    plain = rope.long(torch.zeros(1), torch.arange(SHORT_LEN + 1)[None])
    for found, expected in zip(shifted, plain, strict=True):
        assert torch.equal(found, expected[:, :SHORT_LEN])
