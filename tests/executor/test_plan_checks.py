"""Checks of plans: errors name impossible entries, and lists of maximal length are checked fast."""

import random
import statistics
import time

import pytest
from pagewise_executor.input_batch import InputBatch
from pagewise_executor.plan_checks import InvalidPlanError, check_constraints
from pagewise_shared.protocol import NewSequence, StepPlan, decode_from_scheduler, encode, pack_int32s
from pagewise_shared.sampling import SamplingParams, TokenConstraints, token_constraints

VOCAB = 4096


def greatest(number: int) -> TokenConstraints:
    """As many tokens in constraints as one request may have; others for each ``number``."""
    draw = random.Random(number)
    constraints = token_constraints(
        draw.sample(range(VOCAB), VOCAB - 7),
        {token: draw.random() for token in draw.sample(range(VOCAB), 1024)},
        [draw.choices(range(VOCAB), k=64) for _ in range(256)],
    )
    assert constraints is not None
    return constraints


def test_the_longest_lists_of_as_many_requests_as_join_in_a_plan_are_checked_at_once() -> None:
    """178 of them are 12.8 MiB, near the most that join in a plan; it was 0.16 s."""
    stop_ids = tuple(range(1024))
    sampling = SamplingParams(temperature=0, stop_token_ids=stop_ids, min_tokens=5)
    joined = tuple(
        NewSequence(row, pack_int32s([1, 2]), 2, 0, pack_int32s([row]), sampling, constraints=row) for row in range(178)
    )
    plan = StepPlan(1, 1, joined=joined, constraints=tuple(greatest(number) for number in range(178)))
    received = decode_from_scheduler(encode(plan))
    assert isinstance(received, StepPlan)
    seconds = []
    for _ in range(5):
        batch = InputBatch(num_rows=256, max_model_len=64, block_size=16, pool_blocks=256, vocab_size=VOCAB)
        began = time.thread_time()
        batch.apply(received)
        seconds.append(time.thread_time() - began)
    assert statistics.median(seconds) < 0.06, seconds


@pytest.mark.parametrize("largest", ["of the executor", "of the scheduler"])
def test_constraints_that_cannot_be_are_named(largest: str) -> None:
    infinity, nan = float("inf"), float("nan")
    flawed: dict[str, list[TokenConstraints | None]] = {
        "outside the vocabulary of 4096": [
            token_constraints([VOCAB]),
            token_constraints(logit_bias={VOCAB: 1.0}),
            token_constraints(bad_words=[[5], [5, VOCAB]]),
        ],
        "below 0": [token_constraints(logit_bias={-1: 1.0}), token_constraints(bad_words=[[5, -(2**31), 4]])],
        "not a finite number": [
            token_constraints(logit_bias={5: infinity}),
            token_constraints(logit_bias={5: infinity, 6: -infinity}),
            token_constraints(logit_bias={5: 1.0, 6: nan}),
        ],
        "not a whole number of int32": [TokenConstraints(bad_words=(b"12345",))],
    }
    right = token_constraints([VOCAB - 1], {0: 3.4e38, VOCAB - 1: 3.4e38}, [[0], [VOCAB - 1, 5]])
    assert right is not None
    check_constraints([right], VOCAB)
    assert right.error(VOCAB) is None
    for text, cases in flawed.items():
        for one in cases:
            assert one is not None
            if largest == "of the executor":
                with pytest.raises(InvalidPlanError, match=text):
                    check_constraints([one], VOCAB)
            else:
                assert text in str(one.error(VOCAB))
    outside_some_vocabulary = token_constraints([2**20], {2**31 - 1: 1.0})
    assert outside_some_vocabulary is not None
    assert outside_some_vocabulary.error(0) is None
