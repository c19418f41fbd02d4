"""Submitted requests: the checks of their values, and the core's requests for their prompts."""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from pagewise_shared.block_hash import adapter_salt, is_own_salt
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import MemorySize, Prompt, PromptSegments, RequestParams, Submit, unpack_int32s
from pagewise_shared.protocol.limits import MAX_PLACES
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES, BeamParams
from pagewise_shared.segments import Segment, make_segments, mark_segments

from pagewise_scheduler.core.requests.request import FinishReason, RequestSequence
from pagewise_scheduler.server.adapters import adapter_error
from pagewise_scheduler.server.client_request import ClientRequest, OutputBuilder
from pagewise_scheduler.server.request_limits import KeyUsage
from pagewise_scheduler.server.sessions import ImpossibleError

MAX_STREAM = 2**31 - 1
"""The greatest stream number."""
MAX_STREAMS = 1 << 16
"""Sequences of one request, over all its prompts: its outputs, or the hypotheses of beam searches."""
MAX_CLIENT_ID = 128
"""Characters of a client's request id."""
_MAX_BEAMS = 4096
_MAX_LENGTH_PENALTY = 100.0
_MAX_TEXT = 1024
_MAX_TOKENS = 2**31 - 1
_MAX_PRIORITY = 2**53
_MAX_RETENTION, _MAX_TOOL_CALL_IDS = 2**31 - 1, 16
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_AGE_US = 24 * 3600 * 1_000_000


@dataclass(slots=True, eq=False)
class Submission:
    """One client's request, with its prompts and the usage that it counts against.

    ``stream``: its first stream number, which identifies it at its gateway. ``began``: seconds of ``clock``.
    ``running``: prompts that have not ended; a request without prompts runs until its gateway ends it.
    """

    stream: int
    usage: KeyUsage
    began: float
    prompts: list[ClientRequest] = field(default_factory=list)
    running: int = 0


def num_streams(submit: Submit) -> int:
    """Return the stream numbers that a request takes; a request without prompts takes one, as its id."""
    return max(1, len(submit.prompts) * submit.params.n)


def name_of(request_id: str, number: int) -> str:
    """Return the id of a prompt: the request's id for the first prompt, with a suffix for the others."""
    return f"{request_id}-{number}" if number else request_id


_RULES: tuple[tuple[Callable[[Submit, RequestParams], bool], str], ...] = (
    (
        lambda submit, params: params.n >= 1 and params.num_sequences * len(submit.prompts) <= MAX_STREAMS,
        "{params.n} outputs of each prompt, out of {params.num_sequences}, or too many of them together",
    ),
    (lambda submit, params: params.beam is None or _is_beam(params.beam, params.n), "an impossible {params.beam}"),
    (
        lambda submit, params: params.beam is None or params.sampling.thinking is None,
        "a beam search with a thinking budget",
    ),
    (
        lambda submit, params: max(len(submit.request_id), len(params.key)) <= _MAX_TEXT,
        f"a name of more than {_MAX_TEXT} characters",
    ),
    (
        lambda submit, params: len(name := params.client_request_id) <= MAX_CLIENT_ID and name.isprintable(),
        f"a client's id of more than {MAX_CLIENT_ID} characters, or some that cannot be printed",
    ),
    (lambda submit, params: abs(params.priority) <= _MAX_PRIORITY, "priority {params.priority}"),
    (
        lambda submit, params: 0 <= params.reuse.retention <= _MAX_RETENTION,
        "a retention of {params.reuse.retention} s",
    ),
    (
        lambda submit, params: len(params.reuse.tool_call_ids) <= _MAX_TOOL_CALL_IDS,
        f"more than {_MAX_TOOL_CALL_IDS} tokens that call tools",
    ),
    (
        lambda submit, params: len(params.reuse.cache_key) <= _MAX_TEXT,
        f"a prompt_cache_key of more than {_MAX_TEXT} characters",
    ),
    (
        lambda submit, params: max(len(params.reuse.session), len(params.reuse.parent)) <= _MAX_TEXT,
        f"a session with a name of more than {_MAX_TEXT} characters",
    ),
    (
        lambda submit, params: -1 <= params.reuse.returns_in <= _MAX_RETENTION,
        "a session that returns in {params.reuse.returns_in} s",
    ),
    (
        lambda submit, params: not submit.traceparent or bool(_TRACEPARENT.fullmatch(submit.traceparent)),
        "an invalid traceparent",
    ),
    (
        lambda submit, params: not is_own_salt(params.cache_salt),
        "a cache salt of the form that is reserved for adapters and LongRoPE",
    ),
    (
        lambda submit, params: all(
            limit is None or 1 <= limit <= _MAX_PRIORITY for limit in msgspec.structs.astuple(submit.limits)
        ),
        "{submit.limits}",
    ),
    (
        lambda submit, params: all(
            one.tier >= 0 and all(map(_is_size, (one.min, one.low, one.high or one.low))) for one in submit.memory
        ),
        "{submit.memory}",
    ),
    (
        lambda submit, params: len(params.sampling.grammar.encode()) <= MAX_GRAMMAR_BYTES,
        f"a grammar of more than {MAX_GRAMMAR_BYTES} bytes",
    ),
)
"""The rules of a request, each with the error text of a request that breaks it."""


def _is_size(size: MemorySize) -> bool:
    return 0 <= size.bytes <= _MAX_PRIORITY and 0 <= size.share <= 1


def _is_beam(beam: BeamParams, n: int) -> bool:
    return n <= beam.width <= _MAX_BEAMS and abs(beam.length_penalty) <= _MAX_LENGTH_PENALTY


def check(submit: Submit, vocab_size: int) -> None:
    """Check a request except for its prompts. ``vocab_size``: 0 if unknown.

    Raises:
        ImpossibleError: a value is out of bounds; the text names it.
    """
    params = submit.params
    for holds, text in _RULES:
        if not holds(submit, params):
            raise ImpossibleError(text.format(submit=submit, params=params))
    if params.adapter is not None and (error := adapter_error(params.adapter)) is not None:
        raise ImpossibleError(error)
    for limit in (params.sampling.constraints, params.sampling.thinking):
        if limit is not None and (error := limit.error(vocab_size)) is not None:
            raise ImpossibleError(error)


def _tokens_of(packed: bytes, vocab_size: int) -> "array[int]":
    try:
        tokens = unpack_int32s(packed)
    except ProtocolError as error:
        raise ImpossibleError(f"{len(packed)} bytes of tokens") from error
    if tokens and not (min(tokens) >= 0 and (not vocab_size or max(tokens) < vocab_size)):
        raise ImpossibleError(f"a token outside the vocabulary of {vocab_size}")
    return tokens


def _places_of(num_tokens: int, packed: bytes) -> "array[int]":
    try:
        places = unpack_int32s(packed)
    except ProtocolError as error:
        raise ImpossibleError(f"{len(packed)} bytes of places") from error
    if len(places) > MAX_PLACES or not all(0 <= place <= num_tokens for place in places):
        raise ImpossibleError(f"{len(places)} places, or some outside the prompt")
    return places


def _segments_of(num_tokens: int, given: PromptSegments) -> tuple[Segment, ...]:
    try:
        edges = unpack_int32s(given.ranges)
        ranges = list(zip(edges[::2], edges[1::2], strict=True))
        return make_segments(num_tokens, ranges, root=given.root, boundary=given.boundary)
    except (ProtocolError, ValueError) as error:
        raise ImpossibleError(f"segments that cannot be: {error}") from error


def requests_of(
    submit: Submit,
    request_id: str,
    now: float,
    vocab_size: int,
    *,
    outputs: OutputBuilder,
    on_end: Callable[[ClientRequest], None],
) -> list[ClientRequest]:
    """Return the core's requests for the prompts of a checked request, with unpacked tokens.

    A request that resumes already has its sequences. ``request_id``: unique; ``now``: seconds of ``clock``.
    ``outputs``, ``on_end``: of each request.

    Raises:
        ImpossibleError: a value of a prompt is out of bounds; the text names it.
    """
    arrival = now - min(max(0, submit.age_us), _MAX_AGE_US) * 1e-6
    params = submit.params
    if params.adapter is not None:
        salt = adapter_salt(params.adapter.content, params.cache_salt)
        params = msgspec.structs.replace(params, cache_salt=salt)
    requests = []
    for number, prompt in enumerate(submit.prompts):
        _check_prompt(prompt, params.n)
        request = ClientRequest(
            request_id=name_of(request_id, number),
            prompt_token_ids=_tokens_of(prompt.tokens, vocab_size),
            max_tokens=prompt.max_tokens,
            params=params,
            arrival_time=arrival,
            stream=submit.stream + number * params.n,
            outputs=outputs,
            on_end=on_end,
            arrived=now,
            unfinished=params.n - sum(progress.finished for progress in prompt.progress),
            traceparent=submit.traceparent,
        )
        if prompt.max_tokens and request.params.beam is None:  # the outputs of a beam search are sent at its end
            request.sink = outputs
        if prompt.segments is not None:
            request.segments = _segments_of(len(request.prompt_token_ids), prompt.segments)
            mark_segments(request.prompt_token_ids, request.segments)
        request.places = _places_of(len(request.prompt_token_ids), prompt.places)
        _resume(request, prompt, vocab_size)
        requests.append(request)
    return requests


def _check_prompt(prompt: Prompt, n: int) -> None:
    if not prompt.tokens:
        raise ImpossibleError("a prompt of no tokens")
    if not 0 <= prompt.max_tokens <= _MAX_TOKENS:
        raise ImpossibleError(f"{prompt.max_tokens} output tokens")
    if prompt.progress and len(prompt.progress) != n:
        raise ImpossibleError(f"the progress of {len(prompt.progress)} outputs, of {n}")


def _resume(request: ClientRequest, prompt: Prompt, vocab_size: int) -> None:
    """Restore the outputs that the gateway of a resumed request has received."""
    tokens = [_tokens_of(progress.tokens, vocab_size) for progress in prompt.progress]
    if (most := max(map(len, tokens), default=0)) > prompt.max_tokens:
        raise ImpossibleError(f"{most} output tokens of at most {prompt.max_tokens}")
    if request.params.beam is not None:  # a beam search starts over: no client has seen any of its tokens
        request.unfinished = request.params.n if request.unfinished else 0
    elif tokens:
        request.create_sequences(every=True)
        for sequence, known, progress in zip(request.sequences, tokens, prompt.progress, strict=True):
            sequence.output_token_ids = known
            if progress.finished:
                sequence.end(None)
        request.tokens_before = sum(map(len, tokens))


def end_of(sequence: RequestSequence) -> tuple[FinishReason, int | None] | None:
    """Return the finish reason and the stop token of a resumed sequence that is complete; None if it takes more tokens.

    The scheduler before may have ended without sending the finish to the gateway.
    """
    tokens, request = sequence.output_token_ids, sequence.request
    may_stop = len(tokens) > sequence.sampling.min_tokens or bool(sequence.sampling.grammar)
    if tokens and tokens[-1] in sequence.stop_ids and may_stop:
        return "stop", tokens[-1]
    if len(tokens) >= request.max_tokens > 0:
        return "length", None
    return None
