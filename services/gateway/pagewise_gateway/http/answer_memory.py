"""How much memory answers may take, and how much one request may ask for.

The bytes are estimates: what ``generation.token_bytes`` says, times the tokens that there are or may be.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewise_gateway.generation import REPEATED_BYTES, TOKEN_BYTES, Prompt, token_bytes
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.memory_budget import SHARE, MemoryBudget, Reservation
from pagewise_gateway.metrics import Metrics

_ALWAYS_HAD = 65_536
"""Bytes that a request may repeat of its prompts without taking memory for them."""
_LARGE = 4
"""An answer that may take one part in so many of a key's share has to have it before its request runs. For smaller ones
memory is taken as their tokens arrive: most end long before their limit."""


class AnswerMemory(MemoryBudget):
    """The bytes of all answers that this gateway is collecting or writing, beyond 64 KiB of each.

    A whole answer is kept until it is written, a stream only as far as its client has not read it.
    """

    def __init__(self, total: int, metrics: Metrics) -> None:
        super().__init__(
            total,
            total // SHARE,
            what="the answers",
            option="--max-answer-memory",
            refused=lambda of_key: metrics.requests_refused("key_answer_memory" if of_key else "answer_memory").inc(),
        )
        metrics.http_answer_bytes.set_function(lambda: self.used)


@dataclass(slots=True, frozen=True)
class AnswerSize:
    """What the answer to a request takes.

    Fields:
        n: choices of each prompt. whole: whether all of it is kept until the end.
        token: bytes of a token of the output. repeated: bytes of a token of the prompt, in each choice.
        share: bytes that one key may use.
    """

    n: int
    whole: bool
    token: int
    repeated: int
    share: int

    @classmethod
    def of(
        cls, n: int, stream: bool | None, memory: MemoryBudget, *, logprobs: int | None, echo: bool, ids: bool
    ) -> "AnswerSize":
        """Return the size for a body's fields. ``echo``, ``ids``: whether prompts are repeated as text, as ids."""
        repeated = REPEATED_BYTES * (echo + ids)
        if echo:
            repeated += token_bytes(logprobs) - TOKEN_BYTES
        return cls(n, not stream, token_bytes(logprobs), repeated, memory.share)

    def default_tokens(self, num_prompt_tokens: int) -> int:
        """Return how many tokens each choice of one prompt may have if the request does not say."""
        if not self.whole:
            return self.share  # a stream is not kept: any number
        return max(1, (self.share - num_prompt_tokens * self.n * self.repeated) // (self.n * self.token))

    def reserve(self, prompts: Sequence[Prompt], memory: Reservation) -> int:
        """Take memory for what is certain, and for a large answer all that it may take.

        Returns the bytes for what the answer repeats of the prompts.

        Raises:
            InvalidRequestError: the answer may take more than one key may use.
            OverloadedError: the memory is taken by other answers.
        """
        copies = self.n if self.whole else 1
        prompt_bytes = copies * self.repeated * sum(len(prompt.tokens) for prompt in prompts)
        most = prompt_bytes
        if self.whole:
            most += self.n * self.token * sum(prompt.max_tokens for prompt in prompts)
        if most > self.share:
            outputs = self.n * len(prompts)
            raise InvalidRequestError(
                f"the answer may take {most} bytes of memory ({outputs} outputs; {self.token} bytes for each token, "
                f"{self.repeated} for each of the prompt's), the limit is {self.share}, a quarter of "
                "--max-answer-memory: ask for less of n, max_tokens, logprobs, echo, return_token_ids or prompts at a "
                f"time{', or stream' if self.whole and self.token * outputs * 16 > prompt_bytes else ''}",
                "n" if self.n > 1 else "max_tokens",
            )
        if prompt_bytes > _ALWAYS_HAD or most > self.share // _LARGE:
            memory.grow_to(most if most > self.share // _LARGE else prompt_bytes)
        return prompt_bytes
