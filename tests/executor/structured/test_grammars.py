"""Compiled grammars: how many are kept, and that steps of others do not wait while one is compiled."""

import random
import time
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import tokenizers

pytest.importorskip("llguidance")
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.structured.grammars import Grammars, load_tokenizer
from pagewise_gateway.structured.grammars import (
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    regex_grammar,
)
from pagewise_gateway.structured.walk import GrammarError
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_shared.protocol import GrammarCompiled, Welcome

from tests.executor.driver import drive, request, run_requests
from tests.executor.runners import build_runner
from tests.structured import EOS, VOCAB_SIZE, build_structured_model, text_of


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_structured_model(path, seed=5)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return build_runner(model_path, max_num_seqs=24)


def test_as_many_are_kept_as_sequences_may_need(model_path: Path, runner: ModelRunner) -> None:
    assert runner.info.max_grammars >= 2 * 24
    grammars = Grammars(load_tokenizer(model_path, VOCAB_SIZE), 1, most=300, num_compilers=2)
    texts = [regex_grammar(f"a{{{number}}}") for number in range(1, 302)]
    first = [grammars.prepare(text) for text in texts[:300]]
    assert [grammars.prepare(text) for text in texts[:300]] == first
    grammars.prepare(texts[0])  # it is used again, so the second one is the oldest
    grammars.prepare(texts[300])
    assert grammars.prepare(texts[0]) is first[0]
    assert grammars.prepare(texts[1]) is not first[1]
    grammars.close()


def test_steps_go_on_while_a_grammar_is_compiled(runner: ModelRunner, model_path: Path) -> None:
    assert runner._grammars is not None
    waits = runner.counted.num_grammar_waits
    compiling = Event()
    runner._grammars._compiler.submit(compiling.wait)  # as a grammar that takes long
    scheduler = Scheduler(
        features=FeatureOptions(max_grammars=runner.info.max_grammars),
        num_blocks=runner.info.num_blocks,
        block_size=runner.info.block_size,
        max_num_seqs=16,
        max_num_batched_tokens=64,
    )
    runner.reset(Welcome(1, 16, 64))
    bound = request([5, 6], 9, "bound", grammar=choice_grammar(["12 <3"]), temperature=1.0, stop_token_ids=(EOS,))
    plain = request([7, 8], 30, "plain", temperature=1.0)
    scheduler.add(bound)
    scheduler.add(plain)
    answered: list[object] = []
    runner.report_to(answered.append)
    while not plain.finished:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(runner.execute(plan).result())
        for question in scheduler.features.messages(0.0):
            runner.handle(question)
    assert bound.sequences[0].output_token_ids.tolist() == []
    assert answered == []
    told = Event()
    runner.report_to(lambda message: (answered.append(message), told.set()))  # type: ignore[func-returns-value]
    compiling.set()
    assert told.wait(30)
    assert answered == [GrammarCompiled(1, 1)]
    scheduler.features.take(GrammarCompiled(1, 1), 0.0)
    drive(runner, scheduler, [])
    assert text_of(model_path, bound.sequences[0].output_token_ids.tolist()) == "12 <3"
    assert runner.counted.num_grammar_waits == waits


def test_no_step_waits_for_large_grammars(runner: ModelRunner, model_path: Path) -> None:
    """Ten of them, which join in one step."""
    waits = runner.counted.num_grammar_waits
    requests = [
        request(
            [5, 6, number],
            9,
            f"r{number}",
            grammar=choice_grammar([f"{number}{other:04}" for other in range(3000)]),
            temperature=1.0,
            stop_token_ids=(EOS,),
        )
        for number in range(10, 20)
    ]
    run_requests(runner, requests, max_num_seqs=24)
    assert runner.counted.num_grammar_waits == waits
    for number, one in enumerate(requests, 10):
        assert text_of(model_path, one.sequences[0].output_token_ids.tolist()).startswith(str(number))


def test_a_grammar_may_not_make_others_wait_for_long(model_path: Path) -> None:
    """Ambiguous rules take longer with each token, until the limit, which schemas do not reach. Time is that of the
    thread alone."""
    grammars = Grammars(load_tokenizer(model_path, VOCAB_SIZE), 1)
    names = [f"p{number}" for number in range(480)]
    large = {"type": "object", "properties": {name: {"type": ["string", "integer", "null"]} for name in names}}
    for text, fails in (
        (context_free_grammar('start: s\ns: s s s | s s | "a" | "b"'), True),
        (context_free_grammar("start: s\ns: s s | /[a-z ]/"), True),
        (context_free_grammar("start: " + " ".join(["a?"] * 1300) + '\na: "x"'), True),
        (context_free_grammar('start: e\ne: e "+" t | t\nt: t "*" f | f\nf: "(" e ")" | /[0-9]/'), False),
        (json_schema_grammar(large, whitespace=False), False),
        (json_schema_grammar(large), False),
        (json_schema_grammar(large | {"additionalProperties": False}), False),
    ):
        matcher, rng, failed = grammars.matcher(text), random.Random(1), False
        for _ in range(400 if fails else 150):
            began = time.thread_time()
            (mask,) = grammars.masks([matcher])
            assert time.thread_time() - began < 0.25  # some 20 ms; without the limits some of these reach seconds
            if failed := matcher.is_error():
                break
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            going_on = [int(token) for token in allowed if token != EOS]
            if not going_on:
                break
            if failed := not matcher.consume_token(rng.choice(going_on)):
                break
        assert failed == fails, text[:60]
        assert not failed or "Too many items" in matcher.get_error()
    grammars.close()


@pytest.mark.parametrize("hidden", [False, True])
def test_the_most_patterns_that_gateways_take_do_not_hold_up_steps(model_path: Path, hidden: bool) -> None:
    """``hidden``: behind the required beginning of the output, so that only later masks have to join them."""
    before = "^(y|z{9}" if hidden else "^("
    taken: list[str] = []
    for number in range(2, 40):
        patterns = [{"type": "string", "pattern": f"{before}.*a.{{{n}}}b.*)$"} for n in range(number)]
        try:
            taken.append(json_schema_grammar({"allOf": patterns}))
        except GrammarError:
            break
    assert 1 <= len(taken) < 10
    grammars = Grammars(load_tokenizer(model_path, VOCAB_SIZE), 1)
    backend = tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json"))
    for grammar in taken:
        grammars.prepare(grammar).result(30)
        matcher = grammars.matcher(grammar)
        for character in '"' + "z" * 9 * hidden + "a" * 30:
            began = time.thread_time()
            grammars.masks([matcher])
            assert time.thread_time() - began < 0.5
            (token,) = backend.encode(character, add_special_tokens=False).ids
            if not matcher.consume_token(token):
                break
    grammars.close()
