"""Sampling parameters, as they travel from the HTTP API to the executor."""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Annotated, Literal

from msgspec import Meta, Struct

from pagewise_shared.thinking import ThinkingBudget

MAX_LOGPROBS = 20
"""Maximum number of alternatives that a client may ask for per token."""
MAX_STOP_IDS = 1024
"""Maximum number of tokens that end a sequence: of a request and of the model together."""
MAX_LOGIT_BIASES = 1024
"""Maximum number of tokens with a bias."""
MAX_BAD_SEQUENCES = 320
"""Maximum number of forbidden token sequences: two for each bad word of a request, and the model's end tokens."""
MAX_BAD_TOKENS = 16_384
"""Maximum number of tokens in all of them."""
MAX_ALLOWED_BYTES = 2 * 1024 * 1024
"""Maximum size of the bitmap of allowed tokens, for any vocabulary."""
MAX_GRAMMAR_BYTES = 262_144
"""Maximum size of a grammar in UTF-8: enough for a JSON schema with about 5,000 properties."""

_INT32_BYTES = 4
_MAX_INT32 = 2**31 - 1


def _largest_uint32(packed: bytes) -> int:
    return max(array("I", packed), default=0)


class TokenConstraints(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The tokens that a request forbids or favours. All its sequences share it, and it may be large.

    Fields:
        allowed: bitmap of the vocabulary; token t may be sampled if bit t % 8 of byte t // 8 is set. It ends with the
            last allowed token. Empty: every token may be sampled.
        biased, biases: tokens (int32 bytes) and the biases of their logits (float32 bytes).
        bad_words: token sequences (int32 bytes) that must not be completed.
    """

    allowed: bytes = b""
    biased: bytes = b""
    biases: bytes = b""
    bad_words: Annotated[tuple[bytes, ...], Meta(max_length=MAX_BAD_SEQUENCES)] = ()

    @property
    def num_bytes(self) -> int:
        """Its size in a frame, less a few bytes per field."""
        return len(self.allowed) + len(self.biased) + len(self.biases) + sum(len(word) + 5 for word in self.bad_words)

    def error(self, vocab_size: int, largest: Callable[[bytes], int] = _largest_uint32) -> str | None:
        """Return why the values are invalid for a vocabulary of this size (0: unknown); None if they are valid.

        ``largest``: returns the largest of packed uint32 values, 0 of none; numpy does this much faster.
        """
        return self._size_error() or self._value_error(vocab_size, largest)

    def _size_error(self) -> str | None:
        if len(self.allowed) > MAX_ALLOWED_BYTES or (self.allowed and not self.allowed[-1]):
            return f"a bitmap of allowed tokens of {len(self.allowed)} bytes, or one that ends with none"
        if len(self.biased) != len(self.biases) or len(self.biased) > _INT32_BYTES * MAX_LOGIT_BIASES:
            return f"{len(self.biases)} bytes of biases for {len(self.biased)} bytes of tokens"
        if sum(map(len, self.bad_words)) > _INT32_BYTES * MAX_BAD_TOKENS or not all(self.bad_words):
            return f"bad words of more than {MAX_BAD_TOKENS} tokens together, or of none"
        if any(len(packed) % _INT32_BYTES for packed in (self.biased, *self.bad_words)):
            return "tokens that are not a whole number of int32 values"
        return None

    def _value_error(self, vocab_size: int, largest: Callable[[bytes], int]) -> str | None:
        last_allowed = 8 * (len(self.allowed) - 1) + self.allowed[-1].bit_length() - 1 if self.allowed else 0
        highest = largest(self.biased + b"".join(self.bad_words))
        if highest > _MAX_INT32:  # the sign bit of an int32
            return "a constraint on a token below 0"
        if vocab_size and max(last_allowed, highest) >= vocab_size:
            return f"a constraint on a token outside the vocabulary of {vocab_size}"
        if not isfinite(sum(array("f", self.biases))):  # in doubles, the sum of finite floats is finite
            return "a bias that is not a finite number"
        return None


def token_constraints(
    allowed: Iterable[int] = (), logit_bias: Mapping[int, float] | None = None, bad_words: Iterable[Iterable[int]] = ()
) -> TokenConstraints | None:
    """Return constraints that allow only ``allowed`` (if any), add ``logit_bias`` to logits, and forbid the last token
    of each of ``bad_words`` after its others; None if there are none of these."""
    tokens = set(allowed)
    bitmap = bytearray(max(tokens, default=-1) // 8 + 1)
    for token in tokens:
        bitmap[token >> 3] |= 1 << (token & 7)
    bias = sorted((logit_bias or {}).items())
    constraints = TokenConstraints(
        allowed=bytes(bitmap),
        biased=array("i", [token for token, _ in bias]).tobytes(),
        biases=array("f", [value for _, value in bias]).tobytes(),
        bad_words=tuple(array("i", word).tobytes() for word in bad_words),
    )
    return constraints if constraints != TokenConstraints() else None


class SamplingParams(Struct, frozen=True, array_like=True, omit_defaults=True):
    """How the executor samples the tokens of one sequence.

    Random numbers depend on ``seed`` and the absolute position of the sampled token, never on the batch or the step. So
    a sequence that is preempted or moved to another executor continues with the same tokens.

    Fields:
        temperature: 0 is greedy.
        top_k: 0 keeps the whole vocabulary.
        top_p, min_p: nucleus and minimum-probability filters; 1 and 0 switch them off.
        seed: unsigned 64-bit key of the random numbers; the gateway has chosen one if the client gave none.
        presence_penalty, frequency_penalty: over output tokens only (OpenAI's definition).
        repetition_penalty: over prompt and output tokens (CTRL's definition); 1 switches it off.
        min_tokens: output tokens before any of ``stop_token_ids`` may be sampled.
        stop_token_ids: tokens that end the sequence (end-of-sequence ids included unless ignored).
        logprobs: number of alternatives to report per output token (0: only the sampled one); None: no report.
        prompt_logprobs: the same for prompt tokens.
        constraints: forbidden and favoured tokens. In a plan it is None, and the sequence refers to the plan's
            ``constraints``.
        grammar: of the output, in llguidance's serialised form; empty: none. Where the grammar allows only tokens that
            another parameter forbids, the grammar decides.
        beam: the sequence is a hypothesis of a beam search, so the reported alternatives are its continuations: tokens
            that the grammar forbids have a log-probability of minus infinity.
        thinking: the budget of thinking; None: no limit. Forced tokens override every other parameter but the grammar.
            If the grammar refuses the forced token, it is sampled as soon as the grammar allows it.
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
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraints: TokenConstraints | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_BYTES)] = ""
    beam: bool = False
    thinking: ThinkingBudget | None = None


class BeamParams(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The parameters of a beam search.

    Fields:
        width: number of hypotheses that are extended at a time.
        length_penalty: the score of a finished hypothesis is its log-probability / length ** length_penalty.
        early_stopping: when the search ends after ``width`` hypotheses have finished. True: at once. False: when no
            hypothesis that is still extended looks better than they do. "never": when none of them can become better.
    """

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def num_candidates(self, num_end_tokens: int) -> int:
        """Return the number of continuations of each hypothesis that the executor has to report."""
        return max(2, 1 + num_end_tokens) * self.width


def num_accepted(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Return how many tokens of a draft [n] are accepted: all before the first one that differs from the sampled token.

    ``drawn`` [n + 1]: the token sampled in the place of each token of the draft, and the one behind it. The executor
    and the scheduler both compute this.
    """
    return next((index for index, token in enumerate(draft) if token != drawn[index]), len(draft))
