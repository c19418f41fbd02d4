"""Runs the generations of one HTTP request: submits them, merges their streams, aborts them."""

import asyncio
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from time import monotonic
from typing import TypeVar

from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import (
    AdmissionError,
    Gateway,
    GenerationRequest,
    GenerationStream,
    SequenceDelta,
)
from pagewise_gateway.http.clients import Client
from pagewise_gateway.http.errors import refusal
from pagewise_gateway.http.params import beam_params, stop_texts
from pagewise_gateway.http.responses import PromptTokensDetails, Usage
from pagewise_gateway.http.schema import GenerationFields

T = TypeVar("T")

_MOST_NEWS = 1024
"""Deltas of several prompts that are merged before the client has to take them."""


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of a request: its tokens, and its text if the client sent text."""

    tokens: "array[int]"
    max_tokens: int
    text: str | None = None


class Generations:
    """The running generations of one HTTP request, one per prompt. Leaving the context aborts what still runs.

    ``client``: whose limits they count against while the context lasts.
    ``request_id`` names the first prompt's generation; the others' have ``-1``, ``-2`` and so on behind it.
    Deltas come out with ``index`` being the choice's index in the response: prompt by prompt, n each.
    """

    def __init__(
        self,
        gateway: Gateway,
        body: GenerationFields,
        prompts: list[Prompt],
        sampling: SamplingParams,
        n: int,
        request_id: str,
        client: Client,
    ) -> None:
        self.n = n
        self.streams: list[GenerationStream] = []
        self._gateway = gateway
        self._client = client
        self._began = 0.0
        self._requests = [
            GenerationRequest(
                request_id=f"{request_id}-{number}" if number else request_id,
                prompt_token_ids=prompt.tokens,
                max_tokens=prompt.max_tokens,
                sampling=sampling,
                n=n,
                stop=stop_texts(body),
                include_stop_str_in_output=bool(body.include_stop_str_in_output),
                skip_special_tokens=body.skip_special_tokens is not False,
                priority=body.priority or 0,
                cache_salt=body.cache_salt,
                beam=beam_params(body, n),
                best_of=body.best_of if body.best_of is not None and body.best_of > n else 0,
                arrival_time=monotonic(),
                key=client.name,
            )
            for number, prompt in enumerate(prompts)
        ]

    def __enter__(self) -> "Generations":
        self._began = self._client.begin()
        try:
            for request in self._requests:
                self.streams.append(self._gateway.submit(request))
        except AdmissionError as error:
            self.__exit__()
            raise refusal(error) from error
        except BaseException:
            self.__exit__()
            raise
        self._client.use("prompt", sum(len(request.prompt_token_ids) for request in self._requests))
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            stream.abort()
        self._client.use("generation", sum(stream.num_drawn_tokens for stream in self.streams))
        self._client.end(self._began)

    async def deltas(self) -> AsyncGenerator[list[SequenceDelta], None]:
        """What is new, at most one delta per choice at a time.

        Raises:
            GenerationError: one of the generations failed.
        """
        if len(self.streams) == 1:
            async with aclosing(self._of(0)) as deltas:
                async for some in deltas:
                    yield some
            return
        news: list[SequenceDelta] = []
        changed, taken = asyncio.Event(), asyncio.Event()

        async def follow(number: int) -> None:
            nonlocal news
            try:
                async with aclosing(self._of(number)) as deltas:
                    async for some in deltas:
                        news += some
                        changed.set()
                        if len(news) > _MOST_NEWS:  # a slow reader; from here on its stream bounds what it leaves
                            taken.clear()
                            await taken.wait()
            finally:
                changed.set()

        tasks = [asyncio.create_task(follow(number)) for number in range(len(self.streams))]
        try:
            running = True
            while running:
                await changed.wait()
                changed.clear()
                done = [task for task in tasks if task.done()]
                running = len(done) < len(tasks)
                if news:
                    some, news = news, []
                    taken.set()
                    yield merged(some)
                for task in done:
                    task.result()  # raises where a stream has failed
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def usage(self) -> Usage:
        """Token counts so far."""
        stats = [stream.stats for stream in self.streams]
        prompt = sum(one.prompt_tokens for one in stats)
        # A request for no tokens may have computed one that is not shown.
        output = sum(
            one.output_tokens for one, request in zip(stats, self._requests, strict=True) if request.max_tokens
        )
        cached = sum(one.cached_tokens for one in stats)
        return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))

    async def _of(self, number: int) -> AsyncGenerator[list[SequenceDelta], None]:
        stream: AsyncIterator[list[SequenceDelta]] = aiter(self.streams[number])
        shown = self._requests[number].max_tokens > 0
        first = number * self.n
        try:
            async for deltas in stream:
                if not shown:
                    deltas = [replace(delta, text="", token_ids=[], logprobs=[]) for delta in deltas]
                if first:
                    deltas = [replace(delta, index=first + delta.index) for delta in deltas]
                yield merged(deltas)
        finally:
            if isinstance(stream, AsyncGenerator):
                await stream.aclose()


def merged(deltas: list[SequenceDelta]) -> list[SequenceDelta]:
    """The deltas put together, one per index, in the order in which the indexes appear."""
    if len(deltas) == 1:
        return deltas
    by_index: dict[int, list[SequenceDelta]] = {}
    for delta in deltas:
        by_index.setdefault(delta.index, []).append(delta)
    return [one_of(parts) for parts in by_index.values()]


def one_of(parts: list[SequenceDelta]) -> SequenceDelta:
    """Deltas of one sequence put together."""
    if len(parts) == 1:
        return parts[0]
    return SequenceDelta(
        parts[0].index,
        "".join([part.text for part in parts]),
        _joined(part.token_ids for part in parts),
        _joined(part.logprobs for part in parts),
        parts[-1].finish_reason,
        parts[-1].stop_reason,
    )


def _joined(lists: Iterable[list[T]]) -> list[T]:
    return [item for items in lists for item in items]
