"""Parameters of functions for formats in which arguments are not one JSON object.

The grammar of such a call is made parameter by parameter. So keywords about the object as a whole cannot be followed,
and are refused by name: only the keywords that are listed here are honoured, or forbid nothing. A function that is not
strict may have some more, which are left to the model.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from pagewise_gateway.structured.walk import references
from pagewise_gateway.text.output_parsing.deltas import schema_types

_ANNOTATIONS = frozenset(
    {"$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "nullable", "readOnly"}
    | {"title", "writeOnly"}
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_OF_PARAMETERS = _ANNOTATIONS | _DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
_OF_STRINGS = _ANNOTATIONS | _DEFINITIONS | {"type"}
_LOOSE = frozenset({"minProperties"})
_LOOSE_OF_STRINGS = frozenset({"contentEncoding", "contentMediaType", "format", "maxLength", "minLength", "pattern"})
"""What is followed by nothing but the model, if the function is not strict."""
_REFERENCES = ("#/$defs/", "#/definitions/")


class UnsupportedSchemaError(ValueError):
    """A schema says something that cannot be followed in the format of the model; the text names the function."""


class Parameter(NamedTuple):
    """A parameter. ``schema``: of its value. ``needed``: it is required."""

    name: str
    schema: dict[str, Any]
    needed: bool


def listed_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """Return the parameters of a function one by one. ``schema``: of its arguments. ``strict``: all of it is followed.

    Raises:
        UnsupportedSchemaError: the schema says more of the arguments than which there are and which are required.
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
        if value is not False  # which says that it may not be there
    ]


def _properties(function: str, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the schemas of the parameters by their names, and the names of those that are required."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnsupportedSchemaError(f"properties or required in the parameters of {function!r} are not what they name")
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
    """Return the schema of a value, with the definitions in ``schema`` that it refers to, also by way of others."""
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


def python_parameters(function: str, schema: Mapping[str, Any], strict: bool) -> list[Parameter]:
    """The same for calls in Python, whose parameters have names as Python has them. Words such as ``from`` are some.

    Raises:
        UnsupportedSchemaError: as ``listed_parameters``, or a name is none in Python.
    """
    found = listed_parameters(function, schema, strict)
    for each in found:
        name = each.name
        if not name.isidentifier() or not unicodedata.is_normalized("NFKC", name):
            raise UnsupportedSchemaError(
                f"the parameter {name!r} of {function!r} cannot be written: this model calls functions in Python"
            )
    return found


def string_choices(function: str, parameter: Parameter, strict: bool) -> Sequence[str] | None:
    """Return the values of a parameter that is written as it is, without quotes: those of its enum; None: any string.

    ``strict``: as for ``listed_parameters``.

    Raises:
        UnsupportedSchemaError: its schema says anything else of strings.
    """
    what, known = _of(function, parameter), _OF_STRINGS if strict else _OF_STRINGS | _LOOSE_OF_STRINGS
    choices = _choices(what, parameter.schema, known)
    if choices is None:
        _check_string(what, parameter.schema, known)
    elif any("</arg_value>" in each for each in choices):
        raise UnsupportedSchemaError(
            f"{what} may be a text with '</arg_value>', which ends values in the format of this model"
        )
    return choices


def _choices(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Return the values of an enum or a const, which may also be null; None: there is none."""
    if isinstance(schema.get("anyOf"), list):
        return _choices_or_null(what, schema, known)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str | None) for each in values):
        return None
    null = None in values and "null" in schema_types(schema)
    found = [each for each in values if each is not None] + ["null"] * null
    if not found:
        return None
    _check_keywords(what, schema, known | {"enum", "const"})
    return found


def _choices_or_null(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> list[str] | None:
    """Return the same of an ``anyOf`` of one schema, with null or without it."""
    union = schema["anyOf"]
    others = [each for each in union if isinstance(each, Mapping) and each.get("type") != "null"]
    if len(others) != 1 or len(union) > 2 or (found := _choices(what, others[0], known)) is None:
        return None
    _check_keywords(what, schema, _ANNOTATIONS | _DEFINITIONS | {"anyOf"})
    return found + ["null"] * (len(union) - 1)


def _check_string(what: str, schema: Any, known: frozenset[str]) -> None:
    """Check that all strings match a schema that some do."""
    if not isinstance(schema, Mapping):
        return
    unions = [name for name in ("anyOf", "oneOf") if name in schema]
    if unions == ["anyOf"]:
        _check_keywords(what, schema, _ANNOTATIONS | _DEFINITIONS | {"anyOf"})
        free = [each for each in schema["anyOf"] if "string" in schema_types(each)]
        if len(free) == 1:
            _check_string(what, free[0], known)
            return
    _check_keywords(what, schema, known)


def _check_keywords(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    names = map(str, schema.keys() - known)
    if unknown := sorted(name for name in names if not name.startswith("x-")):
        raise UnsupportedSchemaError(
            f"{', '.join(unknown)[:200]} in {what} cannot be followed in the format of this model"
        )


def _of(function: str, parameter: Parameter) -> str:
    return f"the parameter {parameter.name!r} of {function!r}"
