"""``POST /v1/chat/completions``."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

from aiohttp import web
from pagewise_shared.protocol import Prompt

from pagewise_gateway.http.chat_answer import ChatAnswer, ChatRun, ParsedAnswer
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service
from pagewise_gateway.http.conversation import Parsing
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.memory_budget import AnswerSize
from pagewise_gateway.http.params import (
    check_common,
    check_output_length,
    check_priority,
    output_budget,
    sampling_params,
    strip,
    truncated,
)
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import check_segments, encode_bad_words, encode_chat, prompt_segments
from pagewise_gateway.http.responder import generate
from pagewise_gateway.http.schema import ChatRequest
from pagewise_gateway.http.structured import answer_grammar, grammar_of, wanted_grammar
from pagewise_gateway.text.output_parsing import Start


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Continue a conversation.

    Raises:
        APIError: the request is invalid, or cannot be served now.
        GenerationError: the request was not accepted, or failed before the response began.
    """
    body, intake = await read_request(request, ChatRequest)

    def respond(run: ChatRun) -> Awaitable[web.StreamResponse]:
        kind = ChatAnswer if run.parsing is None else ParsedAnswer
        return kind(f"chatcmpl-{request[REQUEST_ID]}", run).respond(request)

    return await run_chat(request, body, intake, respond)


async def run_chat(
    request: web.Request,
    body: ChatRequest,
    intake: Intake,
    respond: Callable[[ChatRun], Awaitable[web.StreamResponse]],
    *,
    repeated: int = 0,
) -> web.StreamResponse:
    """Submit a chat, and return what ``respond`` makes of it. ``intake``: what is held for the request.

    ``repeated``: bytes of the request that are kept because the answer repeats them.

    Raises:
        APIError, GenerationError: as ``create_chat_completion``.
    """
    service = request.app[Service.KEY]
    n = check_common(body, service.limits)
    check_priority(body, request[CLIENT])
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    check_segments(body)
    service.formats.check(body)
    parsing = _parsing(service, body)
    capacity = await service.link.wait_for_capacity()
    given = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    wanted: int | None = getattr(body, given)
    check_output_length(wanted, capacity, given, least=1)
    encoded = await encode_chat(service, body, capacity, request[CLIENT].name)
    start: Start = "main"
    if parsing is not None:
        start = parsing.format.start(encoded.text, _continued(body, parsing))
    grammar = await grammar_of(
        service,
        answer_grammar(body, parsing, start, service.tokenizer.special_tokens),  # it holds the tools: no name for it
        capacity,
        request[CLIENT].name,
    )
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        bad_words=await encode_bad_words(service, body.bad_words or [], request[CLIENT].name),
        grammar=grammar,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    tokens = truncated(encoded.tokens, body, wanted, capacity)
    size = AnswerSize.of(n, body.stream, service.answer_memory, logprobs=sampling.logprobs, echo=False, ids=False)
    default = size.default_tokens(len(tokens), repeated)
    budget = output_budget(body, wanted, default, len(tokens), capacity, prompt="messages", output=given)
    prompt = Prompt(tokens.tobytes(), budget, segments=prompt_segments(body, encoded))
    continues = bool(body.continue_final_message)
    strip(body)
    intake.memory.release()
    prompt_bytes = size.reserve([prompt], intake.answer, repeated)
    del encoded, tokens  # this frame lives until the response has ended
    shown = parsing.shown if parsing is not None else frozenset()
    with generate(request, body, (prompt,), sampling, n, intake, prompt_bytes, shown) as live:
        return await respond(ChatRun(service, body, live, parsing, start, continues))


def _parsing(service: Service, body: ChatRequest) -> Parsing | None:
    """How the outputs of a request are parsed; None: they are content as they are."""
    parsing = service.formats.parsing(body)
    return parsing and replace(parsing, calls_first=wanted_grammar(body) is not None)


def _continued(body: ChatRequest, parsing: Parsing | None) -> str | None:
    """What a parser has to know of the message that the output goes on with; None: it begins one."""
    if parsing is None or not body.continue_final_message:
        return None
    content = body.messages[-1].content
    text = content if isinstance(content, str) else "\n".join(part.text for part in content or ())
    return parsing.format.last_border(text)
