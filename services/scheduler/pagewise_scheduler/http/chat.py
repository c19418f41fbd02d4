"""``POST /v1/chat/completions``."""

import time
from typing import Any

import msgspec
from aiohttp import web

from pagewise_scheduler.generation import GenerationError
from pagewise_scheduler.http.context import Service
from pagewise_scheduler.http.errors import APIError, InvalidRequest
from pagewise_scheduler.http.generate import ChoiceDelta, Generations, Prompt, stream_events
from pagewise_scheduler.http.logprobs import chat_logprobs
from pagewise_scheduler.http.params import (
    check_model,
    message_fields,
    output_budget,
    read_body,
    sampling_params,
    sequence_count,
    truncated,
)
from pagewise_scheduler.http.schema import ChatRequest
from pagewise_scheduler.text.errors import ChatTemplateError


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Continue a conversation.

    Raises:
        APIError: the request is wrong, or cannot be served now.
    """
    service = request.app[Service.KEY]
    body = await read_body(request, ChatRequest)
    check_model(body.model, service.limits)
    capacity = service.require_capacity()
    n = sequence_count(body, service.limits)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidRequest("max_tokens and max_completion_tokens differ: give one", param="max_tokens")
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=None,
    )
    tokens = await service.encode(render(service, body), add_special_tokens=False)
    if not tokens:
        raise InvalidRequest("the messages render to an empty prompt", param="messages")
    tokens = truncated(tokens, body, capacity)
    wanted = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    prompt = Prompt(tokens, output_budget(wanted, None, len(tokens), body, capacity))
    generations = Generations(service.gateway, body, [prompt], sampling, n, request["request_id"])
    head = {
        "id": f"chatcmpl-{request['request_id']}",
        "created": int(time.time()),
        "model": service.limits.model_name,
    }
    with generations:
        if body.stream:
            return await _stream(request, service, body, generations, prompt, head, n)
        return await _answer(service, body, generations, prompt, head, n)


def render(service: Service, body: Any) -> str:
    """The prompt text of a request's messages.

    Raises:
        InvalidRequest: they cannot be rendered.
    """
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    try:
        return service.tokenizer.render_chat(
            message_fields(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False and not body.continue_final_message,
            continue_final_message=bool(body.continue_final_message),
        )
    except ChatTemplateError as error:
        raise InvalidRequest(str(error), param="messages") from error


def _echoed(body: ChatRequest) -> str:
    """With ``echo``, a message that is continued comes back in front of its continuation."""
    if not (body.echo and body.continue_final_message):
        return ""
    return str(message_fields(body.messages[-1:])[0]["content"])


async def _stream(
    request: web.Request,
    service: Service,
    body: ChatRequest,
    generations: Generations,
    prompt: Prompt,
    head: dict[str, Any],
    n: int,
) -> web.StreamResponse:
    head = head | {"object": "chat.completion.chunk"}
    options = body.stream_options
    usage = bool(options and options.include_usage)
    continuous = bool(usage and options and options.continuous_usage_stats)

    def first() -> list[object]:
        delta = {"role": "assistant", "content": _echoed(body)}
        extra = {"prompt_token_ids": list(prompt.tokens)} if body.return_token_ids else {}
        return [
            head | {"choices": [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None}]} | extra
            for i in range(n)
        ]

    def chunks(items: list[ChoiceDelta]) -> list[object]:
        extra = {"usage": generations.usage()} if continuous else {"usage": None} if usage else {}
        return [head | {"choices": [_chunk(service, body, item)]} | extra for item in items]

    def last() -> list[object]:
        return [head | {"choices": [], "usage": generations.usage()}] if usage else []

    return await stream_events(
        request, generations, service.metrics, service.patience, service.headers(request), first, chunks, last
    )


def _chunk(service: Service, body: ChatRequest, item: ChoiceDelta) -> dict[str, object]:
    delta = item.delta
    choice: dict[str, object] = {
        "index": item.choice,
        "delta": {"content": delta.text} if delta.text or delta.finish_reason is None else {},
        "logprobs": chat_logprobs(service.tokenizer, delta.logprobs) if body.logprobs else None,
        "finish_reason": delta.finish_reason,
    }
    if delta.finish_reason is not None:
        choice["stop_reason"] = delta.stop_reason
    if body.return_token_ids:
        choice["token_ids"] = delta.token_ids
    return choice


async def _answer(
    service: Service,
    body: ChatRequest,
    generations: Generations,
    prompt: Prompt,
    head: dict[str, Any],
    n: int,
) -> web.Response:
    deltas: list[list[Any]] = [[] for _ in range(n)]
    try:
        async for items in generations.deltas():
            for item in items:
                deltas[item.choice].append(item.delta)
    except GenerationError as error:
        raise APIError(str(error)) from error
    choices = []
    for index, parts in enumerate(deltas):
        text = _echoed(body) + "".join(part.text for part in parts)
        entries = [entry for part in parts for entry in part.logprobs]
        choice: dict[str, object] = {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(service.tokenizer, entries) if body.logprobs else None,
            "finish_reason": parts[-1].finish_reason,
            "stop_reason": parts[-1].stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = [token for part in parts for token in part.token_ids]
        choices.append(choice)
    answer: dict[str, object] = head | {"object": "chat.completion", "choices": choices, "usage": generations.usage()}
    if body.return_token_ids:
        answer["prompt_token_ids"] = list(prompt.tokens)
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
