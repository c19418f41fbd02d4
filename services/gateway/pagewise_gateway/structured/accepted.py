"""What JSON schemas accept, as far as that is certain: types, names and texts.

References are not followed, because those within unions may multiply. A schema that has one may accept anything.
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
"""Keywords that may forbid something. All others forbid nothing, whatever their value, so they are left out."""
TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_OF_ONE_TYPE = {
    "array": ("contains", "maxContains", "minContains", "minItems", "unevaluatedItems", "uniqueItems"),
    "object": (
        *("dependencies", "dependentRequired", "dependentSchemas", "minProperties", "patternProperties"),
        *("propertyNames", "unevaluatedProperties"),
    ),
    "string": ("format",),
}
"""Keywords that say nothing of values of other types."""
_NO_TYPES: frozenset[str] = frozenset()


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema leaves to values by ``type``, ``enum`` and ``const``."""
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
    """Whether a keyword says nothing of values of these types."""
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


def reach(schema: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Return the types of which a schema may accept some value, and those of which it certainly accepts every value."""
    if not isinstance(schema, dict):
        return (_NO_TYPES if schema is False else TYPES), (TYPES if schema is True else _NO_TYPES)
    if accepts_none(schema):
        return _NO_TYPES, _NO_TYPES
    some = every = types_of(schema)
    for name in ("allOf", "anyOf", "oneOf"):
        if not isinstance(parts := schema.get(name, []), list):
            return TYPES, _NO_TYPES
        if (found := list(map(reach, parts))) and (name == "allOf" or len(found) == 1):
            some, every = some.intersection(*(one for one, _ in found)), every.intersection(*(one for _, one in found))
        elif name in schema and name != "allOf":
            some = some & _NO_TYPES.union(*(one for one, _ in found))
            every = every & _NO_TYPES.union(*(one for _, one in found)) if name == "anyOf" else _NO_TYPES
    return some, every if ASSERTIONS & schema.keys() <= {"type", "allOf", "anyOf", "oneOf"} else _NO_TYPES


def listed_names(schema: Any) -> Collection[str] | None:
    """Return the strings that a schema accepts, if it lists them; None otherwise."""
    if not isinstance(schema, dict) or accepts_none(schema):
        return () if accepts_none(schema) else None
    asserted = ASSERTIONS & schema.keys()
    for union in ("allOf", "anyOf", "oneOf"):
        if asserted == {union} and isinstance(parts := schema[union], list):
            if None in (found := [listed_names(one) for one in parts]):
                return None
            times = Counter(name for names in found for name in names or ())
            right = {"allOf": {len(parts)}, "oneOf": {1}}.get(union)
            return [name for name, number in times.items() if right is None or number in right]
    if "string" not in types_of({"type": schema["type"]} if "type" in schema else {}):
        return ()
    if asserted - {"type"} == {"const"}:
        return tuple(filter(is_text, [schema["const"]]))
    if asserted - {"type"} == {"enum"} and isinstance(schema["enum"], list):
        return dict.fromkeys(filter(is_text, schema["enum"]))
    return None


def listed_texts(schema: Any) -> list[str | None] | None:
    """Return the values that a schema lists, if all of them are texts or null; None otherwise."""
    if not isinstance(schema, dict) or not isinstance(values := schema.get("enum", [schema.get("const", 0)]), list):
        return None
    if "const" in schema and "enum" in schema:
        return None
    return values if all(isinstance(value, str | None) for value in values) else None


def is_text(value: Any) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def properties_of(schema: Mapping[str, Any]) -> Collection[str]:
    """The names of the properties that a schema lists."""
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else ()


def is_closed(schema: Mapping[str, Any]) -> bool:
    """Whether an object has no other properties than those that are named."""
    return schema.get("additionalProperties") is False and "patternProperties" not in schema


def required_of(schema: Mapping[str, Any]) -> set[str]:
    """The names of the properties that a schema requires."""
    required = schema.get("required")
    return set(filter(is_text, required)) if isinstance(required, list) else set()


def says_more(schema: Mapping[str, Any]) -> bool:
    """Whether a schema says more of texts than a format."""
    parts = schema.get("allOf")
    return not {"pattern", "enum", "const"}.isdisjoint(schema) or (
        isinstance(parts, list) and any(isinstance(part, dict) and "pattern" in part for part in parts)
    )


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value is a number of JSON."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def number(schema: Mapping[str, Any], keyword: str, default: float) -> float:
    """The number of a keyword; what is none is refused where it is checked."""
    return value if is_number(value := schema.get(keyword)) else default


def is_zero(value: Any) -> bool:
    """Whether a value is the number 0."""
    return is_number(value) and value == 0
