"""The values that a JSON schema accepts, as far as that is certain.

References are not followed, because their number in nested unions may grow exponentially: a schema that has one may
accept anything.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, TypeGuard

ASSERTIONS = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref", "additionalItems", "additionalProperties", "allOf", "anyOf", "const"),
        *("contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "enum", "exclusiveMaximum"),
        *("exclusiveMinimum", "format", "if", "items", "maxContains", "maxItems", "maxLength", "maxProperties"),
        *("maximum", "minContains", "minItems", "minLength", "minProperties", "minimum", "multipleOf", "not", "oneOf"),
        *("pattern", "patternProperties", "prefixItems", "properties", "propertyNames", "required", "then", "type"),
        *("unevaluatedItems", "unevaluatedProperties", "uniqueItems", "x-guidance"),
    }
)
"""Keywords that may forbid something. All others forbid nothing, whatever their value, so they are removed."""
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_OF_ONE_TYPE = {
    "array": ("contains", "maxContains", "minContains", "minItems", "unevaluatedItems", "uniqueItems"),
    "object": (
        *("dependencies", "dependentRequired", "dependentSchemas", "minProperties", "patternProperties"),
        *("propertyNames", "unevaluatedProperties"),
    ),
    "string": ("format",),
}
"""Keywords that do not apply to values of other types."""
_NO_TYPES: frozenset[str] = frozenset()
_UNIONS = frozenset({"allOf", "anyOf", "oneOf"})
Reach = tuple[frozenset[str], frozenset[str]]
"""The types of which a schema may accept some value, and the types of which it certainly accepts every value."""


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """Return the types that a schema allows by ``type``, ``enum`` and ``const``."""
    found, declared = TYPES, schema.get("type")
    if isinstance(declared, str | list):
        named = [declared] if isinstance(declared, str) else declared
        found = frozenset(each for each in named if isinstance(each, str))
        found |= {"integer"} if "number" in found else set()
    if "const" in schema:
        found &= {_type_of(schema["const"])}
    if isinstance(values := schema.get("enum"), list):
        found &= set(map(_type_of, values))
    return found


def of_other_types(keyword: str, types: frozenset[str]) -> bool:
    """Return whether a keyword does not apply to values of these types."""
    return any(keyword in keywords and of not in types for of, keywords in _OF_ONE_TYPE.items())


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def accepts_none(schema: Any) -> bool:
    """Whether a schema certainly accepts no value."""
    return schema is False or (isinstance(schema, dict) and schema.get("allOf") == [False])


def reach(schema: Any) -> Reach:
    """Return the types of values that a schema accepts."""
    if isinstance(schema, bool):
        return (TYPES, TYPES) if schema else (_NO_TYPES, _NO_TYPES)
    if not isinstance(schema, dict):
        return TYPES, _NO_TYPES
    if accepts_none(schema):
        return _NO_TYPES, _NO_TYPES
    some = every = types_of(schema)
    for union in _UNIONS & schema.keys():
        if not isinstance(parts := schema[union], list):
            return TYPES, _NO_TYPES
        some_of_parts, every_of_parts = _reach_of_union(union, list(map(reach, parts)))
        some, every = some & some_of_parts, every & every_of_parts
    return some, every if ASSERTIONS & schema.keys() <= {"type", *_UNIONS} else _NO_TYPES


def _reach_of_union(union: str, parts: list[Reach]) -> Reach:
    some, every = [one for one, _ in parts], [one for _, one in parts]
    if union == "allOf" or len(parts) == 1:
        return TYPES.intersection(*some), TYPES.intersection(*every)
    # A value that two parts of oneOf accept is refused.
    return _NO_TYPES.union(*some), _NO_TYPES.union(*every) if union == "anyOf" else _NO_TYPES


def listed_names(schema: Any) -> Collection[str] | None:
    """Return the strings that a schema accepts, if it lists them; None otherwise."""
    if accepts_none(schema):
        return ()
    if not isinstance(schema, dict):
        return None
    asserted = ASSERTIONS & schema.keys()
    if len(asserted) == 1 and asserted <= _UNIONS:
        (union,) = asserted
        return _names_of_union(union, schema[union])
    if "string" not in types_of({"type": schema["type"]} if "type" in schema else {}):
        return ()
    if asserted - {"type"} == {"const"}:
        return tuple(filter(_is_text, [schema["const"]]))
    if asserted - {"type"} == {"enum"} and isinstance(schema["enum"], list):
        return dict.fromkeys(filter(_is_text, schema["enum"]))
    return None


def _names_of_union(union: str, parts: Any) -> Collection[str] | None:
    found = [listed_names(part) for part in parts] if isinstance(parts, list) else [None]
    times: Counter[str] = Counter()
    for names in found:
        if names is None:
            return None
        times.update(list(names))
    right = {"allOf": len(found), "oneOf": 1}.get(union)
    return [name for name, number in times.items() if right in (None, number)]


def listed_texts(schema: Any) -> list[str | None] | None:
    """Return the values that a schema lists, if all of them are texts or null; None otherwise."""
    if not isinstance(schema, dict) or not isinstance(values := schema.get("enum", [schema.get("const", 0)]), list):
        return None
    if "const" in schema and "enum" in schema:
        return None
    return values if all(isinstance(value, str | None) for value in values) else None


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def properties_of(schema: Mapping[str, Any]) -> Collection[str]:
    """Return the names that ``properties`` of a schema has."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else ()


def is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether objects have no other properties than the ones in ``properties``."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def required_of(schema: Mapping[str, Any]) -> set[str]:
    """Return the names of properties that every object has."""
    required = schema.get("required")
    return set(filter(_is_text, required)) if isinstance(required, list) else set()


def limits_texts(schema: Mapping[str, Any]) -> bool:
    """Whether another keyword than ``format`` limits texts."""
    parts = schema.get("allOf")
    return not {"pattern", "enum", "const"}.isdisjoint(schema) or (
        isinstance(parts, list) and any(isinstance(part, dict) and "pattern" in part for part in parts)
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number in JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_of(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    """Return the number that a keyword has, or ``default``. Other values are refused when the schema is compiled."""
    return value if is_number(value := schema.get(keyword)) else default


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0."""
    return is_number(value) and value == 0
