"""The OpenAPI document, generated from the endpoints and the structs of their bodies."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pagewise_gateway.generation import LOGPROB_BYTES, REPEATED_BYTES, TOKEN_BYTES
from pagewise_gateway.http import messages_schema as messages
from pagewise_gateway.http.debug import DEFAULT_LIMIT, EXPLAINED, MOST
from pagewise_gateway.http.errors import ErrorResponse
from pagewise_gateway.http.intake import AnswerMemory, BodyMemory
from pagewise_gateway.http.params import Limits
from pagewise_gateway.http.parsing import BODY_SECONDS, MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES
from pagewise_gateway.http.responses_schema import ResponseEvent
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest

OPERATORS = "The API key is not an operator's."


class Endpoint(NamedTuple):
    """A path that clients may request, and its handler.

    Fields:
        path: as aiohttp's router takes it.
        handler: the first line of its docstring is the summary in the document.
        answer: the JSON of the response; ``str``: it is text; None: it is an object without a struct.
        body: the JSON of the request, whose method is POST; None: the method is GET.
        event: the data of each event where the response may be a stream.
        forbidden: describes the status 403, if the endpoint has it.
    """

    path: str
    handler: Handler
    answer: type | None = None
    body: type | None = None
    event: type | None = None
    forbidden: str = ""

    @property
    def summary(self) -> str:
        """The summary in the document."""
        return (self.handler.__doc__ or "").partition("\n")[0]

    @property
    def route(self) -> web.RouteDef:
        """The route, for an application."""
        return (web.get if self.body is None else web.post)(self.path, self.handler)


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
_REF = "#/components/schemas/{name}"


def document(
    endpoints: Sequence[Endpoint],
    version: str,
    limits: Limits,
    max_body_bytes: int,
    memory: BodyMemory,
    answers: AnswerMemory,
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
    described = {kind for each in endpoints for kind in (each.body, each.answer, each.event)} - {None, str}
    types = [*described, ErrorResponse, messages.MessageError]
    _, components = msgspec.json.schema_components(types, ref_template=_REF)
    for kind in (CompletionRequest, ChatRequest):
        for name in ("n", "best_of"):
            components[kind.__name__]["properties"][name]["anyOf"][0]["maximum"] = limits.max_n
    paths: dict[str, Any] = {}
    for endpoint in endpoints:
        path = re.sub(r":[^}]*}", "}", endpoint.path)
        operation = _get(endpoint, path) if endpoint.body is None else _post(endpoint, endpoint.body, sizes)
        paths[path] = {"get" if endpoint.body is None else "post": operation}
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


def _post(endpoint: Endpoint, body: type, sizes: dict[str, int]) -> dict[str, Any]:
    responses, event = _responses(endpoint), endpoint.event
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
    shape = messages.MessageError if endpoint.path.startswith("/v1/messages") else ErrorResponse
    responses |= {str(status): _error(text.format_map(sizes), shape) for status, text in _ERRORS.items()}
    request = {
        "required": True,
        "description": _BODY.format_map(sizes),
        "content": {"application/json": {"schema": _ref(body)}},
    }
    return {"summary": endpoint.summary, "responses": responses, "requestBody": request}


def _get(endpoint: Endpoint, path: str) -> dict[str, Any]:
    responses = _responses(endpoint)
    parameters: list[dict[str, Any]] = []
    if path == "/health":
        responses["503"] = responses["200"] | {"description": "There is no scheduler, or no executor is ready."}
    if named := re.search(r"{(\w+)}", path):
        responses["404"] = _error("Nothing of that name.")
        parameters.append({"name": named[1], "in": "path", "required": True, "schema": {"type": "string"}})
    if path == "/metrics" or path.startswith("/debug/"):
        responses["401"] = _error(_ERRORS[401])
        responses["503"] = _error("No scheduler answers.")
    if path.startswith("/debug/"):
        responses["400"] = _error("limit is not a number, or out of range.")
        default = EXPLAINED if path.startswith("/debug/explain/") else DEFAULT_LIMIT
        schema = {"type": "integer", "minimum": 1, "maximum": MOST, "default": default}
        parameters.append({"name": "limit", "in": "query", "schema": schema})
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    return operation | {"parameters": parameters} if parameters else operation


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    """Return the status 200, and 403 if the endpoint has it."""
    if endpoint.answer is str:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": _ref(endpoint.answer) if endpoint.answer else {"type": "object"}}}
    done = {"200": {"description": "Done.", "content": content}}
    return done | {"403": _error(endpoint.forbidden)} if endpoint.forbidden else done


def _error(text: str, shape: type = ErrorResponse) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": _ref(shape)}}}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
