"""Outputs match their grammars after any move of a sequence, and equal the same draws without a grammar."""

import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import numpy as np
import pytest

pytest.importorskip("llguidance")
import tokenizers
import torch
from pagewise_executor.model_runner import ModelRunner
from pagewise_gateway.structured.grammars import choice_grammar, json_schema_grammar, regex_grammar
from pagewise_gateway.structured.tool_calls import after_reasoning
from pagewise_gateway.text.output_parsing import OutputFormat, Start
from pagewise_gateway.text.output_parsing.formats import ReasoningFormat
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.protocol import TokenLogprobs, Welcome, unpack_int32s
from pagewise_shared.thinking import ThinkingBudget

from tests.executor.driver import outputs_of, request, run_moved, run_requests
from tests.executor.runners import build_runner
from tests.structured import EOS, SPECIAL, VOCAB_SIZE, Reference, build_structured_model, random_grammar, text_of

PROMPT = [5, 9, 12, 30, 4]
PERSON = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 999}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_structured_model(path, seed=3)
    return path


@pytest.fixture(scope="module")
def runner(model_path: Path) -> ModelRunner:
    return build_runner(model_path)


def structured(
    grammar: str, max_tokens: int = 40, name: str = "r", seed: int = 0, n: int = 1, **sampling: object
) -> Request:
    settings = {"temperature": 1.0, "seed": seed, "stop_token_ids": (EOS,)} | sampling
    return request([*PROMPT, 5 + seed % 90], max_tokens, name, n=n, grammar=grammar, **settings)


def many(count: int, seed: int = 1) -> tuple[list[Request], list[Callable[[str], bool]]]:
    """Requests with random grammars, some of them with several outputs, penalties, or other draws."""
    rng = random.Random(seed)
    requests, checks = [], []
    for number in range(count):
        grammar, check = random_grammar(rng)
        settings: dict[str, object] = rng.choice(
            [
                {},
                {"temperature": 0.0},
                {"presence_penalty": 1.5, "repetition_penalty": 1.2},
                {"top_p": 0.8, "top_k": 12},
                {"logit_bias": {20: 4.0, 30: -4.0}, "min_p": 0.01},
            ]
        )
        n = rng.choice([1, 1, 3])
        requests.append(structured(grammar, rng.choice([12, 40]), f"m{number}", seed=number, n=n, **settings))
        checks += [check] * n
    return requests, checks


def check_texts(path: Path, requests: list[Request], checks: list[Callable[[str], bool]]) -> int:
    """All outputs match, or are as long as they may be; returns how many do."""
    ended = 0
    sequences = [sequence for one in requests for sequence in one.sequences]
    for sequence, check in zip(sequences, checks, strict=True):
        tokens = sequence.output_token_ids.tolist()
        if sequence.finish_reason == "stop":
            assert tokens.index(EOS) == len(tokens) - 1
            assert check(text_of(path, tokens)), text_of(path, tokens)
            ended += 1
        else:
            assert sequence.finish_reason == "length"
            assert EOS not in tokens
    return ended


def test_outputs_match_and_every_token_was_allowed(runner: ModelRunner, model_path: Path) -> None:
    requests, checks = many(24)
    run_requests(runner, requests)
    assert check_texts(model_path, requests, checks) > len(checks) / 2
    for one in requests:
        reference = Reference(model_path, one.params.sampling.grammar)
        for sequence in one.sequences:
            assert reference.holds(sequence.output_token_ids.tolist())


@pytest.mark.long
def test_five_hundred_outputs_match(runner: ModelRunner, model_path: Path) -> None:
    requests, checks = many(330, seed=7)
    assert len(checks) > 500
    run_requests(runner, requests, max_num_seqs=32)
    assert check_texts(model_path, requests, checks) > len(checks) / 2


@pytest.mark.parametrize(
    ("num_blocks", "budget", "recovery"), [(14, 64, "auto"), (16, 7, "swap"), (16, 64, "recompute"), (15, 11, "both")]
)
def test_chunks_small_pools_and_recoveries_change_nothing(
    runner: ModelRunner, num_blocks: int, budget: int, recovery: RecoveryMode
) -> None:
    alone, _ = many(10, seed=2)
    for one in alone:
        run_requests(runner, [one])
    together, _ = many(10, seed=2)
    # Beside requests without grammars, which get the same tokens as alone.
    plain = [request([40 + number, 7, 8], 30, f"p{number}", temperature=1.0, seed=number) for number in range(3)]
    by_themselves = [
        request([40 + number, 7, 8], 30, f"p{number}", temperature=1.0, seed=number) for number in range(3)
    ]
    run_requests(runner, by_themselves)
    scheduler, _ = run_requests(
        runner,
        [*together, *plain],
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=budget,
        recovery=recovery,
    )
    assert scheduler.num_preemptions > 0
    assert outputs_of(together) == outputs_of(alone)
    assert outputs_of(plain) == outputs_of(by_themselves)


def test_moves_to_another_executor_change_nothing(runner: ModelRunner, model_path: Path) -> None:
    alone, _ = many(8, seed=4)
    for one in alone:
        run_requests(runner, [one])
    moved, _ = many(8, seed=4)
    run_moved([(runner, 5), (build_runner(model_path), 9)], moved)
    assert outputs_of(moved) == outputs_of(alone)


def test_where_other_parameters_leave_no_token_the_grammar_decides(runner: ModelRunner, model_path: Path) -> None:
    yes = choice_grammar(["yes"])
    digits = regex_grammar("[0-9]{1,4}")
    ends: dict[str, object] = {"bad_words": ((EOS,),)}
    asked = {
        "min_tokens": structured(yes, name="a", min_tokens=9),
        "allowed": structured(yes, name="b", allowed=(7, 8, 9)),
        "ignore_eos": structured(yes, name="c", **ends),
        "as long as it may": structured(digits, name="d", **ends),
        "at least three": structured(digits, name="e", min_tokens=3),
        "biased": structured(yes, name="f", logit_bias={10: 100.0}),
    }
    run_requests(runner, list(asked.values()))
    texts = {}
    for name, one in asked.items():
        (sequence,) = one.sequences
        assert sequence.finish_reason == "stop"
        texts[name] = text_of(model_path, sequence.output_token_ids.tolist())
    assert {texts[name] for name in ("min_tokens", "allowed", "ignore_eos", "biased")} == {"yes"}
    assert len(texts["as long as it may"]) == 4
    assert len(texts["at least three"]) >= 3


def test_reasoning_ends_when_its_budget_is_used_up(runner: ModelRunner, model_path: Path) -> None:
    special = {text: number for number, text in enumerate(SPECIAL)}
    opening, end = special["<bos>"], special["<pad>"]
    written = OutputFormat(reasoning=ReasoningFormat("<bos>", "<pad>"))
    phrase = (*(tokenizers.Tokenizer.from_file(str(model_path / "tokenizer.json")).encode("ab").ids), end)
    kinds: list[tuple[Start, ThinkingBudget]] = [
        ("reasoning", ThinkingBudget(0, end, (end,), (opening,))),
        ("reasoning", ThinkingBudget(12, end, phrase, (opening,))),
        ("main", ThinkingBudget(7, end, (end,), (opening,), 4)),
    ]

    def asked() -> list[Request]:
        requests = []
        for number in range(12):
            start, thinking = kinds[number % 3]
            grammar = after_reasoning(choice_grammar(["12", "abc"]), written, special, start)
            # Half of them do not end by themselves.
            bias = {opening: 100.0, EOS: 8.0, end: -100.0 if number % 2 else 0.0}
            requests.append(structured(grammar, 60, f"t{number}", number, thinking=thinking, logit_bias=bias))
        return requests

    alone, late = asked(), 0
    for one in alone:
        run_requests(runner, [one])
    for number, (output,) in enumerate(outputs_of([one]) for one in alone):
        start, thinking = kinds[number % 3]
        first, last = 0 if start == "reasoning" else output.index(opening) + 1, output.index(end)
        assert text_of(model_path, output[last:]).strip() in ("12", "abc")
        over = last - first - (thinking.num_tokens + len(thinking.forced) - 1)
        assert over <= 3, "the grammar wants whole characters, which have up to four bytes"
        late += over > 0
    assert late
    together = asked()
    scheduler, _ = run_requests(runner, together, num_blocks=9, max_num_seqs=8)
    assert scheduler.num_preemptions > 0
    assert outputs_of(together) == outputs_of(alone)


def test_log_probabilities_are_those_of_the_model(runner: ModelRunner, model_path: Path) -> None:
    """As in vLLM: before the grammar, so forbidden tokens are among the alternatives."""
    free = request([*PROMPT, 5], 1, "free", temperature=0.0, logprobs=20)
    bound = structured(choice_grammar(["yes", "no"]), 1, "bound", temperature=0.0, logprobs=20)
    found: list[TokenLogprobs] = []
    for one in (free, bound):
        _, steps = run_requests(runner, [one])
        found += [entry for step in steps for entry in step.logprobs.values()]
    assert found[0].top_ids == found[1].top_ids
    np.testing.assert_allclose(
        np.frombuffer(found[0].top_logprobs, np.float32), np.frombuffer(found[1].top_logprobs, np.float32)
    )
    assert found[1].rank > 1
    assert found[1].token_id in Reference(model_path, bound.params.sampling.grammar).allowed([])
    assert found[1].token_id not in unpack_int32s(found[1].top_ids)[:1]


def test_a_grammar_that_cannot_be_followed_fails_its_own_row(runner: ModelRunner) -> None:
    """The first makes no sense with this tokenizer; the second has too many alternatives when its turn comes."""
    unknown = structured("start: <|nothing|>", name="unknown")
    vast = structured("start: " + " | ".join(['"a"'] * 5000), name="vast")
    good = structured(json_schema_grammar(PERSON, whitespace=False), name="good")
    scheduler = Scheduler(num_blocks=400, block_size=8, max_num_seqs=16, max_num_batched_tokens=64)
    runner.reset(Welcome(1, 16, 64))
    for one in (unknown, vast, good):
        scheduler.add(one)
    failed = {}
    for _ in range(60):
        plan = scheduler.schedule(monotonic())
        if plan is None:
            break
        result = runner.execute(plan).result()
        for failure in result.failures:
            sequence = scheduler.steps_in_flight[0].sampled[failure.index]
            failed[sequence.request.request_id] = (failure.invalid, failure.message)
            scheduler.abort(sequence.request.request_id)
        scheduler.update(result)
    assert set(failed) == {"unknown", "vast"}
    assert failed["unknown"][0]
    assert "unknown special token" in failed["unknown"][1]
    assert not failed["vast"][0]
    assert "Too many items" in failed["vast"][1]
    assert good.sequences[0].finish_reason == "stop"
    assert outputs_of([unknown]) == [[]]


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    build_structured_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert build_runner(tmp_path).info.no_grammars.startswith("tokenizer.json cannot be used: ")
    (tmp_path / "tokenizer.json").unlink()
    runner = build_runner(tmp_path)
    assert runner.info.no_grammars == "the model's directory has no tokenizer.json"
    # Whatever a scheduler makes of that, no token is sampled without the grammar.
    runner.reset(Welcome(1, 4, 64))
    scheduler = Scheduler(num_blocks=40, block_size=8, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler.add(structured(regex_grammar("a")))
    plan = scheduler.schedule(monotonic())
    assert plan is not None
    (failure,) = runner.execute(plan).result().failures
    assert "has no tokenizer.json" in failure.message


def test_the_same_masks_on_the_device(device: torch.device) -> None:
    from pagewise_executor.structured.structured_rows import forbidden_tokens
    from pagewise_executor.uploads import Uploads

    rng = np.random.default_rng(1)
    for vocab_size in (VOCAB_SIZE, 32, 33, 4096):
        words = -(-vocab_size // 32)
        allowed = rng.integers(-(2**31), 2**31, (3, words), np.int32)
        found = forbidden_tokens(allowed, vocab_size, Uploads(device)).cpu().numpy()
        wanted = [[not int(row[t // 32]) >> (t % 32) & 1 for t in range(vocab_size)] for row in allowed]
        assert found.tolist() == wanted


@pytest.mark.parametrize("kernels", ["triton", "cpu", "torch"])
def test_any_kernels_keep_to_grammars(kernels: str, model_path: Path, device: torch.device) -> None:
    """Decode steps of the Triton kernels sample by themselves first: rows with grammars are sampled again."""
    if kernels == "cpu" and device.type != "cpu":
        pytest.skip("the operations in C are for the CPU")
    runner = build_runner(model_path, device.type, kernels=kernels, num_blocks=30, block_size=4, max_num_seqs=2)
    bound = structured(choice_grammar(["abc", "12ab"]), 6, seed=3)
    plain = request([40, 7, 8], 4, "p", temperature=0.0)
    run_requests(runner, [bound, plain], max_num_seqs=2)
    (sequence,) = bound.sequences
    assert sequence.finish_reason == "stop"
    assert text_of(model_path, sequence.output_token_ids.tolist()) in ("abc", "12ab")
