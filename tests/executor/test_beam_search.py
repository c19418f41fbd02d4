"""Beam search equals transformers' beam search, token for token."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.sampling import BeamParams

from tests.executor.driver import request, run_requests
from tests.executor.parity import Early, beam_request, check_beams
from tests.executor.references import beam_reference
from tests.model_builders import VOCAB_SIZE, model_fixture

model_path = model_fixture("llama", seed=11)


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


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "n"), [(1, 1), (2, 2), (4, 2), (5, 5)])
def test_beams_equal_those_of_transformers(
    runner: ModelRunner, model: transformers.PreTrainedModel, width: int, n: int, early_stopping: Early
) -> None:
    check_beams(runner, model, width, n, early_stopping)


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
