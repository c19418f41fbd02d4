"""JSON schemas: which of them can be honoured.

llguidance refuses most keywords that it does not implement. A few it accepts and does not honour; those are refused
here, wherever they stand as keywords. Source of what it implements: ``docs/json_schema.md`` of llguidance.
"""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from pagewise_gateway.structured.errors import GrammarError

MAX_DEPTH = 64
"""Levels of arrays and objects in a schema."""
MAX_LEVELS = 2048
"""Levels of a schema together with those of all that it refers to: what refers is compiled recursively."""

_UNHONOURED = {
    "patternProperties": "properties can be named one by one in properties, or all be alike in additionalProperties",
    "x-guidance": "whitespace is set by disable_any_whitespace and whitespace_pattern of structured_outputs",
}
_SCHEMA = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords whose value is a schema, or a list of schemas."""
_SCHEMAS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
"""Keywords whose value is a list of schemas."""
_NAMED = frozenset({"$defs", "definitions", "dependencies", "dependentSchemas", "properties"})
"""Keywords whose value has schemas by names, which are no keywords."""


def check_schema(schema: Any) -> int:
    """Check that what the library accepts of a schema, it honours. Returns how many levels it has (``MAX_LEVELS``).

    Raises:
        GrammarError: it is no schema, is nested too deeply, or has a keyword that is not honoured.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object, true or false")
    depths: dict[int, int] = {}
    _depth(schema, depths)
    # What is referred to may lie where no schema is looked for.
    levels, references, walked = 0, ["#"], set[int]()
    found = {"#"}
    while references:
        target = _target(schema, references.pop())
        levels += depths.get(id(target), 0)
        if levels > MAX_LEVELS:
            raise GrammarError(f"the schema and what it refers to have more than {MAX_LEVELS} levels together")
        for keywords in subschemas(target, walked):
            _check_keywords(keywords, is_root=keywords is schema)
            if isinstance(reference := keywords.get("$ref"), str) and reference not in found:
                found.add(reference)
                references.append(reference)
    return levels


def without_additional_properties(schema: Any) -> None:
    """Forbid, in place, properties that are not named, in every object of a schema that says nothing about them."""
    for keywords in subschemas(schema):
        if "properties" in keywords:
            keywords.setdefault("additionalProperties", False)


def subschemas(schema: Any, walked: set[int] | None = None) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it; those that are true or false are left out.

    ``walked``: ids of those that were yielded before, which are not yielded again.
    """
    waiting, walked = [schema], set() if walked is None else walked
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in walked:
            continue
        walked.add(id(one))
        yield one
        for keyword, value in one.items():
            if keyword in _SCHEMA and isinstance(value, dict):
                waiting.append(value)
            elif keyword in _SCHEMAS and isinstance(value, list):
                waiting += value
            elif keyword in _NAMED and isinstance(value, dict):
                waiting += value.values()


def _check_keywords(keywords: dict[str, Any], *, is_root: bool) -> None:
    for keyword in _UNHONOURED.keys() & keywords.keys():
        raise GrammarError(f"the keyword {keyword} is not supported: {_UNHONOURED[keyword]}")
    least = keywords.get("minProperties")
    if isinstance(least, int | float) and least > 1:
        # Properties that are not named may come twice, and then count once.
        required = keywords.get("required")
        if not isinstance(required, list) or len(set(map(str, required))) < least:
            raise GrammarError("minProperties above 1 is not supported, unless required names so many properties")
    if "$id" in keywords and not is_root:
        raise GrammarError("$id is only supported at the top of a schema")


def _target(schema: Any, reference: str) -> Any:
    """What a reference inside the schema refers to."""
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"$ref {reference[:100]!r} is not supported: only those within the schema are, as #/$defs/name"
        )
    target = schema
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdecimal() and name.isascii() and int(name[:9]) < len(target):
            target = target[int(name[:9])]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise GrammarError(f"$ref {reference[:100]!r} refers to nothing in the schema")
    return target


def _depth(value: Any, depths: dict[int, int], level: int = 0) -> int:
    """The levels of arrays and objects in a value; noted, for all arrays and objects in it, by their ids."""
    if not isinstance(value, dict | list):
        return 0
    if level == MAX_DEPTH:
        raise GrammarError(f"the schema is nested too deeply, the limit is {MAX_DEPTH}")
    inner = value.values() if isinstance(value, dict) else value
    depths[id(value)] = depth = 1 + max((_depth(one, depths, level + 1) for one in inner), default=0)
    return depth
