"""``POST /v1/completions``."""

import time
from array import array
from typing import Any

import msgspec
from aiohttp import web

from pagewise_scheduler.generation import Capacity, GenerationError
from pagewise_scheduler.http.context import Service
from pagewise_scheduler.http.errors import APIError, InvalidRequest
from pagewise_scheduler.http.generate import ChoiceDelta, Generations, Prompt, stream_events
from pagewise_scheduler.http.logprobs import completion_logprobs
from pagewise_scheduler.http.params import (
    check_model,
    output_budget,
    read_body,
    sampling_params,
    sequence_count,
    truncated,
)
from pagewise_scheduler.http.schema import MAX_PROMPTS, CompletionRequest

DEFAULT_MAX_TOKENS = 16


class _Choice:
    """What has been said of one choice: its state between chunks, or the whole for a single answer."""

    def __init__(self, service: Service, body: CompletionRequest, index: int, prompt: Prompt) -> None:
        self._service, self._body, self._prompt = service, body, prompt
        self.index = index
        self.started = False
        self._offset = 0

    def chunk(self, item: ChoiceDelta, generations: Generations) -> dict[str, object]:
        """The choice's part of a response: news as a dict in OpenAI's shape."""
        body, delta, tokenizer = self._body, item.delta, self._service.tokenizer
        text, entries, first = delta.text, delta.logprobs, None
        tokens = delta.token_ids
        opening, self.started = not self.started, True
        if body.max_tokens == 0:
            text, tokens, entries = "", [], []
        if opening and body.echo:
            text = self._prompt_text() + text
            if body.logprobs is not None:
                first = self._prompt.tokens[0]
                entries = generations.streams[item.prompt].prompt_logprobs + entries
        choice: dict[str, object] = {
            "index": self.index,
            "text": text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        if body.logprobs is not None:
            choice["logprobs"], self._offset = completion_logprobs(tokenizer, entries, first, self._offset)
        if body.return_token_ids:
            choice["token_ids"] = tokens
            if opening:
                choice["prompt_token_ids"] = list(self._prompt.tokens)
        return choice

    def _prompt_text(self) -> str:
        if self._prompt.text is not None:
            return self._prompt.text
        skip = self._body.skip_special_tokens is not False
        return self._service.tokenizer.decode(list(self._prompt.tokens), skip)


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Complete one or several prompts.

    Raises:
        APIError: the request is wrong, or cannot be served now.
    """
    service = request.app[Service.KEY]
    body = await read_body(request, CompletionRequest)
    check_model(body.model, service.limits)
    capacity = service.require_capacity()
    n = sequence_count(body, service.limits)
    wants_prompt_logprobs = body.echo and body.logprobs is not None
    sampling = sampling_params(
        body,
        service.tokenizer,
        capacity,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if wants_prompt_logprobs else None,
    )
    prompts = [await _tokenize(service, body, prompt, capacity) for prompt in _prompts(body)]
    generations = Generations(service.gateway, body, prompts, sampling, n, request["request_id"])
    choices = [_Choice(service, body, i * n + j, prompt) for i, prompt in enumerate(prompts) for j in range(n)]
    head = {
        "id": f"cmpl-{request['request_id']}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.limits.model_name,
    }
    with generations:
        if body.stream:
            return await _stream(request, service, body, generations, choices, head)
        return await _answer(generations, choices, head)


async def _stream(
    request: web.Request,
    service: Service,
    body: CompletionRequest,
    generations: Generations,
    choices: list[_Choice],
    head: dict[str, Any],
) -> web.StreamResponse:
    options = body.stream_options
    usage = bool(options and options.include_usage)
    continuous = bool(usage and options and options.continuous_usage_stats)

    def chunks(items: list[ChoiceDelta]) -> list[object]:
        extra = {"usage": generations.usage()} if continuous else {"usage": None} if usage else {}
        return [head | {"choices": [choices[item.choice].chunk(item, generations)]} | extra for item in items]

    def last() -> list[object]:
        return [head | {"choices": [], "usage": generations.usage()}] if usage else []

    return await stream_events(
        request, generations, service.metrics, service.patience, service.headers(request), list, chunks, last
    )


async def _answer(generations: Generations, choices: list[_Choice], head: dict[str, Any]) -> web.Response:
    parts: dict[int, list[dict[str, object]]] = {choice.index: [] for choice in choices}
    try:
        async for items in generations.deltas():
            for item in items:
                parts[item.choice].append(choices[item.choice].chunk(item, generations))
    except GenerationError as error:
        raise APIError(str(error)) from error
    body = head | {"choices": [join_choice(parts[i]) for i in sorted(parts)], "usage": generations.usage()}
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def join_choice(parts: list[dict[str, Any]]) -> dict[str, object]:
    """Chunks of one choice put together: texts and lists joined, the rest from whoever has it last."""
    whole: dict[str, Any] = dict(parts[0])
    for part in parts[1:]:
        for name, value in part.items():
            old = whole.get(name)
            if name == "text" or (name == "token_ids" and old is not None):
                whole[name] = old + value
            elif name == "logprobs" and isinstance(old, dict):
                whole[name] = {key: old[key] + value[key] for key in old}
            elif value is not None:
                whole[name] = value
    return whole


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    """The request's prompts: a text, a list of token ids, or a list of either."""
    prompt = body.prompt
    wrong = InvalidRequest("prompt must be a string, token ids, or a list of either", param="prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"{len(prompt)} prompts are too many: at most {MAX_PROMPTS}", param="prompt")
    for item in prompt:
        whole = isinstance(item, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in item)
        if not isinstance(item, str) and not whole:
            raise wrong
    return prompt


async def _tokenize(service: Service, body: CompletionRequest, prompt: str | list[int], capacity: Capacity) -> Prompt:
    if isinstance(prompt, str):
        tokens = await service.encode(prompt, body.add_special_tokens is not False)
        text: str | None = prompt
    else:
        wrong = next((t for t in prompt if not 0 <= t < capacity.vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(
                f"prompt: token {wrong} is outside the vocabulary of {capacity.vocab_size}", param="prompt"
            )
        tokens, text = array("i", prompt), None
    if not tokens:
        raise InvalidRequest("prompt must not be empty", param="prompt")
    shorter = truncated(tokens, body, capacity)
    if len(shorter) != len(tokens):
        text = None
    default = 0 if body.echo and body.max_tokens == 0 else DEFAULT_MAX_TOKENS
    return Prompt(shorter, output_budget(body.max_tokens, default, len(shorter), body, capacity), text)
