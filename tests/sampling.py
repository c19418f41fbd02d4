"""Sampling parameters with token constraints, as tests write them."""

from typing import Any

from pagewise_shared.sampling import SamplingParams, token_constraints


def sampling_params(
    *,
    allowed: tuple[int, ...] = (),
    logit_bias: dict[int, float] | None = None,
    bad_words: tuple[tuple[int, ...], ...] = (),
    **others: Any,
) -> SamplingParams:
    """Parameters whose constraints are given as tokens."""
    return SamplingParams(**others, constraints=token_constraints(allowed, logit_bias, bad_words))
