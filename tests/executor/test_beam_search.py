"""Beam search finds what transformers' beam search finds, token for token."""

import random
from pathlib import Path
from typing import Literal

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.sampling import BeamParams

from tests.executor.driver import request, run_requests
from tests.executor.references import beam_reference
from tests.model_builders import VOCAB_SIZE, build_model

Early = bool | Literal["never"]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_model("llama", path, seed=11)
    return path


@pytest.fixture(scope="module")
def model(model_path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return ModelRunner(
        ExecutorConfig(
            model=str(model_path),
            device="cpu",
            dtype="float32",
            block_size=4,
            num_blocks=600,
            host_memory="1MiB",
            profile=False,
        )
    )


def beam_request(prompt: list[int], max_tokens: int, beam: BeamParams, n: int, ends: list[int], name: str) -> Request:
    made = request(prompt, max_tokens, name=name, n=n, stop_token_ids=tuple(ends))
    made.beam = beam
    return made


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "n"), [(1, 1), (2, 2), (4, 2), (5, 5)])
def test_beams_equal_those_of_transformers(
    runner: ModelRunner, model: transformers.PreTrainedModel, width: int, n: int, early_stopping: Early
) -> None:
    rng = random.Random(width)
    requests, wanted = [], []
    num_blocks = runner.info.num_blocks
    for number, (length, max_tokens, penalty, num_ends) in enumerate(
        [(1, 12, 1.0, 0), (7, 20, 1.0, 12), (16, 16, 0.0, 40), (21, 9, 2.0, 25), (13, 18, -0.5, 30)]
    ):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
        ends = sorted(rng.sample(range(3, VOCAB_SIZE), num_ends))
        beam = BeamParams(width, penalty, early_stopping)
        wanted.append(beam_reference(model, prompt, max_tokens, beam, n, ends))
        requests.append(beam_request(prompt, max_tokens, beam, n, ends, f"b{number}"))
    scheduler, _ = run_requests(runner, requests, max_num_seqs=32, max_num_batched_tokens=48)
    assert [[sequence.output_token_ids.tolist() for sequence in made.sequences] for made in requests] == wanted
    assert scheduler.kv.num_available == num_blocks
    assert scheduler.kv.pool.counters.copied > 0 or width == 1


@pytest.mark.parametrize("num_blocks", [13, 17, 24])
def test_beams_survive_preemption_and_few_rows(
    runner: ModelRunner, model: transformers.PreTrainedModel, num_blocks: int
) -> None:
    rng = random.Random(num_blocks)
    beam = BeamParams(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(11)] for _ in range(3)]
    wanted = [beam_reference(model, prompt, 16, beam, 3, []) for prompt in prompts]
    requests = [beam_request(prompt, 16, beam, 3, [], f"b{i}") for i, prompt in enumerate(prompts)]
    plain = [request(prompt, 20, name=f"p{i}") for i, prompt in enumerate(prompts)]
    run_requests(
        runner, [*requests, *plain], num_blocks=num_blocks, max_num_seqs=4, max_num_batched_tokens=16, arrive_every=3
    )
    assert [[sequence.output_token_ids.tolist() for sequence in made.sequences] for made in requests] == wanted
    greedy = [beam_reference(model, prompt, 20, BeamParams(1), 1, []) for prompt in prompts]
    assert [[made.sequences[0].output_token_ids.tolist()] for made in plain] == greedy
