"""Submits a checked request, and makes its answer from the output: one JSON body, or a stream of events.

``Answer`` is the base of all APIs. ``OpenAIAnswer`` has the shape of completions and chats.
"""

import secrets
import string
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

from aiohttp import web
from pagewise_shared.protocol import Prompt, RequestParams, Submit
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import AnswerOptions, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service, client_request_id
from pagewise_gateway.http.conversation import Parsing
from pagewise_gateway.http.errors import APIError
from pagewise_gateway.http.hints import own_salt, reuse_hints
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.params import beam_params, check_model, stop_texts
from pagewise_gateway.http.request_log import Generated, RequestTrace
from pagewise_gateway.http.responses import (
    ChatChunk,
    ChatChunkChoice,
    ChatResponse,
    CompletionChoice,
    CompletionResponse,
    PromptTokensDetails,
    Usage,
)
from pagewise_gateway.http.schema import ChatRequest, GenerationFields
from pagewise_gateway.http.tools_schema import MAX_ID_LENGTH
from pagewise_gateway.http.writing import DONE, EventWriter, SilenceWatch, encode, event, known_error, note_blocked
from pagewise_gateway.scheduler_client import LiveRequest
from pagewise_gateway.text.output_parsing import MessageParser, Start, make_plain

ChunkT = TypeVar("ChunkT", bound=ChatChunk | CompletionResponse)
ChoiceT = TypeVar("ChoiceT", bound=ChatChunkChoice | CompletionChoice)
_NO_CHOICES = b'"choices":[]'
"""The position of the choices in an answer. It is unique in the JSON, because quotes inside strings are escaped."""
_ID_CHARACTERS = string.ascii_letters + string.digits
_PIECE = 1024
"""Characters of an output that are parsed at a time; other tasks may run in between."""


@contextmanager
def generate(
    request: web.Request,
    body: GenerationFields,
    prompts: tuple[Prompt, ...],
    sampling: SamplingParams,
    n: int,
    intake: Intake,
    prompt_bytes: int,
    shown_tokens: frozenset[int] = frozenset(),
) -> Iterator[LiveRequest]:
    """Submit a checked request. Leaving the context aborts the outputs that have not ended.

    The ``index`` of a delta is that of its choice in the response: prompt by prompt, n choices each. ``prompt_bytes``:
    as ``AnswerSize.reserve`` returns it. ``shown_tokens``: special tokens that stay in the text.
    """
    service, client, trace = request.app[Service.KEY], request[CLIENT], request.get(RequestTrace.KEY)
    submit = Submit(
        epoch=0,
        stream=0,
        request_id=request[REQUEST_ID],
        prompts=prompts,
        params=RequestParams(
            sampling=sampling,
            n=n,
            beam=beam_params(body, n),
            priority=body.priority or 0,
            cache_salt=client.cache_salt(own_salt(body)),
            key=client.name,
            client_request_id=client_request_id(request),
            reuse=reuse_hints(request, body, service.tokenizer.tool_call_ids),
            adapter=check_model(body.model, service.limits),
        ),
        limits=client.limits,
        memory=client.memory,
        traceparent=trace.traceparent if trace is not None else "",
    )
    options = AnswerOptions(
        stop=stop_texts(body),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        shown_tokens=shown_tokens,
        wants_token_ids=bool(body.return_token_ids),
        whole=not body.stream,
        prompt_bytes=prompt_bytes,
    )
    note_blocked(request, 0.0)  # so far
    if trace is not None:
        trace.submitted = monotonic()
    live = service.scheduler_client.submit(submit, options, intake.counted, intake.answer)
    try:
        yield live
    finally:
        try:
            generated = request[Generated.KEY] = Generated.of(live)
            if trace is not None:
                trace.generated(live, generated)
        finally:
            live.abort()


def usage(live: LiveRequest) -> Usage:
    """Return the token counts of a request so far."""
    prompt, output = sum(len(prompt.token_ids) for prompt in live.request.prompts), live.num_output_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(live.num_cached_tokens))


def choice_usage(live: LiveRequest, index: int, *, opening: bool = False) -> Usage:
    """Return the token counts of a choice so far, for chunks with continuous counts. ``opening``: whether the chunk is
    before the choice's first token."""
    number = index // live.request.params.n
    asked = live.request.prompts[number]
    prompt, output = len(asked.token_ids), len(live.output(index).tokens)
    output = 0 if opening or not asked.max_tokens else output
    return Usage(prompt, output, prompt + output, PromptTokensDetails(live.prompts[number].cached_tokens))


class Answer(ABC):
    """Makes the answer to one request from its output.

    Long answers are made in pieces, in turns (``LoopTurns``). Generators yield each piece that is done, and an empty
    one where other tasks may run.

    Fields:
        end: the bytes behind the last event of a stream.
        keep_alive: the bytes that a silent stream gets.
        cheap: whether all events are made so fast that they need no turns.
    """

    end = DONE
    keep_alive = b": keep-alive\n\n"
    cheap = False

    def __init__(self, service: Service, body: GenerationFields, live: LiveRequest) -> None:
        self._service, self._body, self._live = service, body, live

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Answer ``request`` with a stream of events if its body asks for one, else with one JSON body."""
        if self._body.stream:
            return await self._stream(request)
        pieces = self.whole(await self._live.outcome())
        body = await self._service.turns.all(request[CLIENT].name, pieces)
        return web.Response(body=body, content_type="application/json")

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Answer with the events of all deltas as they arrive, then ``last`` and ``end``.

        The response begins with the first deltas. So a request that fails before them still gets an error status, and
        clients that measure the time to the first event measure the time to the first token. If the first deltas
        take longer than ``--sse-keep-alive-interval``, the response begins with ``keep_alive``, and errors are events.
        """
        writer, turns, key, live = EventWriter(request), self._service.turns, request[CLIENT].name, self._live

        # The scheduler client calls a follower with every token. It writes without waking this task, which would take
        # as long as all other work on the token. If the client of the request has unread data, this task writes.
        def write_cheap() -> bool:
            if not writer.ready():
                return False
            writer.write(self.events(live.take_deltas()))
            return True

        def write_quick() -> bool:
            if not (writer.ready() and self.quick() and turns.free()):
                return False
            writer.write(self.events(live.take_deltas()))
            turns.done()
            return True

        follower = write_cheap if self.cheap else write_quick
        try:
            with SilenceWatch(writer, self._service.keep_alive, live.interrupt):
                while (news := await live.next()) or not live.ended:
                    if not news:
                        await writer.send(self.keep_alive)
                        continue
                    if self.cheap:
                        await writer.send(self.events(news))
                    else:
                        pieces = self.pieces(news)
                        del news  # so that each delta is freed once its events are made
                        while (piece := await turns.next(key, pieces)) is not None:
                            await writer.send(piece)
                    live.follow(follower)
        except ConnectionError:
            raise
        except Exception as error:
            if not writer.response.prepared:
                raise
            await writer.send(self.error(known_error(error, request)))
            return await writer.finish()
        await writer.send(self.last() + self.end)
        return await writer.finish()

    def quick(self) -> bool:
        """Return whether the events of the deltas that have arrived may be made at once."""
        return self._live.few_unread

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""
        return b"".join(self.pieces(news))

    @abstractmethod
    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the events for these deltas in pieces."""

    @abstractmethod
    def whole(self, outputs: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the JSON body of an answer that is not streamed, in pieces."""

    def last(self) -> bytes:
        """Return the event that ends a complete stream, or nothing."""
        return b""

    @abstractmethod
    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed, in the shape of its API."""


class OpenAIAnswer(Answer, Generic[ChunkT, ChoiceT]):
    """An answer in the shape of OpenAI's completions and chats: choices, and chunks of them."""

    def __init__(
        self,
        chunk_type: Callable[[str, int, str, list[ChoiceT]], ChunkT],
        completion_id: str,
        service: Service,
        body: GenerationFields,
        live: LiveRequest,
        *,
        logprobs: bool,
    ) -> None:
        """``chunk_type`` makes a chunk of the stream from its id, creation time, model and choices. ``logprobs``:
        whether the client asked for log-probabilities."""
        super().__init__(service, body, live)
        self._chunk_type = chunk_type
        self._id, self._created, self._model = completion_id, int(time.time()), body.model or service.limits.model_name
        options, always = body.stream_options, service.always_usage
        self._usage_wanted = always or bool(options and options.include_usage)
        continuous = always or bool(options and options.continuous_usage_stats)
        self._usage_in_every_chunk = self._usage_wanted and continuous
        # Most chunks carry nothing but text, and are made from a template.
        self._only_text = not (self._usage_in_every_chunk or body.return_token_ids or logprobs)
        self.cheap = self._only_text

    def events(self, news: list[SequenceDelta]) -> bytes:
        """Return the events for these deltas."""
        if len(news) == 1:
            return self._event(news[0])
        return b"".join([self._event(delta) for delta in news])

    def pieces(self, news: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the events for these deltas in pieces."""
        for delta in news:
            yield from self._event_pieces(delta)

    def whole(self, outputs: Iterable[SequenceDelta]) -> Iterator[bytes]:
        """Yield the JSON body of an answer that is not streamed, in pieces."""
        before, after = encode(self._answer()).split(_NO_CHOICES)
        yield before + _NO_CHOICES[:-1]
        comma = b""
        for delta in outputs:
            choice = yield from self._whole_choice(delta)
            yield comma + encode(choice)
            comma = b","
        yield _NO_CHOICES[-1:] + after

    def last(self) -> bytes:
        """Return the event with the token counts that ends a stream, or nothing if the client did not ask for it."""
        if not self._usage_wanted:
            return b""
        chunk = self._chunk([])
        chunk.usage = usage(self._live)
        return event(chunk)

    def error(self, error: APIError) -> bytes:
        """Return the event that ends a stream which has failed."""
        return b"data: %b\n\n" % error.body()

    @abstractmethod
    def _answer(self) -> ChatResponse | CompletionResponse:
        """Return the whole answer without its choices."""

    @abstractmethod
    def _whole_choice(self, delta: SequenceDelta) -> Generator[bytes, None, object]:
        """Return one choice of the whole answer."""

    @abstractmethod
    def _event(self, delta: SequenceDelta) -> bytes:
        """Return the events for this delta; there may be none."""

    @abstractmethod
    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        """Yield the events for this delta in pieces."""

    def _chunk(self, choices: list[ChoiceT]) -> ChunkT:
        chunk = self._chunk_type(self._id, self._created, self._model, choices)
        if self._usage_wanted:  # then OpenAI's chunks have a usage of null, except for the last one
            chunk.usage = choice_usage(self._live, choices[0].index) if self._usage_in_every_chunk and choices else None
        return chunk


@dataclass(slots=True, frozen=True)
class ChatRun:
    """A submitted chat.

    Fields:
        body: without its large fields.
        parsing: the options of parsing its outputs; None: outputs are content as they are.
        start, continues: the position at which an output begins, for ``MessageParser``.
        called: the names of the tools that its outputs have called so far.
    """

    service: Service
    body: ChatRequest
    live: LiveRequest
    parsing: Parsing | None
    start: Start
    continues: bool
    called: list[str] = field(default_factory=list)

    def parser(self) -> MessageParser:
        """Return a parser of one output."""
        if self.parsing is None:
            return make_plain()
        return self.parsing.parser(self.start, self.continues)

    def call_id(self, written: str) -> str:
        """Return the id of a tool call. ``written``: the id that the model wrote; empty: it wrote no id."""
        if 0 < len(written) <= MAX_ID_LENGTH:  # templates write it again, as the model has learnt it
            return written
        if self.parsing is not None and (length := self.parsing.format.tools.id_length):
            return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(length))
        return f"call_{secrets.token_hex(12)}"


def cut(text: str) -> Iterator[str]:
    """Yield the pieces in which a text is parsed."""
    for start in range(0, len(text), _PIECE):
        yield text[start : start + _PIECE]


def finish_reason(delta: SequenceDelta, parser: MessageParser) -> str | None:
    """Return the finish reason of an output in OpenAI's words. An output whose last call is cut off has not ended with
    tool calls.

    ``delta``: the last delta. ``parser``: of the output.
    """
    if delta.finish_reason != "stop" or not parser.num_calls:
        return delta.finish_reason
    return "tool_calls" if parser.whole else "stop"
