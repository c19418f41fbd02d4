"""Iterates over the schemas, objects and references in a JSON schema, and the errors of grammars."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

MAX_DEPTH = 64
"""Levels of arrays and objects in a schema."""
_APPLYING = frozenset(
    {"additionalItems", "additionalProperties", "allOf", "anyOf", "contains", "contentSchema", "else", "if", "items"}
    | {"not", "oneOf", "prefixItems", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"}
)
"""Keywords whose value is a schema, or a list of schemas."""
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMED = frozenset({"dependencies", "dependentSchemas", "properties"})
"""Keywords whose value has schemas by names, which are no keywords; with ``_DEFINITIONS``."""


class GrammarError(Exception):
    """A grammar cannot be used; the text gives the reason."""


class TooManyGrammarsError(Exception):
    """Too many grammars of an API key wait to be compiled."""


def subschemas(schema: Any, walked: set[int] | None = None, *, definitions: bool = True) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas in it, without ``true`` and ``false``.

    ``walked``: ids of schemas that were yielded before, which are not yielded again. ``definitions``: whether schemas
    are yielded that only references use.
    """
    waiting, walked = [schema], set() if walked is None else walked
    named = _NAMED | _DEFINITIONS if definitions else _NAMED
    while waiting:
        one = waiting.pop()
        if not isinstance(one, dict) or id(one) in walked:
            continue
        walked.add(id(one))
        yield one
        for keyword, value in one.items():
            match value:
                case dict() if keyword in named:
                    waiting += value.values()
                case dict() if keyword in _APPLYING:
                    waiting.append(value)
                case list() if keyword in _APPLYING:
                    waiting += value


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a schema, as values of any keyword."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def references(value: Any) -> Iterator[str]:
    """Yield all references in a schema, in values of any keyword."""
    return (one["$ref"] for one in objects(value) if isinstance(one.get("$ref"), str))


def target_of(schema: Any, reference: str, way: set[int] | None = None) -> Any:
    """Return the target of a reference inside the schema. ``way``: gets the ids of the values on the path to it.

    Raises:
        GrammarError: it refers to nothing in the schema.
    """
    if reference != "#" and not reference.startswith("#/"):
        raise GrammarError(
            f"$ref {reference[:100]!r} is not supported: only those within the schema are, as #/$defs/name"
        )
    target = schema
    for part in reference.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        match target:
            case list() if name.isdecimal() and name.isascii() and int(name[:9]) < len(target):
                target = target[int(name[:9])]
            case dict() if name in target:
                target = target[name]
            case _:
                raise GrammarError(f"$ref {reference[:100]!r} refers to nothing in the schema")
        if way is not None and isinstance(target, dict | list):
            way.add(id(target))
    return target


def nesting(value: Any, depths: dict[int, int], level: int = 0) -> int:
    """Return the levels of arrays and objects in a value. ``depths``: gets the levels of each value in it, by id.

    Raises:
        GrammarError: there are too many levels.
    """
    if not isinstance(value, dict | list):
        return 0
    if level == MAX_DEPTH:
        raise GrammarError(f"the schema is nested too deeply, the limit is {MAX_DEPTH}")
    inner = value.values() if isinstance(value, dict) else value
    depths[id(value)] = depth = 1 + max((nesting(one, depths, level + 1) for one in inner), default=0)
    return depth
