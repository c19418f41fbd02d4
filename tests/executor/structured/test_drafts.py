"""Structured output with drafts: the tokens are the same without drafts, by draft models and by prompt lookup."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
from llguidance import LLParserLimits
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.structured import grammars
from pagewise_gateway.structured.grammars import choice_grammar, json_schema_grammar, regex_grammar
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.protocol import NewSequence, StepPlan, StepResult, Welcome, pack_int32s, unpack_int32s
from pagewise_shared.sampling import SamplingParams

from tests.draft_models import build_head
from tests.drafting import draft_always
from tests.executor.driver import outputs_of, request, run_requests
from tests.executor.runners import build_runner
from tests.lora_adapters import build_adapter, read, with_adapter
from tests.structured import EOS, build_structured_model

NGRAM = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=9)
GRAMMARS = [
    json_schema_grammar({"type": "array", "items": {"enum": ["ab", "abc", 12]}, "maxItems": 9}, whitespace=False),
    regex_grammar("[ab]{1,5}c?(12|true)*"),
    regex_grammar("(abc)+!"),
    choice_grammar(["yes", "true", 'say "no"']),
]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "n": 2, "logit_bias": {20: 4.0, 30: -4.0}},
    {"temperature": 0.0, "min_tokens": 6},
    {"temperature": 1.0, "seed": 8, "allowed": tuple(range(80, 120))},
    {"temperature": 0.5, "seed": 5, "repetition_penalty": 1.3},
]


def asked(count: int, max_tokens: int = 24) -> list[Request]:
    found = []
    for number in range(count):
        grammar = GRAMMARS[number % len(GRAMMARS)] if number % 7 else ""
        kind = {"stop_token_ids": (EOS,)} | KINDS[number % len(KINDS)]
        found.append(request([5, 9, 12, 40 + number], max_tokens, f"r{number}", grammar=grammar, **kind))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drafted")
    build_structured_model(path / "model", seed=3)
    build_head(path / "head")
    return path


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    head = {"method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": 3}
    options = {"speculative_config": json.dumps(head), "enable_lora": True, "max_lora_rank": 16}
    return build_runner(folder / "model", **options)


def check(runner: ModelRunner, expected: list[Request], found: list[Request], **options: Any) -> None:
    settings: dict[str, Any] = {"arrive_every": 2, "max_num_batched_tokens": 24, "max_num_seqs": 6, "num_blocks": 18}
    run_requests(runner, expected, **settings, proposes=False)
    scheduler, _ = run_requests(runner, found, **settings, **options)
    assert outputs_of(found) == outputs_of(expected)
    drafted = [one for one in found if one.params.sampling.grammar]
    assert scheduler.features.drafts.num_drafts > len(drafted)
    assert 0 < scheduler.features.drafts.num_accepted_tokens < scheduler.features.drafts.num_draft_tokens


def test_tokens_are_those_without_a_draft_model(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    check(runner, asked(14), asked(14))


def test_tokens_are_those_without_prompt_lookup(runner: ModelRunner) -> None:
    check(runner, asked(14), asked(14), proposes=False, speculative=NGRAM)


def test_adapters_grammars_and_drafts_go_together(
    runner: ModelRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    adapter = read(build_adapter(folder / "model", folder / "adapter"))

    def adapted() -> list[Request]:
        kinds = [(grammar, own) for grammar in GRAMMARS[:3] for own in (adapter, None)]
        return [
            with_adapter(own, [5, 6, 7, 8], 16, f"r{number}", grammar=grammar, stop_token_ids=(EOS,))
            for number, (grammar, own) in enumerate(kinds)
        ]

    check(runner, adapted(), found := adapted())
    outputs = outputs_of(found)
    assert outputs[::2] != outputs[1::2]  # the adapter changes tokens


def begin(runner: ModelRunner, grammar: str) -> list[int]:
    """Let row 0 decode; returns its first two tokens."""
    runner.reset(Welcome(1, 4, 64))
    params = SamplingParams(temperature=0.0, grammar=grammar, stop_token_ids=(EOS,))
    new = NewSequence(0, pack_int32s([5, 6, 7]), 3, 0, pack_int32s([0, 1, 2, 3]), params)
    first = runner.execute(StepPlan(1, 1, joined=(new,), chunks=((0, 3),))).result()
    return [*unpack_int32s(first.tokens), *unpack_int32s(runner.execute(StepPlan(1, 2)).result().tokens)]


def verify(runner: ModelRunner, step: int, draft: list[int]) -> StepResult:
    drafts = ((0, pack_int32s(draft)),) if draft else ()
    return runner.execute(StepPlan(1, step, drafts=drafts)).result()


def test_a_grammar_that_fails_behind_a_draft_fails_only_a_row_that_keeps_it(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "RULE_LIMITS", LLParserLimits(verbose_errors=False, max_items_in_row=50))
    ambiguous = "start: s\ns: s s | /[a-z]/"  # becomes too complex with some tokens
    alone, failed = begin(runner, ambiguous), False
    while not failed:
        result = verify(runner, len(alone) + 1, [])
        alone += unpack_int32s(result.tokens)
        failed = bool(result.failures)
    fails = len(alone) - 1
    assert fails > 3
    begin(runner, ambiguous)
    wrong = next(token for token in alone if token != alone[2])
    result = verify(runner, 3, [wrong, *alone[3:fails]])
    assert (unpack_int32s(result.tokens)[0], result.failures) == (alone[2], ())
    assert unpack_int32s(verify(runner, 4, []).tokens)[0] == alone[3]
    begin(runner, ambiguous)
    result = verify(runner, 3, alone[2:fails])
    assert unpack_int32s(result.tokens)[: fails - 2].tolist() == alone[2:fails]
    assert [one.index for one in result.failures] == [fails - 2]


def test_a_draft_may_go_beyond_the_end_of_the_grammar(runner: ModelRunner) -> None:
    grammar = regex_grammar("(ab|yes)12")
    alone, step = begin(runner, grammar), 3
    while alone[-1] != EOS:
        alone += unpack_int32s(verify(runner, step, []).tokens)
        step += 1
    begin(runner, grammar)
    result = verify(runner, 3, [*alone[2:], 5, EOS, 7])
    assert unpack_int32s(result.tokens)[: len(alone) - 2].tolist() == alone[2:]
    assert not result.failures
