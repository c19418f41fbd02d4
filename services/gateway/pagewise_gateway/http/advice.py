"""Advice to the scheduler on cached KV: that of clients (``POST /v1/cache/advice``), and which tools chats have called.

The advice of a client is about the KV of its own API key.
"""

from array import array

import msgspec
from aiohttp import web
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Advise

from pagewise_gateway.http.advice_schema import AdviceAnswer, AdviceRequest
from pagewise_gateway.http.answers import ChatRun
from pagewise_gateway.http.context import CLIENT, Service
from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.hints_schema import LONGEST_SECONDS, seconds_of
from pagewise_gateway.http.params import check_model
from pagewise_gateway.http.parsing import read_request
from pagewise_gateway.http.prompts import encode_chat, encode_prompt
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest

_SUBJECTS = ("session_id", "request_id", "response_id", "prompt", "messages")
_OF_MESSAGES = ("tools", "chat_template_kwargs")
_LONGEST_NAME, _MOST_CALLS = 256, 16
"""Of the tools that a chat has called, as many are told, with names of so many characters."""
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")
"""The beginnings of the ids of responses, behind which the id of the request follows."""


async def give_advice(request: web.Request) -> web.Response:
    """Say when the KV of a session, a request or a prompt is used again.

    Raises:
        APIError: the request is invalid.
        GenerationError: the API key is over one of its limits, or no scheduler answers.
    """
    service, client = request.app[Service.KEY], request[CLIENT]
    body, _ = await read_request(request, AdviceRequest)
    adapter = check_model(body.model, service.limits)
    _check(body)
    tokens = await _tokens(service, body, client.name)
    salt = client.cache_salt(body.cache_salt)
    answer = await service.scheduler_client.queries.advise(
        Advise(
            epoch=0,
            number=0,
            kind=body.advice,
            key=client.name,
            # Sessions have the salt of their requests. The KV of an adapter is found under a salt of its own.
            cache_salt=salt if adapter is None or not tokens else adapter_salt(adapter.content, salt),
            session=body.session_id or "",
            request_id=body.request_id or _request_of(body.response_id or ""),
            tokens=tokens.tobytes(),
            seconds=_seconds(body),
            parent=body.parent or "",
        )
    )
    told = AdviceAnswer(answer.outcome, answer.reason, answer.seconds, answer.blocks, answer.tokens)
    return web.Response(body=msgspec.json.encode(told), content_type="application/json")


def tell_calls(run: ChatRun) -> None:
    """Tell the scheduler which tools a chat of a session has called, so that it learns when their results come."""
    request = run.live.request
    if not run.called or not request.params.reuse.session:
        return
    run.service.scheduler_client.queries.tell(
        Advise(
            epoch=0,
            number=0,
            kind="called",
            key=request.params.key,
            cache_salt=request.params.cache_salt,
            session=request.params.reuse.session,
            request_id=request.request_id,
            tools=tuple(dict.fromkeys(name[:_LONGEST_NAME] for name in run.called[:_MOST_CALLS])),
        )
    )


def _check(body: AdviceRequest) -> None:
    """Check what the fields say together.

    Raises:
        InvalidRequestError: they contradict each other, or one is missing.
    """
    given = [name for name in _SUBJECTS if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of {', '.join(_SUBJECTS)}, not {' and '.join(given) or 'none of them'}",
            given[-1] if given else _SUBJECTS[0],
        )
    if body.response_id is not None and not body.response_id.startswith(_PREFIXES):
        raise InvalidRequestError(f"the id of a response begins with {', '.join(_PREFIXES)}", "response_id")
    for name in _OF_MESSAGES:
        if getattr(body, name) is not None and body.messages is None:
            raise InvalidRequestError(f"{name} is only allowed with messages", name)
    if body.seconds is not None and body.ttl is not None:
        raise InvalidRequestError("give seconds or ttl, not both", "ttl")
    if _seconds(body) > LONGEST_SECONDS:
        raise InvalidRequestError("ttl must be at most a week", "ttl")
    if (body.parent is not None) != (body.advice == "fork"):
        raise InvalidRequestError("parent is required with the advice fork, and only allowed there", "parent")


async def _tokens(service: Service, body: AdviceRequest, key: str) -> "array[int]":
    """Return the tokens of the prompt; none if the advice is about something else. ``key``: name of the API key.

    Raises:
        InvalidRequestError, ContextLengthError: the prompt cannot be used, or is too long.
        AdmissionError: no executor has joined yet.
    """
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=False,
        )
        service.formats.check(chat)
        capacity = await service.scheduler_client.wait_for_capacity()
        return (await encode_chat(service, chat, capacity, key)).tokens
    if body.prompt is None:
        return array("i")
    if not body.prompt:
        raise InvalidRequestError("prompt must not be empty", "prompt")
    capacity = await service.scheduler_client.wait_for_capacity()
    return (await encode_prompt(service, body.prompt, CompletionRequest(prompt=""), capacity, key)).tokens


def _request_of(response_id: str) -> str:
    return next((response_id.removeprefix(prefix) for prefix in _PREFIXES if response_id.startswith(prefix)), "")


def _seconds(body: AdviceRequest) -> float:
    """Return the time of the advice; -1: it names none."""
    if body.ttl is not None:
        return seconds_of(body.ttl)
    return -1.0 if body.seconds is None else body.seconds
