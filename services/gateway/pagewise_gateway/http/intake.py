"""The reservations of a request: a count in its key's limits, and memory for its body and its answer.

Bytes of answers are estimates: the bytes of a token (``generation.token_bytes``) times the number of tokens.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar

from aiohttp import web
from pagewise_shared.protocol import KeyLimits, Prompt, RequestParams, Submit
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import REPEATED_BYTES, TOKEN_BYTES, token_bytes
from pagewise_gateway.http.credentials import Client
from pagewise_gateway.http.errors import InvalidRequestError, OverloadedError
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import LiveRequest, SchedulerClient

SHARE = 4
"""An API key may use this fraction of the memory: one part in ``SHARE``."""
UNCOUNTED_BYTES = 65_536
"""The parts of its prompts that an answer repeats, and the texts that it has sent and keeps, are not counted up to this
size."""
_LARGE = 4
"""The memory of a large answer, which may take more than a quarter of a key's share, is reserved before its request
runs. For smaller answers it is reserved as tokens arrive, because most end long before their limit."""
_PAUSES = (0.0, 0.02, 0.1)
"""Seconds to wait before ``AnswerMemory`` checks again whether another answer has been written. The frame from the
scheduler that admits a request may also end another request, whose answer this gateway has not written yet."""


class MemoryBudget:
    """Counts the bytes that requests reserve for one purpose, in total and by API key.

    Fields:
        total: the most bytes of all requests. share: the most bytes of one API key, if there are keys.
        used: the reserved bytes.
    """

    def __init__(self, total: int, share: int, *, purpose: str, option: str, refused: Callable[[bool], None]) -> None:
        """``purpose``: a plural noun, for errors. ``option``: the option that sets ``total``. ``refused`` is
        called when there are not enough bytes, with true if the reason is the key's share."""
        self.total, self.share, self.used = total, share, 0
        self._purpose, self._option, self._refused = purpose, option, refused
        self._by_key: dict[str, int] = {}

    def reserve(self, key: str, size: int) -> None:
        """Reserve bytes for a request of a key.

        Raises:
            OverloadedError: the key's share or the total does not suffice; nothing was reserved.
        """
        used = self._by_key.get(key, 0)
        if key and used + size > self.share:
            self._refused(True)
            raise OverloadedError(
                f"API key {key}: {self._purpose} of its requests take {used} bytes, and this one needs {size}; the "
                f"limit is {self.share} (a part of {self._option})"
            )
        if self.used + size > self.total:
            self._refused(False)
            raise OverloadedError(
                f"{self._purpose} of requests take {self.used} bytes, and this one needs {size}; the limit is "
                f"{self.total} ({self._option})"
            )
        self.used += size
        self._by_key[key] = used + size

    def release(self, key: str, size: int) -> None:
        """Release reserved bytes."""
        self.used -= size
        self._by_key[key] -= size
        if not self._by_key[key]:
            del self._by_key[key]


class Reservation:
    """The bytes that are reserved for one request. ``size``: their number."""

    def __init__(self, memory: MemoryBudget, key: str) -> None:
        self.size = 0
        self._memory, self._key = memory, key

    def grow_to(self, size: int) -> None:
        """Reserve the bytes that are missing to ``size``.

        Raises:
            OverloadedError: as in ``MemoryBudget.reserve``.
        """
        if size > self.size:
            self._memory.reserve(self._key, size - self.size)
            self.size = size

    def shrink_to(self, size: int) -> None:
        """Release the bytes beyond ``size``."""
        if size < self.size:
            self._memory.release(self._key, self.size - size)
            self.size = size

    def release(self) -> None:
        """Release all bytes. Calling it again does nothing."""
        self.shrink_to(0)


class BodyMemory(MemoryBudget):
    """Counts the bytes of all bodies that this gateway is reading, parsing or tokenizing."""

    def __init__(self, total: int, largest_body: int, metrics: Metrics) -> None:
        super().__init__(
            total,
            max(total // SHARE, largest_body),
            purpose="the bodies",
            option="--max-body-memory",
            refused=lambda of_key: metrics.requests_refused("key_body_memory" if of_key else "body_memory").inc(),
        )
        metrics.http_body_bytes.set_function(lambda: self.used)


class AnswerMemory(MemoryBudget):
    """Counts the bytes of all answers that this gateway is collecting or writing, beyond 64 KiB of each.

    An answer that is not streamed is kept until it is written. Of a stream only the data that its client has not read
    is kept; a stream of ``/v1/responses`` also keeps its text, because its last event repeats the text.

    The requests of each API key that are being answered are counted here too.
    """

    def __init__(self, total: int, metrics: Metrics) -> None:
        super().__init__(
            total,
            total // SHARE,
            purpose="the answers",
            option="--max-answer-memory",
            refused=lambda of_key: metrics.requests_refused("key_answer_memory" if of_key else "answer_memory").inc(),
        )
        metrics.http_answer_bytes.set_function(lambda: self.used)
        self._metrics = metrics
        self._answering: dict[str, int] = {}

    async def begin_answer(self, client: Client) -> None:
        """Count a request of a client, which the scheduler has admitted, until its answer is written.

        The scheduler counts a request only until its last token. Without this count, the finished answers to a client
        that does not read would pile up here for as long as ``--write-timeout`` allows.

        Raises:
            OverloadedError: with the requests whose answers are not read yet, the key is over its limit.
        """
        most = client.limits.concurrent
        for pause in _PAUSES:
            if most is None or self._answering.get(client.name, 0) < most:
                break
            await asyncio.sleep(pause)
        number = self._answering.get(client.name, 0)
        if most is not None and number >= most:
            self._metrics.requests_refused("key_unread").inc()
            raise OverloadedError(
                f"API key {client.name}: {number} requests are being answered, and some of their answers wait to be "
                f"read; the limit of concurrent requests is {most}"
            )
        self._answering[client.name] = number + 1

    def end_answer(self, client: Client) -> None:
        """Stop counting a request: its answer was written, or the client is gone."""
        self._answering[client.name] -= 1
        if not self._answering[client.name]:
            del self._answering[client.name]


class AnswerSize:
    """The estimated bytes of the answer to a request."""

    def __init__(
        self,
        n: int,
        stream: bool | None,
        share: int,
        logprobs: int | None,
        echo: bool = False,
        return_ids: bool | None = False,
    ) -> None:
        """``n``: the number of choices for each prompt. ``share``: the most bytes that one key may use.
        ``logprobs``: the number of alternatives. ``echo``, ``return_ids``: whether choices repeat prompts as text, as
        ids."""
        self.n, self.whole, self.share = n, not stream, share
        self.token = token_bytes(logprobs)
        self.repeated = REPEATED_BYTES * (echo + bool(return_ids)) + (self.token - TOKEN_BYTES if echo else 0)

    def default_tokens(self, num_prompt_tokens: int, others: int) -> int:
        """Return the maximum number of tokens of each choice if the request sets none. ``others``: bytes that the
        answer repeats besides prompts."""
        if not self.whole:
            return self.share  # a stream is not kept: any number
        repeated = num_prompt_tokens * self.n * self.repeated + others
        return max(1, (self.share - repeated) // (self.n * self.token))

    def reserve(self, prompts: Sequence[Prompt], memory: Reservation, others: int = 0) -> int:
        """Reserve memory for the parts of the request that the answer repeats, and for a large answer also for all its
        tokens.

        ``others``: bytes that it repeats besides prompts. Returns the bytes of all repeated parts.

        Raises:
            InvalidRequestError: the answer may take more than one key may use.
            OverloadedError: other answers have reserved the memory.
        """
        copies, num_tokens = (self.n, sum(prompt.max_tokens for prompt in prompts)) if self.whole else (1, 0)
        prompt_bytes = copies * self.repeated * sum(len(prompt.token_ids) for prompt in prompts) + others
        most = prompt_bytes + copies * self.token * num_tokens
        if most > self.share:
            outputs = self.n * len(prompts)
            raise InvalidRequestError(
                f"the answer may take {most} bytes of memory ({outputs} outputs; {self.token} bytes for each token, "
                f"{self.repeated} for each of the prompt's), the limit is {self.share}, a quarter of "
                "--max-answer-memory: ask for less of n, max_tokens, logprobs, echo, return_token_ids or prompts at a "
                f"time{', or stream' if self.whole and self.token * outputs * 16 > prompt_bytes else ''}",
                "n" if self.n > 1 else "max_tokens",
            )
        large = self.share // _LARGE
        if (needed := most if most > large else prompt_bytes) > min(UNCOUNTED_BYTES, large):
            memory.grow_to(needed)
        return prompt_bytes


class Intake:
    """The reservations of one request, from the head of its body until it is answered.

    A request counts against the limits of its API key before its body is read. Otherwise a key could have any number of
    bodies read and parsed at a time, and refused requests would cost it nothing.

    Fields:
        memory: reserved for its body. answer: reserved for its answer.
        counted: the request without prompts that represents it at the scheduler until it is submitted; None: its key
            has no limits.
    """

    KEY: ClassVar[web.RequestKey["Intake"]] = web.RequestKey("intake")

    def __init__(self, client: Client, request_id: str, memory: BodyMemory, answers: AnswerMemory) -> None:
        self.memory = Reservation(memory, client.name)
        self.answer = Reservation(answers, client.name)
        self.counted: LiveRequest | None = None
        self._client, self._request_id = client, request_id
        self._answers, self._begun = answers, False

    async def count(self, scheduler_client: SchedulerClient) -> None:
        """Count the request against the limits of its key. The scheduler does so, over all gateways.

        Raises:
            GenerationError: the key is over one of its limits.
            OverloadedError: the key is over its limit with requests whose answers are not read yet.
        """
        client = self._client
        if client.limits == KeyLimits():
            return
        self.counted = scheduler_client.submit(
            Submit(0, 0, self._request_id, (), RequestParams(SamplingParams(), key=client.name), client.limits)
        )
        await self.counted.next()
        await self._answers.begin_answer(client)
        self._begun = True

    def close(self) -> None:
        """Release all reservations. ``counted`` ends here, unless the submitted request has replaced it."""
        self.memory.release()
        self.answer.release()
        if self._begun:
            self._begun = False
            self._answers.end_answer(self._client)
        if self.counted is not None:
            self.counted.abort()
