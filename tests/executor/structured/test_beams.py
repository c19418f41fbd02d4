"""Beam search within a grammar equals transformers' with ``prefix_allowed_tokens_fn``."""

import random
from pathlib import Path

import pytest

pytest.importorskip("llguidance")
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_gateway.structured.grammars import choice_grammar, json_schema_grammar, regex_grammar
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.core_requests import make_request
from tests.executor.driver import run_requests
from tests.executor.references import beam_reference
from tests.executor.runners import build_runner
from tests.structured import EOS, Reference, build_structured_model

GRAMMARS = {
    "schema": json_schema_grammar(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99999}, "b": {"type": "boolean"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
        whitespace=False,
    ),
    "regex": regex_grammar("[a-f]{2,9}(true|[0-9])"),
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_structured_model(path, seed=11)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return build_runner(model_path)


def beams(grammar: str, prompt: list[int], max_tokens: int, beam: BeamParams, n: int, name: str = "r") -> Request:
    params = SamplingParams(temperature=0, grammar=grammar, stop_token_ids=(EOS,))
    return make_request(name, prompt, max_tokens, params, n=n, beam=beam)


def expected(path: Path, grammar: str, prompt: list[int], max_tokens: int, beam: BeamParams, n: int) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    allowed = Reference(path, grammar).prefix_allowed(len(prompt))
    return beam_reference(model, prompt, max_tokens, beam, n, [EOS], allowed)


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(("width", "n"), [(2, 1), (3, 3)])
def test_beams_equal_those_of_transformers(
    runner: ModelRunner, model_path: Path, kind: str, width: int, n: int
) -> None:
    rng = random.Random(width)
    prompts = [[rng.randrange(3, 200) for _ in range(11)] for _ in range(2)]
    for max_tokens in (6, 24):
        beam = BeamParams(width)
        wanted = [expected(model_path, GRAMMARS[kind], prompt, max_tokens, beam, n) for prompt in prompts]
        asked = [beams(GRAMMARS[kind], prompt, max_tokens, beam, n, f"b{i}") for i, prompt in enumerate(prompts)]
        scheduler, _ = run_requests(runner, asked, num_blocks=18, max_num_seqs=4, max_num_batched_tokens=16)
        assert scheduler.kv.num_available == 18
        assert [[sequence.output_token_ids.tolist() for sequence in one.sequences] for one in asked] == wanted


def test_outputs_that_a_grammar_does_not_have_are_empty(runner: ModelRunner) -> None:
    asked = beams(choice_grammar(["a"]), [5, 6, 7], 8, BeamParams(3), 3)
    run_requests(runner, [asked])
    found = [(sequence.output_token_ids.tolist()[-1:], sequence.finish_reason) for sequence in asked.sequences]
    assert found == [([EOS], "stop"), ([], "abort"), ([], "abort")]
