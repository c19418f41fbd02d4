"""The OpenAPI document, generated from the request structs."""

from typing import Any

import msgspec

from pagewise_scheduler.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_BODIES = {
    "/v1/completions": (CompletionRequest, "Complete one or several prompts."),
    "/v1/chat/completions": (ChatRequest, "Continue a conversation."),
    "/tokenize": (TokenizeRequest, "Tokens of a prompt or of messages."),
    "/detokenize": (DetokenizeRequest, "Text of tokens."),
}
_READS = {
    "/v1/models": "The model that is served.",
    "/health": "200 once an executor is ready, else 503.",
    "/version": "The version of this service.",
    "/openapi.json": "This document.",
}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ERRORS = {
    400: "The request is wrong; param names the field.",
    404: "No such model or route.",
    413: "The body is too large.",
    429: "Too many requests wait.",
    500: "It failed on our side.",
    503: "No executor is ready.",
}


def document(version: str, model_name: str) -> dict[str, Any]:
    """The document, as plain JSON values."""
    kinds = [kind for kind, _ in _BODIES.values()]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    errors = {
        str(status): {"description": text, "content": {"application/json": {"schema": _ref("Error")}}}
        for status, text in _ERRORS.items()
    }
    paths: dict[str, Any] = {}
    for (path, (_, text)), reference in zip(_BODIES.items(), references, strict=True):
        good: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
        if "completions" in path:
            good["text/event-stream"] = {"schema": {"type": "string"}}
        paths[path] = {
            "post": {
                "summary": text,
                "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
                "responses": {"200": {"description": "Done.", "content": good}} | errors,
            }
        }
    for path, text in _READS.items():
        good = {"application/json": {"schema": {"type": "object"}}}
        responses = {"200": {"description": "Done.", "content": good}}
        if path == "/health":
            responses["503"] = {"description": _ERRORS[503], "content": good}
        paths[path] = {"get": {"summary": text, "responses": responses}}
    metrics = {"200": {"description": "Done.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    paths["/metrics"] = {"get": {"summary": "Prometheus metrics.", "responses": metrics}}
    return {
        "openapi": "3.1.0",
        "info": {"title": f"Pagewise, serving {model_name}", "version": version},
        "paths": paths,
        "components": {"schemas": components | {"Error": _ERROR_SCHEMA}},
    }


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}
