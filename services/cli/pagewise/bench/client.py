"""Sends a request to an OpenAI-compatible server, and notes when each event of its stream comes."""

import time
from typing import Any

import aiohttp
import msgspec

from pagewise.bench.metrics import Outcome
from pagewise.bench.servers import Server

_SHOWN_DETAIL = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: Any = None
    message: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class _StreamError(Exception):
    """A stream that is none, or that says that something failed: the kind of error, and what it says."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Client:
    """Sends requests to one server over connections that are kept."""

    def __init__(self, http: aiohttp.ClientSession, server: Server, fields: dict[str, Any]) -> None:
        """``fields``: what every body has besides the model, the prompt and the number of tokens."""
        self.server = server
        self._http = http
        self._fields = fields

    def body(self, prompt: str | list[dict[str, str]], output_tokens: int) -> dict[str, Any]:
        """Return the body of a request. ``prompt``: a text, or the messages of a chat."""
        server = self.server
        told = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        body = {"model": server.model, **told, server.length_field: output_tokens, "stream": True}
        if server.streams_usage:
            body["stream_options"] = {"include_usage": True}
        if server.ignores_eos:
            body["ignore_eos"] = True
        return body | self._fields

    async def send(self, prompt: str | list[dict[str, str]], output_tokens: int, due: float = 0.0) -> Outcome:
        """Send a request and read its stream to the end; errors are part of what it returns."""
        body = msgspec.json.encode(self.body(prompt, output_tokens))
        now = time.perf_counter()
        outcome = Outcome(due or now, now, output_tokens)
        try:
            async with self._http.post(self.server.url + self.server.endpoint, data=body) as answer:
                if answer.status != 200:
                    said = (await answer.text(errors="replace"))[:_SHOWN_DETAIL]
                    raise _StreamError(f"HTTP {answer.status}", said)
                await _read(answer, outcome)
        except _StreamError as error:
            outcome.error, outcome.detail = error.kind, str(error)
        except TimeoutError as error:
            outcome.error, outcome.detail = "timeout", str(error) or "it took longer than --request-timeout"
        except aiohttp.ClientConnectorError as error:
            outcome.error, outcome.detail = "cannot connect", str(error)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            outcome.error, outcome.detail = "connection broke", f"{type(error).__name__}: {error}"
        outcome.end = time.perf_counter()
        return outcome


async def _read(answer: aiohttp.ClientResponse, outcome: Outcome) -> None:
    """Read a stream of server-sent events.

    Raises:
        _StreamError: it reports an error, is no such stream, or ends before it is complete.
    """
    texts: list[str] = []
    complete = False
    async for line in answer.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        now = time.perf_counter()
        if data == b"[DONE]":
            complete = True
            continue
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise _StreamError(
                "unreadable event", f"{error}: {data[:_SHOWN_DETAIL].decode(errors='replace')}"
            ) from error
        failed = event.message if event.object == "error" else event.error
        if failed is not None:
            raise _StreamError("error in the stream", str(failed)[:_SHOWN_DETAIL])
        if event.usage is not None:
            _note_usage(outcome, event.usage)
        for choice in event.choices or ():
            complete = complete or choice.finish_reason is not None
            if (said := _said(choice)) is not None:
                outcome.events.append(now)
                texts.append(said)
    outcome.text = "".join(texts)
    if not complete:
        kind = answer.headers.get("Content-Type", "")
        if not outcome.events and "event-stream" not in kind:
            raise _StreamError("no stream", f"the answer is {kind or 'of no type'}, not server-sent events")
        raise _StreamError("incomplete stream", f"it ended after {len(outcome.events)} events, without a finish_reason")
    if not outcome.events:
        if not outcome.output_tokens:
            raise _StreamError("no output", "the stream ended without a token")
        outcome.events.append(time.perf_counter())  # tokens that have no text: they came at the latest now


def _said(choice: _Choice) -> str | None:
    """Return the text of an event that carries output, None of one that does not (a role, a finish_reason)."""
    if choice.delta is None:
        return choice.text or None
    delta = choice.delta
    if delta.content:
        return delta.content
    # What a model thinks and calls is output as well, though no part of the conversation.
    return "" if delta.reasoning_content or delta.reasoning or delta.tool_calls else None


def _note_usage(outcome: Outcome, usage: _Usage) -> None:
    outcome.prompt_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens
    if usage.prompt_tokens_details is not None:
        outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
