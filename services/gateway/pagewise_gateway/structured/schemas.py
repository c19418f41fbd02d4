"""Refuses JSON schemas that llguidance accepts but does not honour, or that take too long.

llguidance refuses most keywords that it does not implement, and ignores a few, which are refused here. Its
``docs/json_schema.md`` lists the implemented ones.
"""

from collections.abc import Iterable
from decimal import Decimal
from functools import partial
from math import lcm
from typing import Any

from pagewise_gateway.structured.conjunctions import check_conjunctions
from pagewise_gateway.structured.walk import GrammarError, nesting, subschemas, target_of

MAX_LEVELS = 2048
"""Levels of a schema and of all schemas that it refers to: references are compiled recursively."""
MAX_TEXT = 8192
"""Characters of a text in ``enum`` or ``const``: the time to make each state of a lexeme grows with its length."""
MAX_OPTIONAL = 480
"""Properties of an object that are not required, or alternatives of ``anyOf``: each is up to four of the 2,000
possibilities that executors follow at a time."""
MAX_AT_LEAST_ONE = 100
"""Properties that are not required, of a schema with ``minProperties``: the compiled grammar grows with their
cube."""
MAX_MULTIPLE = 10_000
"""The least common multiple of all numbers in ``multipleOf``, apart from powers of ten: a number has as many states."""

_UNHONOURED = {
    "patternProperties": "properties can be named one by one in properties, or all be alike in additionalProperties",
    "x-guidance": "whitespace is set by disable_any_whitespace and whitespace_pattern of structured_outputs",
}


def check_schema(schema: Any) -> int:
    """Check that the library honours all keywords of a schema. Returns its levels, as ``MAX_LEVELS`` counts them.

    Raises:
        GrammarError: it is no schema, is nested too deeply, or has a keyword that is not honoured.
    """
    if not isinstance(schema, dict | bool):
        raise GrammarError("a JSON schema is an object, true or false")
    depths: dict[int, int] = {}
    nesting(schema, depths)
    # References may lead to values that are no schemas by their keywords.
    levels, references, walked = 0, ["#"], set[int]()
    everywhere: list[dict[str, Any]] = []
    found = {"#"}
    while references:
        target = target_of(schema, references.pop())
        levels += depths.get(id(target), 0)
        if levels > MAX_LEVELS:
            raise GrammarError(f"the schema and what it refers to have more than {MAX_LEVELS} levels together")
        for keywords in subschemas(target, walked, definitions=False):
            _check_keywords(keywords)
            everywhere.append(keywords)
            if isinstance(reference := keywords.get("$ref"), str) and reference not in found:
                found.add(reference)
                references.append(reference)
    _check_together(everywhere)
    if any("$id" in keywords for keywords in subschemas(schema) if keywords is not schema):
        raise GrammarError("$id is only supported at the top of a schema")
    check_conjunctions(schema, partial(target_of, schema))
    return levels


def without_additional_properties(schema: Any) -> None:
    """Set additionalProperties to false, in place, in every object of a schema that has no such keyword."""
    for keywords in subschemas(schema):
        if "properties" in keywords:
            keywords.setdefault("additionalProperties", False)


def _check_keywords(keywords: dict[str, Any]) -> None:
    for keyword in _UNHONOURED.keys() & keywords.keys():
        raise GrammarError(f"the keyword {keyword} is not supported: {_UNHONOURED[keyword]}")
    least = keywords.get("minProperties")
    if isinstance(least, int | float) and least > 1:
        # An output may have a property that is not named twice, which then counts only once.
        required = keywords.get("required")
        if not isinstance(required, list) or len(set(map(str, required))) < least:
            raise GrammarError("minProperties above 1 is not supported, unless required names so many properties")
    if _num_optional(keywords) > MAX_OPTIONAL:
        raise GrammarError(f"an object may have at most {MAX_OPTIONAL} properties that are not required")
    for keyword in ("anyOf", "oneOf"):
        if isinstance(alternatives := keywords.get(keyword), list) and len(alternatives) > MAX_OPTIONAL:
            raise GrammarError(f"{keyword} may have at most {MAX_OPTIONAL} alternatives; an enum may have more texts")
    _check_values(keywords)


def _check_values(keywords: dict[str, Any]) -> None:
    values = keywords.get("enum")
    values = [*values, keywords.get("const")] if isinstance(values, list) else [keywords.get("const")]
    if any(isinstance(value, str) and len(value) > MAX_TEXT for value in values):
        raise GrammarError(f"a text in enum or const may have at most {MAX_TEXT} characters")
    if sum(isinstance(value, dict | list) for value in values) > MAX_OPTIONAL:
        raise GrammarError(f"enum may have at most {MAX_OPTIONAL} arrays and objects")


def _check_together(everywhere: Iterable[dict[str, Any]]) -> None:
    # These limits hold for all schemas together, because the library may merge them.
    num_optional, at_least_one, multiple = 0, False, 1
    for keywords in everywhere:
        num_optional += _num_optional(keywords)
        least, step = keywords.get("minProperties"), keywords.get("multipleOf")
        at_least_one |= isinstance(least, int | float) and least > 0
        if isinstance(step, int | float) and not isinstance(step, bool) and step > 0:
            multiple = lcm(multiple, int("".join(map(str, Decimal(str(step)).normalize().as_tuple().digits))))
            if multiple > MAX_MULTIPLE:
                raise GrammarError(
                    f"multipleOf is only supported if all its numbers divide one of at most {MAX_MULTIPLE}, "
                    "apart from powers of ten"
                )
    if at_least_one and num_optional > MAX_AT_LEAST_ONE:
        raise GrammarError(
            f"minProperties is only supported if at most {MAX_AT_LEAST_ONE} properties are not required, in all objects"
        )


def _num_optional(keywords: dict[str, Any]) -> int:
    properties, required = keywords.get("properties"), keywords.get("required")
    if not isinstance(properties, dict):
        return 0
    named = required if isinstance(required, list) else ()
    return len(properties.keys() - {name for name in named if isinstance(name, str)})
