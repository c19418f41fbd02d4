"""``POST /v1/chat/completions``: runs a chat, for other APIs too, and answers with its text as it is, or parsed."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

from aiohttp import web
from msgspec import UNSET
from pagewise_shared.protocol import Prompt, pack_int32s
from pagewise_shared.thinking import ThinkingBudget

from pagewise_gateway.generation import Capacity, SequenceDelta
from pagewise_gateway.http import params, responses
from pagewise_gateway.http.advice import tell_calls
from pagewise_gateway.http.answers import (
    Answer,
    ChatRun,
    OpenAIAnswer,
    choice_usage,
    cut,
    finish_reason,
    generate,
    usage,
)
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.conversation import Parsing
from pagewise_gateway.http.credentials import Client
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.hints import breakpoint_ttl
from pagewise_gateway.http.intake import AnswerSize, Intake
from pagewise_gateway.http.logprobs import chat_logprobs
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.pieces import check_segments
from pagewise_gateway.http.prompts import encode_bad_words, encode_chat, prompt_segments
from pagewise_gateway.http.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatResponse,
)
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.http.structured import answer_grammar, grammar_of, wanted_grammar
from pagewise_gateway.http.writing import EventTemplate, event
from pagewise_gateway.text.output_parsing import Delta, MessageParser, Start, joined


class ChatAnswer(OpenAIAnswer[ChatChunk, ChatChunkChoice]):
    """The response whose content is the text of the output as it is."""

    def __init__(self, completion_id: str, run: ChatRun) -> None:
        body = run.body
        super().__init__(ChatChunk, completion_id, run.service, body, run.live, logprobs=bool(body.logprobs))
        self._logprobs_wanted = bool(body.logprobs)
        self._token_ids_wanted = bool(body.return_token_ids)
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._prompt_token_ids = list(run.live.request.prompts[0].token_ids) if body.return_token_ids else UNSET
        self._templates: dict[int, EventTemplate] = {}

    def _answer(self) -> ChatResponse:
        return ChatResponse(
            self._id, self._created, self._model, [], usage(self._live), prompt_token_ids=self._prompt_token_ids
        )

    def _whole_choice(self, delta: SequenceDelta) -> Generator[bytes, None, ChatChoice]:
        message, reason = yield from self._message(delta)
        return ChatChoice(
            delta.index,
            message,
            (yield from self._logprobs(delta)),
            reason,
            delta.stop_reason,
            delta.token_ids if self._token_ids_wanted else UNSET,
        )

    def _message(self, delta: SequenceDelta) -> Generator[bytes, None, tuple[responses.AssistantMessage, str | None]]:
        """Return the message of a whole output, and its finish reason."""
        yield from ()
        return responses.AssistantMessage(delta.text), delta.finish_reason

    def _event(self, delta: SequenceDelta) -> bytes:
        template = self._templates.get(delta.index)
        if template is not None and self._only_text and delta.finish_reason is None:
            return template.event(delta.text) if delta.text else b""
        return b"".join(self._event_pieces(delta))

    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        index = delta.index
        if index not in self._templates:
            self._templates[index] = EventTemplate(
                lambda text: self._chunk([ChatChunkChoice(index, ChatDelta(content=text))])
            )
            yield self._opening(index)
        logprobs = yield from self._logprobs(delta)
        token_ids = delta.token_ids if self._token_ids_wanted else UNSET
        # Tokens whose text is held back get no chunk of their own, unless the client wants their ids or logprobs.
        if delta.text or logprobs is not None or token_ids:
            choice = ChatChunkChoice(index, ChatDelta(content=delta.text), logprobs, token_ids=token_ids)
            yield event(self._chunk([choice]))
        if delta.finish_reason is not None:
            yield self._ending(delta, delta.finish_reason)

    def _ending(self, delta: SequenceDelta, reason: str | None) -> bytes:
        ending = ChatChunkChoice(delta.index, ChatDelta(), finish_reason=reason, stop_reason=delta.stop_reason)
        return event(self._chunk([ending]))

    def _opening(self, index: int) -> bytes:
        chunk = self._chunk([ChatChunkChoice(index, ChatDelta("assistant", ""))])
        chunk.prompt_token_ids = self._prompt_token_ids
        if self._usage_in_every_chunk:
            chunk.usage = choice_usage(self._live, index, opening=True)
        return event(chunk)

    def _logprobs(self, delta: SequenceDelta) -> Generator[bytes, None, ChatLogprobs | None]:
        if not self._logprobs_wanted or delta.logprobs is None:
            return None
        return cast("ChatLogprobs", (yield from chat_logprobs(self._service.tokenizer, delta.logprobs, self._as_ids)))


class ParsedAnswer(ChatAnswer):
    """The response whose message is parsed from the text of the output."""

    def __init__(self, completion_id: str, run: ChatRun) -> None:
        super().__init__(completion_id, run)
        self._run = run
        self._reasoning = run.parsing is None or run.parsing.reasoning
        self._outputs: dict[int, _Output] = {}
        self.cheap = False  # parsing many unread tokens at once takes too long

    def _message(self, delta: SequenceDelta) -> Generator[bytes, None, tuple[responses.AssistantMessage, str | None]]:
        parser = self._run.parser()
        news: list[Delta] = []
        for text in cut(delta.text):
            news += parser.push(text)
            yield b""
        parsed = joined([*news, *parser.finish()])
        reasoning = parsed.reasoning or None if self._reasoning else UNSET
        message = responses.AssistantMessage(
            parsed.content or (None if parsed.calls or parsed.reasoning else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
        )
        if parsed.calls:
            self._run.called.extend(call.name for call in parsed.calls)
            message.tool_calls = [
                responses.ToolCall(self._run.call_id(call.id), responses.FunctionCall(call.name, call.arguments))
                for call in parsed.calls
            ]
        return message, finish_reason(delta, parser)

    def _event(self, delta: SequenceDelta) -> bytes:
        output = self._outputs.get(delta.index)
        if output is None or not self._only_text or delta.finish_reason is not None:
            return b"".join(self._event_pieces(delta))
        if not delta.text:
            return b""
        return b"".join([self._delta_event(delta.index, output, new) for new in output.parser.push(delta.text)])

    def _event_pieces(self, delta: SequenceDelta) -> Iterator[bytes]:
        index = delta.index
        if (output := self._outputs.get(index)) is None:
            output = self._outputs[index] = _Output(self._run.parser())
            yield self._opening(index)
        logprobs = yield from self._logprobs(delta)
        token_ids = delta.token_ids if self._token_ids_wanted else UNSET
        if logprobs is not None or token_ids:  # a chunk of their own: they belong to no piece of the message
            yield event(self._chunk([ChatChunkChoice(index, ChatDelta(), logprobs, token_ids=token_ids)]))
        for text in cut(delta.text):
            for new in output.parser.push(text):
                yield self._delta_event(index, output, new)
        if delta.finish_reason is not None:
            for new in output.parser.finish():
                yield self._delta_event(index, output, new)
            yield self._ending(delta, finish_reason(delta, output.parser))

    def _delta_event(self, index: int, output: "_Output", new: Delta) -> bytes:
        """Return the event for a piece of the message; nothing if the client does not want it."""
        if new.kind == "call":
            self._run.called.append(new.text)
            output.calls += 1
            output.templates.pop("arguments", None)
            called = responses.FunctionCallDelta(new.text, "")
            call = responses.ToolCallDelta(output.calls - 1, called, self._run.call_id(new.call_id), "function")
            return event(self._chunk([ChatChunkChoice(index, ChatDelta(tool_calls=[call]))]))
        if new.kind == "reasoning" and not self._reasoning:
            return b""
        if not self._only_text:
            return event(self._piece(index, output, new))
        if (template := output.templates.get(new.kind)) is None:
            template = EventTemplate(lambda text: self._piece(index, output, Delta(new.kind, text)))
            output.templates[new.kind] = template
        return template.event(new.text)

    def _piece(self, index: int, output: "_Output", new: Delta) -> ChatChunk:
        if new.kind == "content":
            delta = ChatDelta(content=new.text)
        elif new.kind == "reasoning":
            delta = ChatDelta(reasoning=new.text, reasoning_content=new.text)
        else:
            delta = ChatDelta(
                tool_calls=[responses.ToolCallDelta(output.calls - 1, responses.FunctionCallDelta(arguments=new.text))]
            )
        return self._chunk([ChatChunkChoice(index, delta)])


@dataclass(slots=True)
class _Output:
    """One output of a stream. ``calls``: the number that was sent. ``templates``: of events, by the kind of delta."""

    parser: MessageParser
    calls: int = 0
    templates: dict[str, EventTemplate] = field(default_factory=dict)


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Continue a conversation.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    body, intake = await read_request(request, ChatRequest)

    def answer(run: ChatRun) -> Answer:
        kind = ChatAnswer if run.parsing is None else ParsedAnswer
        return kind(f"chatcmpl-{request[REQUEST_ID]}", run)

    return await run_chat(request, body, intake, answer)


async def run_chat(
    request: web.Request,
    body: ChatRequest,
    intake: Intake,
    answer: Callable[[ChatRun], Answer],
    *,
    repeated: int = 0,
) -> web.StreamResponse:
    """Submit a chat, and respond with the answer that ``answer`` returns for it.

    ``repeated``: bytes of the request that are kept because the answer repeats them.

    Raises:
        APIError, GenerationError: as ``create_chat_completion``.
    """
    service, key = request.app[Service.KEY], request[CLIENT].name
    n = _check(service, body, request[CLIENT])
    parsing = service.formats.parsing(body)
    if parsing is not None:
        parsing = replace(parsing, calls_first=wanted_grammar(body) is not None)
    capacity = await service.scheduler_client.wait_for_capacity()
    given = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted = service.generation.limited(getattr(body, given))
    params.check_output_length(wanted, capacity, given, least=1)
    encoded = await encode_chat(service, body, capacity, key)
    start = _start(body, parsing, encoded.text)
    # The arguments are not named, because this frame would keep the tools in them until the response has ended.
    grammar = await grammar_of(
        service, answer_grammar(body, parsing, start, service.tokenizer.special_tokens), capacity, key
    )
    sampling = params.sampling_params(
        body,
        service.generation.defaults,
        service.tokenizer,
        capacity,
        thinking=_thinking_budget(service, body, parsing, start, capacity),
        bad_words=await encode_bad_words(service, body.bad_words or [], key),
        grammar=grammar,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    tokens = params.truncated(encoded.tokens, body, wanted, capacity)
    size = AnswerSize(n, body.stream, service.answer_memory.share, sampling.logprobs)
    default = service.generation.default_tokens(size.default_tokens(len(tokens), repeated))
    budget = params.output_budget(body, wanted, default, len(tokens), capacity, prompt="messages", output=given)
    places = pack_int32s(encoded.places)
    prompt = Prompt(tokens.tobytes(), budget, segments=prompt_segments(body, encoded), places=places)
    params.strip(body)
    intake.memory.release()
    prompt_bytes = size.reserve([prompt], intake.answer, repeated)
    del encoded, tokens  # this frame lives until the response has ended
    shown = parsing.shown if parsing is not None else frozenset()
    with generate(request, body, (prompt,), sampling, n, intake, prompt_bytes, shown) as live:
        run = ChatRun(service, body, live, parsing, start, bool(body.continue_final_message))
        response = await answer(run).respond(request)
        tell_calls(run)
        return response


def _thinking_budget(
    service: Service, body: ChatRequest, parsing: Parsing | None, start: Start, capacity: Capacity
) -> ThinkingBudget | None:
    output = parsing.format if parsing is not None else None
    calls = bool(body.tools) and body.tool_choice != "none"
    return service.formats.budgets.of(body, output, start, capacity, calls=calls)


def _start(body: ChatRequest, parsing: Parsing | None, prompt: str) -> Start:
    """Return where an output begins. ``prompt``: the end of its text."""
    return "main" if parsing is None else parsing.format.start(prompt, _continued(body, parsing))


def _check(service: Service, body: ChatRequest, client: Client) -> int:
    """Check the fields that can be checked without tokens, and return n.

    Raises:
        APIError: a field is wrong, or fields contradict each other.
    """
    n = params.check_common(body, service.limits)
    params.check_priority(body, client)
    body.prompt_cache_retention = body.prompt_cache_retention or breakpoint_ttl(body.messages)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    check_segments(body)
    service.formats.check(body)
    return n


def _continued(body: ChatRequest, parsing: Parsing) -> str | None:
    """Return the state of the parser at the end of the message that the output continues; None: it begins a message."""
    if not body.continue_final_message:
        return None
    content = body.messages[-1].content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    return parsing.format.last_border(text)
