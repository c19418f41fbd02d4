"""Token constraints hold whatever happens to a sequence: preempted, moved, or beside others of its request."""

from itertools import pairwise
from pathlib import Path

from pagewise_scheduler.core.requests.request import Request

from tests.executor.driver import outputs_of, request, run_moved, run_requests
from tests.executor.runners import build_runner
from tests.model_builders import VOCAB_SIZE, build_model

ALLOWED = tuple(range(3, VOCAB_SIZE, 3))


def constrained() -> list[Request]:
    """Requests whose constraints change their outputs, and requests without any beside them."""
    prompts = [[5 + number, 9, 12, 30, 4] for number in range(6)]
    settings: list[dict[str, object]] = [
        {"allowed": ALLOWED},
        {"allowed": ALLOWED, "bad_words": ((ALLOWED[1],), (ALLOWED[2], ALLOWED[3]), (ALLOWED[4],) * 2)},
        {"logit_bias": dict.fromkeys(range(0, VOCAB_SIZE, 2), -3.0)},
        {"bad_words": tuple((first, second) for first in range(8) for second in range(8))},
        {},
        {"allowed": ALLOWED[:5], "logit_bias": {ALLOWED[0]: 2.0}},
    ]
    return [
        request(prompt, 40, f"c{number}", n=2, temperature=1.0, seed=number, **setting)
        for number, (prompt, setting) in enumerate(zip(prompts, settings, strict=True))
    ]


def test_constraints_hold_under_preemption_and_moves(tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=7)
    runner, other = build_runner(tmp_path), build_runner(tmp_path)
    alone = constrained()
    for one in alone:
        run_requests(runner, [one])
    for number in (0, 1, 5):
        assert {token for output in outputs_of([alone[number]]) for token in output} <= set(ALLOWED)
    for output in outputs_of([alone[1]]):
        assert ALLOWED[1] not in output
        assert (ALLOWED[2], ALLOWED[3]) not in pairwise(output)
    free = [
        request(one.prompt_token_ids.tolist(), 40, one.request_id, n=2, temperature=1.0, seed=number)
        for number, one in enumerate(alone)
    ]
    run_requests(runner, free)
    differ = [ours != theirs for ours, theirs in zip(outputs_of(alone), outputs_of(free), strict=True)]
    assert differ == [True] * 6 + differ[6:8] + [False] * 2 + [True] * 2

    preempted = constrained()
    scheduler, _ = run_requests(runner, preempted, num_blocks=16, max_num_seqs=8)
    assert scheduler.num_preemptions > 0
    assert outputs_of(preempted) == outputs_of(alone)

    moved = constrained()
    run_moved([(runner, 9), (other, 13)], moved)
    assert outputs_of(moved) == outputs_of(alone)
