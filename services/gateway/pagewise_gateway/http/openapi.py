"""The OpenAPI document, generated from the request structs."""

import re
from typing import Any

import msgspec

from pagewise_gateway.generation import LOGPROB_BYTES, REPEATED_BYTES, TOKEN_BYTES
from pagewise_gateway.http import messages_schema as messages
from pagewise_gateway.http.adapters import ENDPOINTS as ADAPTER_ENDPOINTS
from pagewise_gateway.http.debug import DEFAULT_LIMIT, EXPLAINED, MOST
from pagewise_gateway.http.errors import ErrorResponse
from pagewise_gateway.http.intake import AnswerMemory, BodyMemory
from pagewise_gateway.http.params import Limits
from pagewise_gateway.http.parsing import BODY_SECONDS, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from pagewise_gateway.http.responses import (
    ChatChunk,
    ChatResponse,
    CompletionResponse,
    DetokenizeResponse,
    Health,
    Model,
    ModelList,
    RenderResponse,
    TokenizeResponse,
    Version,
)
from pagewise_gateway.http.responses_schema import Response, ResponseEvent, ResponsesRequest
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

# Path -> its summary, its body, its answer, and the data of each event where the answer may be a stream.
_POSTS: dict[str, tuple[str, type, type, type | None]] = {
    "/v1/completions": ("Complete one or several prompts.", CompletionRequest, CompletionResponse, CompletionResponse),
    "/v1/chat/completions": ("Continue a conversation.", ChatRequest, ChatResponse, ChatChunk),
    **{path: (summary, body, str, None) for path, (_, summary, body) in ADAPTER_ENDPOINTS.items()},
    "/tokenize": ("Tokens of a prompt or of messages.", TokenizeRequest, TokenizeResponse, None),
    "/detokenize": ("Text of tokens.", DetokenizeRequest, DetokenizeResponse, None),
    "/v1/chat/completions/render": (
        "The prompt that a chat completion would have, which is not run.",
        ChatRequest,
        RenderResponse,
        None,
    ),
    "/v1/responses": ("Continue a conversation that consists of items.", ResponsesRequest, Response, ResponseEvent),
    "/v1/messages": (
        "Continue a conversation of Anthropic's API.",
        messages.MessagesRequest,
        messages.Message,
        messages.MessageEvent,
    ),
    "/v1/messages/count_tokens": (
        "Count the tokens of a prompt of Anthropic's API.",
        messages.CountRequest,
        messages.TokenCount,
        None,
    ),
}
_GETS: dict[str, tuple[str, type | None]] = {
    "/v1/models": ("The model that is served, and its adapters.", ModelList),
    "/v1/models/{model}": ("The model, or an adapter, by its name.", Model),
    "/health": ("200 if the scheduler answers and an executor is ready, else 503.", Health),
    "/version": ("The version of this service.", Version),
    "/debug/memory": ("The contents of the KV memory of every executor; ?limit=N cuts lists.", None),
    "/debug/requests/{request_id}": ("A request's blocks and their history, by our id or your X-Request-Id.", None),
    "/debug/explain/{request_id}": ("Where a request's time went and its cached prefix was lost, in sentences.", None),
}
_ERRORS = {
    400: "The request is wrong; param names the field. An answer that is not a stream may take {answer} bytes: "
    "{token} for a token, {logprob} for each log-probability, {repeated} for each token of a prompt that a choice "
    "repeats.",
    401: "The API key is missing or not valid.",
    404: "No such model.",
    408: f"The body did not arrive within {BODY_SECONDS:g} s.",
    413: "The body is larger than {max_body_bytes} bytes.",
    415: "The body is not declared as JSON.",
    429: "The queue is full, the API key is over one of its limits, or bodies or answers take too much memory at the "
    "same time (bodies {memory} bytes, those of one API key {share}; answers {answers} and {answer}); Retry-After says "
    "when to try again.",
    500: "The server failed.",
    503: "No scheduler answers, or no executor is ready.",
}
_BODY = (
    "At most {max_body_bytes} bytes of JSON, with at most "
    f"{MAX_CONTAINERS} arrays and objects, {MAX_STRINGS} strings (names of fields included) and {MAX_VALUES} values. "
    "Integers may be written as 10.0 or 1e1."
)
_OPERATORS = "The API key is not an operator's."
_REF = "#/components/schemas/{name}"
_TEXT: dict[str, Any] = {"200": {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}}


def document(
    version: str, limits: Limits, max_body_bytes: int, memory: BodyMemory, answers: AnswerMemory
) -> dict[str, Any]:
    """Return the document as plain JSON values. ``max_body_bytes``, ``memory``, ``answers``: limits of requests."""
    sizes = {
        "max_body_bytes": max_body_bytes,
        "memory": memory.total,
        "share": memory.share,
        "answers": answers.total,
        "answer": answers.share,
        "token": TOKEN_BYTES,
        "logprob": LOGPROB_BYTES,
        "repeated": REPEATED_BYTES,
    }
    types = {kind for _, *kinds in (*_POSTS.values(), *_GETS.values()) for kind in kinds if kind not in (None, str)}
    _, components = msgspec.json.schema_components([*types, ErrorResponse, messages.MessageError], ref_template=_REF)
    for kind in (CompletionRequest, ChatRequest):
        for name in ("n", "best_of"):
            components[kind.__name__]["properties"][name]["anyOf"][0]["maximum"] = limits.max_n
    metrics = _TEXT | {"401": _error(_ERRORS[401]), "403": _error(_OPERATORS), "503": _error("No scheduler answers.")}
    paths: dict[str, Any] = {
        **{path: {"get": _get(path)} for path in _GETS},
        **{path: {"post": _post(path, sizes)} for path in _POSTS},
        "/openapi.json": {"get": {"summary": "This document.", "responses": _json({"type": "object"})}},
        "/metrics": {"get": {"summary": "Prometheus metrics of all processes.", "responses": metrics}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Pagewise, serving {limits.model_name}", "version": version},
        "paths": paths,
        "components": {
            "schemas": dict(sorted(components.items())),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _post(path: str, sizes: dict[str, int]) -> dict[str, Any]:
    summary, request, answer, event = _POSTS[path]
    responses = _json(_ref(answer)) if answer is not str else dict(_TEXT)
    if path in ADAPTER_ENDPOINTS:
        responses["403"] = _error(f"{_OPERATORS} Or adapters may not be loaded while the server runs.")
    if event is not None:
        # As OpenAPI 3.2 describes streams of events. The last one's data is "[DONE]", unless they have names.
        chunk = {"type": "string", "contentMediaType": "application/json", "contentSchema": _ref(event)}
        item: dict[str, Any] = {"type": "object", "required": ["data"]}
        if event in (messages.MessageEvent, ResponseEvent):
            item["required"].append("event")
            item["properties"] = {"event": {"type": "string"}, "data": chunk}
        else:
            item["properties"] = {"data": {"anyOf": [{"const": "[DONE]"}, chunk]}}
        responses["200"]["content"]["text/event-stream"] = {"itemSchema": item}
    shape = messages.MessageError if path.startswith("/v1/messages") else ErrorResponse
    responses |= {str(status): _error(text.format_map(sizes), shape) for status, text in _ERRORS.items()}
    body = {
        "required": True,
        "description": _BODY.format_map(sizes),
        "content": {"application/json": {"schema": _ref(request)}},
    }
    return {"summary": summary, "responses": responses, "requestBody": body}


def _get(path: str) -> dict[str, Any]:
    summary, answer = _GETS[path]
    responses = _json(_ref(answer) if answer is not None else {"type": "object"})
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    parameters: list[dict[str, Any]] = []
    if path == "/health":
        responses["503"] = responses["200"] | {"description": "There is no scheduler, or no executor is ready."}
    if named := re.search(r"{(\w+)}", path):
        responses["404"] = _error("Nothing of that name.")
        parameters.append({"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}})
    if path.startswith("/debug/"):
        responses["400"] = _error("limit is not a number, or out of range.")
        responses["503"] = _error("No scheduler answers.")
        responses["401"] = _error(_ERRORS[401])
        if path == "/debug/memory":
            responses["403"] = _error(_OPERATORS)
        default = EXPLAINED if path.startswith("/debug/explain/") else DEFAULT_LIMIT
        schema = {"type": "integer", "minimum": 1, "maximum": MOST, "default": default}
        parameters.append({"name": "limit", "in": "query", "schema": schema})
    if parameters:
        operation["parameters"] = parameters
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"200": {"description": "Done.", "content": {"application/json": {"schema": schema}}}}


def _error(text: str, shape: type = ErrorResponse) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref(shape)}}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
