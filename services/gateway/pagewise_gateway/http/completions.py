"""``POST /v1/completions``."""

import asyncio
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import cast

from aiohttp import web
from msgspec import Raw
from pagewise_shared.protocol import Prompt

from pagewise_gateway.generation import Capacity, SequenceDelta
from pagewise_gateway.http import params, responses
from pagewise_gateway.http.answers import OpenAIAnswer, generate, usage
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.intake import AnswerSize
from pagewise_gateway.http.logprobs import NO_LOGPROBS, CompletionLogprobsBuilder, LogprobColumns, columns_json
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.pieces import check_segments
from pagewise_gateway.http.prompts import check_prompts, encode_bad_words, encode_prompt, prompt_segments
from pagewise_gateway.http.responses import CompletionChoice, CompletionResponse
from pagewise_gateway.http.schema import CompletionRequest
from pagewise_gateway.http.structured import grammar_of, wanted_grammar
from pagewise_gateway.http.writing import EventTemplate, encode, event
from pagewise_gateway.scheduler_client import LiveRequest

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    service = request.app[Service.KEY]
    body, intake = await read_request(request, CompletionRequest)
    n = params.check_common(body, service.limits)
    params.check_priority(body, request[CLIENT])
    given = check_prompts(body)
    if (sequences := len(given) * n) > params.MAX_SEQUENCES:
        raise InvalidRequestError(
            f"{len(given)} prompts with {n} sequences each are {sequences} sequences, "
            f"the most that one request may have is {params.MAX_SEQUENCES}",
            "n",
        )
    check_segments(body, given)
    capacity = await service.scheduler_client.wait_for_capacity()
    params.check_output_length(body.max_tokens, capacity, "max_tokens")
    sampling = params.sampling_params(
        body,
        service.generation.defaults,
        service.tokenizer,
        capacity,
        bad_words=await encode_bad_words(service, body.bad_words or [], request[CLIENT].name),
        grammar=await grammar_of(service, wanted_grammar(body), capacity, request[CLIENT].name),
        thinking=service.formats.budgets.of_completions(body, given, capacity),
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    size = AnswerSize(
        n, body.stream, service.answer_memory.share, body.logprobs, bool(body.echo), body.return_token_ids
    )
    prompts, texts = await _encoded(service, given, body, capacity, request[CLIENT].name)
    del given  # this frame lives until the response has ended
    params.strip(body)
    intake.memory.release()
    prompt_bytes = size.reserve(prompts, intake.answer)
    with generate(request, body, prompts, sampling, n, intake, prompt_bytes) as live:
        return await _Completion(f"cmpl-{request[REQUEST_ID]}", service, body, texts, live).respond(request)


async def _encoded(
    service: Service, given: list[str | list[int]], body: CompletionRequest, capacity: Capacity, key: str
) -> tuple[tuple[Prompt, ...], list[str | None]]:
    """Return the prompts, and the text of each prompt that is echoed as it is. Nothing else refers to the tokens of the
    prompts afterwards, so that their memory is freed.

    Raises:
        InvalidRequestError, ContextLengthError: a prompt cannot be used, or is too long.
    """
    prompts: list[Prompt] = []
    texts: list[str | None] = []
    limited = service.generation.limited
    wanted, default = limited(body.max_tokens), limited(DEFAULT_MAX_TOKENS)
    for one in given:
        if prompts:  # lets other requests run between the texts of a large request
            await asyncio.sleep(0)
        encoded = await encode_prompt(service, one, body, capacity, key)
        tokens = params.truncated(encoded.tokens, body, wanted, capacity)
        budget = params.output_budget(body, wanted, default, len(tokens), capacity)
        texts.append(one if body.echo and isinstance(one, str) and tokens is encoded.tokens else None)
        prompts.append(Prompt(tokens.tobytes(), budget, segments=prompt_segments(body, encoded)))
    return tuple(prompts), texts


class _Completion(OpenAIAnswer[CompletionResponse, CompletionChoice]):
    def __init__(
        self,
        completion_id: str,
        service: Service,
        body: CompletionRequest,
        texts: list[str | None],
        live: LiveRequest,
    ) -> None:
        """``texts``: of the prompts that are echoed as they are; None for the others."""
        super().__init__(CompletionResponse, completion_id, service, body, live, logprobs=body.logprobs is not None)
        self._repeats = bool(body.echo or body.return_token_ids)
        self.cheap = self.cheap and not self._repeats
        self._choices: list[_Choice] = []
        for number, text in enumerate(texts):
            repeated = _Repeated(service, body, text, live, number)
            self._choices += [_Choice(body, repeated) for _ in range(live.request.params.n)]
        self._unopened = len(self._choices)

    def quick(self) -> bool:
        """Return whether the events of the deltas that have arrived may be made at once. The first event of a choice
        may repeat a long prompt, so it may not."""
        return not (self._repeats and self._unopened) and super().quick()

    def _answer(self) -> CompletionResponse:
        return CompletionResponse(self._id, self._created, self._model, [], usage=usage(self._live))

    def _whole_choice(self, delta: SequenceDelta) -> Generator[bytes, None, CompletionChoice | None]:
        return (yield from self._choices[delta.index].part(delta))

    def _event(self, delta: SequenceDelta) -> bytes:
        choice = self._choices[delta.index]
        if self._only_text and choice.opened and delta.finish_reason is None:
            if not delta.text:
                return b""
            if choice.template is None:
                choice.template = EventTemplate(lambda text: self._chunk([CompletionChoice(delta.index, text)]))
            return choice.template.event(delta.text)
        return b"".join(self._event_pieces(delta))

    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        choice = self._choices[delta.index]
        if not choice.opened:
            self._unopened -= 1
        part = yield from choice.part(delta)
        if part is not None:
            yield event(self._chunk([part]))


class _Repeated:
    """The parts of a prompt that its choices repeat: text, token ids, log-probabilities.

    Each is made once, when the first choice needs it.
    """

    def __init__(
        self, service: Service, body: CompletionRequest, text: str | None, live: LiveRequest, number: int
    ) -> None:
        """``text``: of the prompt, if it is known. ``number``: the index of the prompt in the request."""
        self.tokens = live.request.prompts[number].token_ids
        self._service, self._body, self._text, self._live, self._number = service, body, text, live, number
        self._logprobs: tuple[LogprobColumns, int] | None = None

    @cached_property
    def text(self) -> str:
        """The text of the prompt."""
        if self._text is not None:
            return self._text
        return self._service.tokenizer.decode(self.tokens, self._body.skip_special_tokens is not False)

    @cached_property
    def token_ids(self) -> list[int]:
        """The tokens of the prompt, as JSON."""
        return cast("list[int]", Raw(encode(list(self.tokens))))

    def builder(self, offset: int, *, of_prompt: bool = False) -> CompletionLogprobsBuilder:
        """Return a builder of the log-probabilities of a choice, or of the prompt. ``offset``: of its text."""
        return CompletionLogprobsBuilder(
            self._service.tokenizer,
            () if of_prompt else self.tokens,
            self._body.skip_special_tokens is not False,
            offset,
            bool(self._body.return_tokens_as_token_ids),
        )

    def logprobs(self) -> Generator[bytes, None, tuple[LogprobColumns, int]]:
        """Return the log-probabilities of the prompt, and the length of its text in characters."""
        if self._logprobs is None:
            builder = self.builder(0, of_prompt=True)
            entries = self._live.prompts[self._number].logprobs
            self._logprobs = (yield from builder.add(entries, self.tokens[0])), builder.offset
        return self._logprobs


class _Choice:
    """One choice of the response.

    Fields:
        opened: whether a part of it has been made.
        template: makes the events that carry nothing but text.
    """

    def __init__(self, body: CompletionRequest, repeated: _Repeated) -> None:
        self.opened = False
        self.template: EventTemplate | None = None
        self._body, self._repeated = body, repeated
        self._logprobs: CompletionLogprobsBuilder | None = None  # made when it is needed: there may be many choices

    def part(self, delta: SequenceDelta) -> Generator[bytes, None, CompletionChoice | None]:
        """Return the part that a delta adds to the choice; None if there is nothing to send yet."""
        body, text = self._body, delta.text
        opening, self.opened = not self.opened, True
        if opening and body.echo:
            text = self._repeated.text + text
        elif not (text or delta.finish_reason or body.logprobs is not None or body.return_token_ids):
            return None
        choice = CompletionChoice(delta.index, text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason)
        if body.logprobs is not None:
            choice.logprobs = cast("responses.CompletionLogprobs", (yield from self._logprobs_of(delta)))
        if body.return_token_ids:
            choice.token_ids = delta.token_ids
            if opening:
                choice.prompt_token_ids = self._repeated.token_ids
        return choice

    def _logprobs_of(self, delta: SequenceDelta) -> Generator[bytes, None, Raw]:
        prompt, offset = NO_LOGPROBS, 0
        if self._logprobs is None:
            if self._body.echo:
                prompt, offset = yield from self._repeated.logprobs()
            self._logprobs = self._repeated.builder(offset)
        return columns_json(prompt, (yield from self._logprobs.add(delta.logprobs)))
