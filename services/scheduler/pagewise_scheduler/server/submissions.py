"""What gateways submit: counted against API keys, checked beyond its types, and made into requests of the core."""

import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

import msgspec
from pagewise_shared.block_hash import adapter_salt, is_own_salt
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import KeyLimits, Prompt, PromptSegments, RequestParams, Submit, unpack_int32s
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES, BeamParams
from pagewise_shared.segments import Segment, make_segments, mark_segments

from pagewise_scheduler.core.requests.request import FinishReason, RequestSequence
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.adapters import flaw_of_adapter
from pagewise_scheduler.server.admission_error import AdmissionError, ImpossibleError
from pagewise_scheduler.server.client_request import ClientRequest, OutputBuilder

_MOST_RETRY_SECONDS = 120
_SMOOTHING = 0.2
_MOST_KEYS = 10_000
"""Keys that are remembered; beyond that, those are forgotten that owe nothing and run nothing."""
MAX_STREAM = 2**31 - 1
"""The greatest stream number."""
MAX_STREAMS = 1 << 16
"""Sequences of one request, over all its prompts, whether they are outputs or only tried."""
MAX_CLIENT_ID = 128
"""Characters of the id that a client gives a request."""
_MAX_BEAMS = 4096
_MAX_LENGTH_PENALTY = 100.0
_MAX_TEXT = 1024
_MAX_TOKENS = 2**31 - 1
_MAX_PRIORITY = 2**53
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_AGE_US = 24 * 3600 * 1_000_000


@dataclass(slots=True)
class _Bucket:
    """So much a minute, at most a minute's worth at once. ``level`` may fall below 0: then it is owed."""

    per_minute: int
    level: float
    updated: float

    def refill(self, now: float) -> None:
        """Bring the level up to date."""
        self.level = min(self.per_minute, self.level + (now - self.updated) * self.per_minute / 60)
        self.updated = now

    def seconds_until(self, wanted: float, now: float) -> float:
        """Until the level is at least ``wanted``, 0 if it is."""
        self.refill(now)
        return max(0.0, (wanted - self.level) * 60 / self.per_minute)


class KeyUsage:
    """What the holders of the keys of one name have used. Without keys there is one of them, with the name ""."""

    def __init__(self, name: str, metrics: Metrics) -> None:
        self.name = name
        self._metrics = metrics
        self._running = 0
        self._seconds = 1.0
        self._limits = KeyLimits()
        self._requests: _Bucket | None = None
        self._tokens: _Bucket | None = None

    def limit(self, limits: KeyLimits, now: float) -> None:
        """Set what they may do from now on; what has been used stays used."""
        if limits != self._limits:
            self._limits = limits
            self._requests = _bucket(self._requests, limits.requests_per_minute, now)
            self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def begin(self, now: float) -> None:
        """Count a request that begins.

        Raises:
            AdmissionError: it is over one of the limits; the text says which.
        """
        limits = self._limits
        if limits.concurrent is not None and self._running >= limits.concurrent:
            text = f"{self._running} requests are running, the limit of concurrent requests is {limits.concurrent}"
            raise self._refusal("key_concurrent", text, self._seconds / limits.concurrent)
        if self._requests is not None and (seconds := self._requests.seconds_until(1, now)):
            text = f"the limit of {limits.requests_per_minute} requests per minute is used up"
            raise self._refusal("key_requests_per_minute", text, seconds)
        self.check_tokens(now)
        if self._requests is not None:
            self._requests.level -= 1
        self._running += 1
        if self.name:
            self._metrics.key_requests(self.name).inc()

    def check_tokens(self, now: float) -> None:
        """Check that the key has tokens left. A request that was counted earlier is checked again when it is submitted.

        Raises:
            AdmissionError: the tokens of this minute are used up.
        """
        if self._tokens is not None and (seconds := self._tokens.seconds_until(1, now)):
            text = f"the limit of {self._limits.tokens_per_minute} tokens per minute is used up"
            raise self._refusal("key_tokens_per_minute", text, seconds)

    def resume(self) -> None:
        """Count a request that began under another scheduler: it goes on whatever the limits are."""
        self._running += 1

    def cancel(self, *, charged: bool) -> None:
        """Stop counting a request that had begun and is not accepted after all.

        ``charged``: it still counts as one of the minute, because its body has been read and tokenized.
        """
        self._running -= 1
        if self._requests is not None and not charged:
            self._requests.level += 1

    def end(self, seconds: float) -> None:
        """A request that took so many seconds has ended."""
        self._running -= 1
        self._seconds += _SMOOTHING * (seconds - self._seconds)

    def use(self, kind: Literal["prompt", "generation"], tokens: int) -> None:
        """Count tokens of a request."""
        if self._tokens is not None:
            self._tokens.level -= tokens
        if self.name:
            self._metrics.key_tokens(self.name, kind).inc(tokens)

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        full = all(
            bucket is None or not bucket.seconds_until(bucket.per_minute, now)
            for bucket in (self._requests, self._tokens)
        )
        return full and not self._running

    def _refusal(self, reason: str, text: str, seconds: float) -> AdmissionError:
        self._metrics.requests_refused(reason).inc()
        seconds_shown = max(1, min(_MOST_RETRY_SECONDS, ceil(seconds)))
        return AdmissionError("overloaded", f"API key {self.name}: {text}", reason, seconds_shown)


class KeyUsages:
    """The usage of every key by its name."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._usages: dict[str, KeyUsage] = {}

    def of(self, name: str, limits: KeyLimits, now: float) -> KeyUsage:
        """The usage of a key. ``limits``: those that hold now, as the gateway has read them."""
        usage = self._usages.get(name)
        if usage is None:
            if len(self._usages) >= _MOST_KEYS:
                self._usages = {key: usage for key, usage in self._usages.items() if not usage.is_idle(now)}
            usage = self._usages[name] = KeyUsage(name, self._metrics)
        usage.limit(limits, now)
        return usage


def _bucket(before: _Bucket | None, per_minute: int | None, now: float) -> _Bucket | None:
    if per_minute is None:
        return None
    used = 0.0
    if before is not None:
        before.refill(now)
        used = before.per_minute - before.level
    return _Bucket(per_minute, per_minute - used, now)


_MAX_RETENTION, _MAX_TOOL_CALL_IDS = 2**31 - 1, 16


@dataclass(slots=True, eq=False)
class Submission:
    """One client's request: what it counts against, and its prompts.

    ``stream``: its first stream number, which names it at its gateway. ``began``: seconds of ``clock``. ``running``:
    prompts of it that have not ended; a request without prompts runs until its gateway ends it.
    """

    stream: int
    usage: KeyUsage
    began: float
    prompts: list[ClientRequest] = field(default_factory=list)
    running: int = 0


def num_streams(submit: Submit) -> int:
    """Stream numbers that a request takes; one without prompts has a number to be named by."""
    return max(1, len(submit.prompts) * submit.params.n)


def name_of(request_id: str, number: int) -> str:
    """What a prompt of a request is called: the first one as the request, the others with a number behind it."""
    return f"{request_id}-{number}" if number else request_id


_RULES: tuple[tuple[Callable[[Submit, RequestParams], bool], str], ...] = (
    (
        lambda submit, params: params.n >= 1 and params.num_sequences * len(submit.prompts) <= MAX_STREAMS,
        "{params.n} outputs of each prompt, out of {params.num_sequences}, or too many of them together",
    ),
    (lambda submit, params: params.beam is None or _is_beam(params.beam, params.n), "an impossible {params.beam}"),
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
        lambda submit, params: not submit.traceparent or bool(_TRACEPARENT.fullmatch(submit.traceparent)),
        "a traceparent that is none",
    ),
    (
        lambda submit, params: not is_own_salt(params.cache_salt),
        "a cache salt of the kind that stands for adapters or for LongRoPE",
    ),
    (
        lambda submit, params: all(
            limit is None or 1 <= limit <= _MAX_PRIORITY for limit in msgspec.structs.astuple(submit.limits)
        ),
        "{submit.limits}",
    ),
    (
        lambda submit, params: len(params.sampling.grammar.encode()) <= MAX_GRAMMAR_BYTES,
        f"a grammar of more than {MAX_GRAMMAR_BYTES} bytes",
    ),
)
"""The bounds of a request, each with the text that names a request beyond it."""


def _is_beam(beam: BeamParams, n: int) -> bool:
    return n <= beam.width <= _MAX_BEAMS and abs(beam.length_penalty) <= _MAX_LENGTH_PENALTY


def check(submit: Submit, vocab_size: int) -> None:
    """Look at a request, but for its prompts. ``vocab_size``: 0 if it is not known.

    Raises:
        ImpossibleError: a value of it is out of bounds; the text names the value.
    """
    params = submit.params
    for holds, text in _RULES:
        if not holds(submit, params):
            raise ImpossibleError(text.format(submit=submit, params=params))
    if params.adapter is not None and (flaw := flaw_of_adapter(params.adapter)) is not None:
        raise ImpossibleError(flaw)
    if (constraints := params.sampling.constraints) is not None and (flaw := constraints.flaw(vocab_size)) is not None:
        raise ImpossibleError(flaw)


def _tokens_of(packed: bytes, vocab_size: int) -> "array[int]":
    try:
        tokens = unpack_int32s(packed)
    except ProtocolError as error:
        raise ImpossibleError(f"{len(packed)} bytes of tokens") from error
    if tokens and not (min(tokens) >= 0 and (not vocab_size or max(tokens) < vocab_size)):
        raise ImpossibleError(f"a token outside the vocabulary of {vocab_size}")
    return tokens


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
    """The core's requests for the prompts of a request that was checked but for them. Their tokens are unpacked here.

    Those that go on from somewhere already have their sequences. ``request_id``: a name that is unique; ``now``:
    seconds of ``clock``. ``outputs``, ``on_end``: of each.

    Raises:
        ImpossibleError: something in a prompt cannot be; the text says what.
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
        if prompt.max_tokens and request.params.beam is None:  # the outputs of a beam search are told at its end
            request.sink = outputs
        if prompt.segments is not None:
            request.segments = _segments_of(len(request.prompt_token_ids), prompt.segments)
            mark_segments(request.prompt_token_ids, request.segments)
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
    """Let a request go on behind the tokens that its gateway has."""
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
    """Why a sequence that comes with tokens takes no more, though its gateway has not been told; None: it does."""
    tokens, request = sequence.output_token_ids, sequence.request
    may_stop = len(tokens) > sequence.sampling.min_tokens or bool(sequence.sampling.grammar)
    if tokens and tokens[-1] in sequence.stop_ids and may_stop:
        return "stop", tokens[-1]
    if len(tokens) >= request.max_tokens > 0:
        return "length", None
    return None
