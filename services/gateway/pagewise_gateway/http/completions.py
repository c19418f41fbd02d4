"""``POST /v1/completions``."""

import asyncio
from collections.abc import Callable
from functools import cache, partial

from aiohttp import web

from pagewise_gateway.generation import Capacity, Prompt, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.generate import Generation
from pagewise_gateway.http.logprobs import CompletionLogprobsBuilder
from pagewise_gateway.http.params import (
    check_common,
    check_num_sequences,
    check_priority,
    output_budget,
    sampling_params,
    truncated,
)
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import check_prompts, encode_bad_words, encode_prompt
from pagewise_gateway.http.responder import Responder, encoded_choices
from pagewise_gateway.http.responses import CompletionChoice, CompletionResponse
from pagewise_gateway.http.schema import CompletionRequest, strip
from pagewise_gateway.http.sse import EventTemplate, event

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    service = request.app[Service.KEY]
    body, intake = await read_request(request, CompletionRequest)
    n = check_common(body, service.limits)
    check_priority(body, request[CLIENT])
    given = check_prompts(body)
    check_num_sequences(len(given), body, n)
    capacity = await service.link.wait_for_capacity()
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        bad_words=await encode_bad_words(service, body.bad_words or [], request[CLIENT].name),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    prompts = await _encoded(service, given, body, capacity, request[CLIENT].name)
    del given  # this frame lives until the response has ended
    strip(body)
    intake.memory.release()
    with Generation(service.link, body, prompts, sampling, n, request, intake.counted) as generation:
        return await _Completion(f"cmpl-{request[REQUEST_ID]}", service, body, prompts, generation).respond(request)


async def _encoded(
    service: Service, given: list[str | list[int]], body: CompletionRequest, capacity: Capacity, key: str
) -> list[Prompt]:
    """Return the prompts as token ids. Nothing else refers to them, or to what they are made of, afterwards.

    Raises:
        InvalidRequestError, ContextLengthError: a prompt cannot be used, or is too long.
    """
    prompts: list[Prompt] = []
    for one in given:
        if prompts:  # lets other requests run between the texts of one that has many
            await asyncio.sleep(0)
        whole = await encode_prompt(service, one, body, capacity, key)
        tokens = truncated(whole, body, body.max_tokens, capacity)
        budget = output_budget(body, body.max_tokens, DEFAULT_MAX_TOKENS, len(tokens), capacity)
        text = one if body.echo and isinstance(one, str) and tokens is whole else None
        prompts.append(Prompt(tokens, budget, text))
    return prompts


class _Completion(Responder[CompletionResponse, CompletionChoice]):
    """The response to a text completion."""

    def __init__(
        self,
        completion_id: str,
        service: Service,
        body: CompletionRequest,
        prompts: list[Prompt],
        generation: Generation,
    ) -> None:
        super().__init__(
            CompletionResponse, completion_id, service, body, generation, logprobs=body.logprobs is not None
        )
        self._choices: list[_Choice] = []
        for prompt in prompts:
            text = cache(partial(_text, prompt, service, body.skip_special_tokens is not False))
            for _ in range(generation.n):
                self._choices.append(_Choice(service, body, prompt, text, generation, len(self._choices)))

    async def answer(self) -> CompletionResponse:
        """See ``Responder``."""
        outputs = await self._generation.outputs()
        parts = (choice.part(delta) for choice, delta in zip(self._choices, outputs, strict=True))
        answer = self._chunk(await encoded_choices(part for part in parts if part is not None))
        answer.usage = self._generation.usage()
        return answer

    def _event(self, delta: SequenceDelta) -> bytes:
        choice = self._choices[delta.index]
        if self._only_text and choice.opened and delta.finish_reason is None:
            if not delta.text:
                return b""
            if choice.template is None:
                choice.template = EventTemplate(lambda text: self._chunk([CompletionChoice(delta.index, text)]))
            return choice.template.event(delta.text)
        part = choice.part(delta)
        return event(self._chunk([part])) if part is not None else b""


class _Choice:
    """One choice of the response.

    Fields:
        opened: whether a part of it has been sent.
        template: makes the events that carry nothing but text.
    """

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        prompt: Prompt,
        prompt_text: Callable[[], str],
        generation: Generation,
        index: int,
    ) -> None:
        """``prompt_text``: returns the text of the prompt, to be echoed."""
        self.opened = False
        self.template: EventTemplate | None = None
        self._service, self._body, self._prompt, self._prompt_text = service, body, prompt, prompt_text
        self._generation, self._index = generation, index
        self._skip_special = body.skip_special_tokens is not False
        self._logprobs: CompletionLogprobsBuilder | None = None  # made when it is needed: there may be many choices

    def part(self, delta: SequenceDelta) -> CompletionChoice | None:
        """Return what a delta adds to the choice; None if there is nothing to send yet."""
        body, text, entries, first = self._body, delta.text, delta.logprobs, None
        opening, self.opened = not self.opened, True
        if opening and body.echo:
            text = self._prompt_text() + text
            entries = self._generation.prompt_logprobs(self._index) + entries
            first = self._prompt.tokens[0]
        elif not (text or delta.finish_reason or body.logprobs is not None or body.return_token_ids):
            return None
        choice = CompletionChoice(delta.index, text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if body.logprobs is not None:
            if self._logprobs is None:
                context = () if body.echo else self._prompt.tokens
                self._logprobs = CompletionLogprobsBuilder(self._service.tokenizer, context, self._skip_special)
            choice.logprobs = self._logprobs.add(entries, first)
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
            if opening:
                choice.prompt_token_ids = list(self._prompt.tokens)
        return choice


def _text(prompt: Prompt, service: Service, skip_special: bool) -> str:
    return prompt.text if prompt.text is not None else service.tokenizer.decode(prompt.tokens, skip_special)
