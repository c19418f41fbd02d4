"""Parameters of functions for formats in which calls do not have their arguments as one JSON object.

The grammar of such a call is made parameter by parameter. So what a schema says of the object as a whole cannot be
followed, and it is refused by name: only the keywords that are listed here are honoured, or say nothing.
"""

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pagewise_gateway.text.output_parsing.deltas import schema_types

_ANNOTATIONS = frozenset(
    {
        "$comment",
        "$id",
        "$schema",
        "default",
        "deprecated",
        "description",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
_DEFINITIONS = frozenset({"$defs", "definitions"})
_OF_PARAMETERS = _ANNOTATIONS | _DEFINITIONS | {"type", "properties", "required", "additionalProperties"}
_OF_STRINGS = _ANNOTATIONS | _DEFINITIONS | {"type"}
_REFERENCES = ("#/$defs/", "#/definitions/")


class UnsupportedSchemaError(ValueError):
    """A schema says something that cannot be followed in the format of the model; the text names the function."""


class Parameter(NamedTuple):
    """A parameter. ``schema``: of its value, with the definitions that it may refer to. ``needed``: it is required."""

    name: str
    schema: dict[str, Any]
    needed: bool


def listed_parameters(function: str, schema: Mapping[str, Any]) -> list[Parameter]:
    """Return the parameters of a function one by one. ``schema``: of its arguments.

    Raises:
        UnsupportedSchemaError: the schema says more of the arguments than which there are and which are required.
    """
    _check_keywords(f"the parameters of {function!r}", schema, _OF_PARAMETERS)
    if schema.get("type", "object") not in ("object", ["object"]):
        raise UnsupportedSchemaError(f"the parameters of {function!r} are no object")
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
    for reference in _references(schema):
        if not reference.startswith(_REFERENCES):
            raise UnsupportedSchemaError(
                f"$ref {reference[:100]!r} in the parameters of {function!r} cannot be followed: in the format of this "
                "model, those that refer to $defs can"
            )
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return [
        Parameter(name, {**value, **shared} if isinstance(value, Mapping) else {}, name in required)
        for name, value in properties.items()
        if value is not False  # which says that it may not be there
    ]


def python_parameters(function: str, schema: Mapping[str, Any]) -> list[Parameter]:
    """The same for calls in Python, whose parameters have names as Python has them. Words such as ``from`` are some.

    Raises:
        UnsupportedSchemaError: as ``listed_parameters``, or a name is none in Python.
    """
    found = listed_parameters(function, schema)
    for each in found:
        name = each.name
        if not name.isidentifier() or not unicodedata.is_normalized("NFKC", name):
            raise UnsupportedSchemaError(
                f"the parameter {name!r} of {function!r} cannot be written: this model calls functions in Python"
            )
    return found


def string_choices(function: str, parameter: Parameter) -> Sequence[str] | None:
    """Return the values of a parameter that is written as it is, without quotes: those of its enum; None: any string.

    Raises:
        UnsupportedSchemaError: its schema says anything else of strings.
    """
    schema = parameter.schema
    choices = schema.get("enum") if "const" not in schema else [schema["const"]]
    if isinstance(choices, list) and choices and all(isinstance(each, str) for each in choices):
        _check_keywords(_of(function, parameter), schema, _OF_STRINGS | {"enum", "const"})
        if any("</arg_value>" in each for each in choices):
            raise UnsupportedSchemaError(
                f"{_of(function, parameter)} may be a text with '</arg_value>', which ends values in the format of "
                "this model"
            )
        return choices
    _check_string(_of(function, parameter), schema)
    return None


def _check_string(what: str, schema: Any) -> None:
    """Check that all strings match a schema that some do."""
    if not isinstance(schema, Mapping):
        return
    unions = [name for name in ("anyOf", "oneOf") if name in schema]
    if unions == ["anyOf"]:
        _check_keywords(what, schema, _ANNOTATIONS | _DEFINITIONS | {"anyOf"})
        free = [each for each in schema["anyOf"] if "string" in schema_types(each)]
        if len(free) == 1:
            _check_string(what, free[0])
            return
    _check_keywords(what, schema, _OF_STRINGS)


def _check_keywords(what: str, schema: Mapping[str, Any], known: frozenset[str]) -> None:
    if unknown := sorted(map(str, schema.keys() - known)):
        raise UnsupportedSchemaError(
            f"{', '.join(unknown)[:200]} in {what} cannot be followed in the format of this model"
        )


def _of(function: str, parameter: Parameter) -> str:
    return f"the parameter {parameter.name!r} of {function!r}"


def _references(value: Any) -> Iterator[str]:
    """All references in a schema, wherever they stand."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(reference := one.get("$ref"), str):
                yield reference
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
