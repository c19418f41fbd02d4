"""Requests of all kinds, with and without drafts."""

import random
from typing import Any

from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.thinking import ThinkingBudget

from tests.executor.driver import request


def requests(max_tokens: int = 45) -> list[Request]:
    """Prompts that repeat themselves, and outputs of few tokens, which do too: greedy, seeded, and others."""
    rng = random.Random(2)
    few = tuple(phrase := [rng.randrange(3, 199) for _ in range(7)])

    def prompt(count: int) -> list[int]:
        return [rng.randrange(3, 199), *phrase * count]

    kinds: list[dict[str, Any]] = [
        {},
        {"allowed": few},
        {"allowed": few, "temperature": 0.6, "seed": 5},
        {"allowed": few, "temperature": 0.8, "seed": 6, "top_k": 4, "n": 2, "logit_bias": {phrase[1]: 1.0}},
        {"allowed": few, "temperature": 0.5, "seed": 7, "min_tokens": 8, "stop_token_ids": (phrase[3], 1)},
        {"allowed": few, "temperature": 2.0, "seed": 9, "repetition_penalty": 1.2},
        {"allowed": few, "logprobs": 2},
        {"allowed": few, "bad_words": ((phrase[2], phrase[3]),)},
        {"allowed": few, "thinking": ThinkingBudget(max_tokens // 2, 2, (phrase[0], 2), (phrase[1],))},
    ]
    return [request(prompt(1 + number % 4), max_tokens, f"r{number}", **kind) for number, kind in enumerate(kinds)]
