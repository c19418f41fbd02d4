"""The parameters of a function in formats in which arguments are not one JSON object.

The grammar of such a call is made parameter by parameter. So keywords about the object as a whole cannot be followed,
and are refused by name: only the listed keywords are honoured, or forbid nothing. A function that is not strict may
have a few more, which the grammar does not enforce.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from pagewise_gateway.structured.walk import references, target_of
from pagewise_gateway.text.output_parsing.deltas import schema_types

ANY_OBJECT = {"type": "object"}
PYTHON_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "nullable", "readOnly"}
    | {"title", "writeOnly"}
)
DEFINITIONS = frozenset({"$defs", "definitions"})
_MOST_INLINED = 1000
_OF_PARAMETERS = ANNOTATIONS | DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
_OF_STRINGS = ANNOTATIONS | DEFINITIONS | {"type"}
_LOOSE = frozenset({"minProperties"})
LOOSE_OF_STRINGS = frozenset({"contentEncoding", "contentMediaType", "format", "maxLength", "minLength", "pattern"})
"""Keywords that the grammar does not enforce if the function is not strict."""
_REFERENCES = ("#/$defs/", "#/definitions/")


class UnsupportedSchemaError(ValueError):
    """A schema cannot be followed in the format of the model; the text names the function and the reason."""


class Parameter(NamedTuple):
    """A parameter of a function, and the schema of its values."""

    name: str
    schema: dict[str, Any]
    required: bool


def listed_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """Return the parameters that the schema of a function lists.

    Raises:
        UnsupportedSchemaError: it has keywords that cannot be followed.
    """
    _check_keywords(f"the parameters of {function!r}", schema, _OF_PARAMETERS if strict else _OF_PARAMETERS | _LOOSE)
    if "object" not in (schema_types(schema) or ["object"]):
        raise UnsupportedSchemaError(f"the parameters of {function!r} are no object")
    properties, required = _properties(function, schema)
    for reference in references(schema):
        if not reference.startswith(_REFERENCES):
            raise UnsupportedSchemaError(
                f"$ref {reference[:100]!r} in the parameters of {function!r} cannot be followed: in the format of this "
                "model, those that refer to $defs can"
            )
    return [
        Parameter(name, dict(value) if isinstance(value, Mapping) else {}, name in required)
        for name, value in properties.items()
        if value is not False  # a parameter with this schema must not be given
    ]


def _properties(function: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnsupportedSchemaError(f"properties or required in the parameters of {function!r} have the wrong type")
    for name in required:
        if not isinstance(name, str) or properties.get(name, False) is False:
            raise UnsupportedSchemaError(
                f"the parameters of {function!r} require {name!r}, which is not listed in properties"
            )
    for name, value in properties.items():
        if not isinstance(value, Mapping | bool):
            raise UnsupportedSchemaError(f"the schema of the parameter {name!r} of {function!r} is no schema")
    return properties, required


def self_contained(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a value with the definitions of ``schema`` that it refers to, directly or not."""
    found: dict[str, dict[str, Any]] = {}
    waiting: list[Any] = [value]
    while waiting:
        for reference in references(waiting.pop()):
            group, name = reference.split("/")[1:3]
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            definitions = schema.get(group)
            if isinstance(definitions, Mapping) and name in definitions and name not in found.setdefault(group, {}):
                found[group][name] = definitions[name]
                waiting.append(definitions[name])
    return {**value, **found}


class Inliner:
    """Merges the schemas of references, and the parts of ``allOf``, into the schemas of the values that have them, as
    far as no keyword occurs twice; also in the parts of unions. ``schema``: the document of the references."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema
        self._left = _MOST_INLINED

    def inlined(self, value: Mapping[str, Any], passed: frozenset[str] = frozenset()) -> dict[str, Any]:
        """Return the schema of a value. ``passed``: the references on the way to it.

        Raises:
            GrammarError: a reference refers to nothing.
            UnsupportedSchemaError: there are too many parts.
        """
        if not self._left:
            raise UnsupportedSchemaError(f"the parameters of a function have over {_MOST_INLINED} parts by references")
        self._left -= 1
        found = {keyword: each for keyword, each in value.items() if keyword not in ("$ref", "allOf")}
        reference, together = value.get("$ref"), value.get("allOf", [])
        if isinstance(reference, str) and reference not in passed:
            passed |= {reference}
            _merge(found, self._part(target_of(self._schema, reference), passed), {"$ref": reference})
        elif reference is not None:
            found["$ref"] = reference
        for part in together if isinstance(together, list) else ():
            _merge(found, self._part(part, passed), {"allOf": together})
        for union in ("anyOf", "oneOf"):
            if isinstance(choices := found.get(union), list):
                found[union] = [self._part(each, passed) for each in choices]
        return found

    def _part(self, part: Any, passed: frozenset[str]) -> Any:
        return self.inlined(part, passed) if isinstance(part, Mapping) else part


def _merge(found: dict[str, Any], part: Any, otherwise: dict[str, Any]) -> None:
    """Add the keywords of a schema to others, or ``otherwise`` if one of them occurs there."""
    if isinstance(part, dict) and not (found.keys() & part.keys()) - ANNOTATIONS:
        found.update({**part, **found})
    else:
        found.update(otherwise)


def python_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """Return the parameters as ``listed_parameters`` does, whose names have to be names in Python."""
    found = listed_parameters(function, schema, strict)
    for name, _, _ in found:  # keywords of Python such as ``from`` are allowed
        if not name.isidentifier() or not unicodedata.is_normalized("NFKC", name):
            raise UnsupportedSchemaError(
                f"the parameter {name!r} of {function!r} cannot be written: this model calls functions in Python"
            )
    return found


def string_choices(function: str, parameter: Parameter, strict: bool, closing: str) -> Sequence[str] | None:
    """Return the strings that a parameter without quotes may have; None: any string. ``closing``: the text that ends
    values."""
    known = _OF_STRINGS if strict else _OF_STRINGS | LOOSE_OF_STRINGS
    name = f"the parameter {parameter.name!r} of {function!r}"
    choices = _choices(name, parameter.schema, known)
    if choices is None:
        _check_string(name, parameter.schema, known)
    elif any(closing in each for each in choices):
        raise UnsupportedSchemaError(
            f"{name} may be a text with {closing!r}, which ends values in the format of this model"
        )
    return choices


def _choices(name: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Return the values of an enum or a const, in which null is a text; None: there is no enum."""
    if isinstance(schema.get("anyOf"), list):
        return _choices_or_null(name, schema, known)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str | None) for each in values):
        return None
    null = None in values and "null" in schema_types(schema)
    found = [each for each in values if each is not None] + ["null"] * null
    if not found:
        return None
    _check_keywords(name, schema, known | {"enum", "const"})
    return found


def _choices_or_null(name: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Do the same for an ``anyOf`` of one schema, with null or without it."""
    union = schema["anyOf"]
    others = [each for each in union if isinstance(each, Mapping) and each.get("type") != "null"]
    if len(others) != 1 or len(union) > 2 or (found := _choices(name, others[0], known)) is None:
        return None
    _check_keywords(name, schema, ANNOTATIONS | DEFINITIONS | {"anyOf"})
    return found + ["null"] * (len(union) - 1)


def _check_string(name: str, schema: Any, known: frozenset[str]) -> None:
    """Check that a schema that accepts some strings accepts all of them."""
    if not isinstance(schema, Mapping):
        return
    if "anyOf" in schema and "oneOf" not in schema:
        _check_keywords(name, schema, ANNOTATIONS | DEFINITIONS | {"anyOf"})
        free = [each for each in schema["anyOf"] if "string" in schema_types(each)]
        if len(free) == 1:
            _check_string(name, free[0], known)
            return
    _check_keywords(name, schema, known)


def _check_keywords(name: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    keywords = map(str, schema.keys() - known)
    if unknown := sorted(each for each in keywords if not each.startswith("x-")):
        raise UnsupportedSchemaError(
            f"{', '.join(unknown)[:200]} in {name} cannot be followed in the format of this model"
        )
