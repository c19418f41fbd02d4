"""Sampling parameters, as they travel from the HTTP surface to the executor."""

from typing import Literal

from msgspec import Struct

MAX_LOGPROBS = 20
"""Maximum number of alternatives that a client may ask for per token."""


class SamplingParams(Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the tokens of one sequence are sampled. The executor needs no other parameters for it.

    Random numbers depend on ``seed`` and the absolute position of the sampled token, never on the batch or the step. So
    a sequence that is preempted or moved to another executor continues with the tokens that it would have had.

    Fields:
        temperature: 0 is greedy.
        top_k: 0 keeps the whole vocabulary.
        top_p, min_p: nucleus and minimum-probability filters; 1 and 0 switch them off.
        seed: unsigned 64-bit key of the random numbers; the gateway has chosen one if the client gave none.
        presence_penalty, frequency_penalty: over output tokens only (OpenAI's definition).
        repetition_penalty: over prompt and output tokens (CTRL's definition); 1 switches it off.
        min_tokens: output tokens before any of ``stop_token_ids`` may be sampled.
        stop_token_ids: tokens that end the sequence (end-of-sequence ids included unless ignored).
        logit_bias: added to the logits, by token id.
        allowed_token_ids: if not empty, no other token may be sampled.
        bad_words: token sequences that may not be completed.
        logprobs: number of alternatives to report per output token (0: only the sampled one); None: nothing.
        prompt_logprobs: the same for prompt tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class BeamParams(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The parameters of a beam search.

    Fields:
        width: number of hypotheses that are extended at a time.
        length_penalty: the score of a finished hypothesis is its log-probability / length ** length_penalty.
        early_stopping: when the search ends after ``width`` hypotheses have finished. True: at once. False: when no
            hypothesis that is still extended looks better than those. "never": when none of them can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return how many continuations of each hypothesis the executor has to report."""
        return max(2, 1 + num_end_tokens) * self.width
