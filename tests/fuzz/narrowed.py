"""The OpenAPI document, narrowed to requests that get past the first checks, so that fuzzing reaches the code behind.

Made from the document alone, most requests name a model that does not exist, or tokens outside the vocabulary.
"""

import copy
from typing import Any

_GENERATIONS = ("CompletionRequest", "ChatRequest")


def narrowed(document: dict[str, Any], model: str, vocab_size: int) -> dict[str, Any]:
    """A document whose requests are all of that model, with known tokens and short outputs; paths are the same."""
    document = copy.deepcopy(document)
    schemas = document["components"]["schemas"]
    token = {"type": "integer", "minimum": 0, "maximum": vocab_size - 1}
    text = {"type": "string", "minLength": 1, "maxLength": 40}
    others = ("TokenizeRequest", "DetokenizeRequest", "ResponsesRequest", "MessagesRequest", "CountRequest")
    for name in (*_GENERATIONS, *others):
        schemas[name]["properties"]["model"] = {"enum": [model]}
    for name in _GENERATIONS:
        schemas[name]["properties"] |= {
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": 20},
            "min_tokens": {"type": "integer", "minimum": 0, "maximum": 8},
            "n": {"type": "integer", "minimum": 1, "maximum": 3},
            "best_of": {"type": "integer", "minimum": 1, "maximum": 4},
            "stop_token_ids": _list(token, 4),
            "allowed_token_ids": _list(token, 4, 1),
            "logit_bias": {
                "type": "object",
                "propertyNames": {"pattern": "^[1-9][0-9]{0,2}$"},
                "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                "maxProperties": 4,
            },
        }
    schemas["CompletionRequest"]["properties"]["prompt"] = {
        "anyOf": [text, _list(token, 20, 1), _list(text, 3, 1), _list(_list(token, 20, 1), 3, 1)]
    }
    schemas["ChatRequest"]["properties"]["max_completion_tokens"] = {"type": "integer", "minimum": 1, "maximum": 20}
    few = {"type": "integer", "minimum": 1, "maximum": 20}
    schemas["ResponsesRequest"]["properties"]["max_output_tokens"] = few
    schemas["MessagesRequest"]["properties"]["max_tokens"] = few
    schemas["DetokenizeRequest"]["properties"]["tokens"] = _list(token, 20)
    return document


def _list(items: dict[str, Any], most: int, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}
