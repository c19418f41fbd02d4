"""Sampling parameters, as they travel from the HTTP surface to the executor."""

from typing import Literal

from msgspec import Struct

MAX_LOGPROBS = 20
"""Most alternatives a client may ask for per token."""


class SamplingParams(Struct, frozen=True, array_like=True, omit_defaults=True):
    """How one sequence's tokens are drawn. Complete: the executor needs nothing else to draw them.

    Randomness is keyed by (``seed``, absolute position of the token drawn), never by batch or step, so a
    sequence that was preempted or moved goes on exactly as it would have.

    Fields:
        temperature: 0 is greedy.
        top_k: 0 keeps the whole vocabulary.
        top_p, min_p: nucleus and minimum-probability filters; 1 and 0 switch them off.
        seed: unsigned 64-bit key of the random stream, always concrete.
        presence_penalty, frequency_penalty: over output tokens only (OpenAI's definition).
        repetition_penalty: over prompt and output tokens (CTRL's definition); 1 switches it off.
        min_tokens: output tokens before any of ``stop_token_ids`` may be drawn.
        stop_token_ids: tokens that end the sequence (end-of-sequence ids included unless ignored).
        logit_bias: added to the logits, by token id.
        allowed_token_ids: if not empty, nothing else may be drawn.
        bad_words: token sequences that may not be completed.
        logprobs: number of alternatives to report per output token (0: only the drawn one); None: nothing.
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
    """How wide to search, and what ends it.

    Fields:
        width: hypotheses that live at a time.
        length_penalty: an ended hypothesis scores its log-probability / length ** length_penalty.
        early_stopping: True ends the search once ``width`` hypotheses have ended; False when none of the living
            looks better than those; "never" only when none of them can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def num_candidates(self, num_end_tokens: int) -> int:
        """Continuations of each hypothesis that have to be known."""
        return max(2, 1 + num_end_tokens) * self.width
