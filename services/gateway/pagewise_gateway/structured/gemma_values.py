"""Grammars of the arguments of Gemma 4, which are no JSON: a special token delimits strings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagewise_gateway.structured.call_parameters import (
    ANNOTATIONS,
    DEFINITIONS,
    LOOSE_OF_STRINGS,
    UnsupportedSchemaError,
    listed_parameters,
)
from pagewise_gateway.text.output_parsing.gemma import QUOTE

_PLAIN = {"integer", "number", "boolean", "null"}
"""Types whose values are written as in JSON."""
_KNOWN = {
    "string": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_LOOSE = {
    "string": LOOSE_OF_STRINGS,
    "array": frozenset({"uniqueItems"}),
    "object": frozenset({"minProperties", "maxProperties", "propertyNames"}),
}
"""Keywords that the grammar does not enforce if the function is not strict."""
_NAME_SIGNS = "{}[],:<>\"'\\ \n\t"


class GrammarRules(Protocol):
    """A grammar under construction, as ``tool_calls`` makes it."""

    def declare(self, name: str) -> str:
        """Return the name of a new rule, which is defined later."""

    def define(self, name: str, expression: str) -> None:
        """Define a declared rule."""

    def rule(self, name: str, expression: str) -> str:
        """Add a rule, and return its name."""

    def text(self, text: str) -> str:
        """Match this text."""

    def until(self, delimiter: str) -> str:
        """Match any text up to and with the first delimiter."""

    def json(self, schema: Mapping[str, Any]) -> str:
        """Match JSON that follows a schema."""

    def listed(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Match items in this order."""


class GemmaValues:
    """Makes the grammar of the arguments of one function. ``schema``: the schema of its parameters."""

    def __init__(self, grammar: GrammarRules, function: str, schema: Mapping[str, Any], strict: bool) -> None:
        self._grammar, self._function, self._schema, self._strict = grammar, function, schema, strict
        self._definitions: dict[str, str] = {}  # the rules of definitions by their references
        self._any = ""  # the rule of any value

    def parameters(self) -> str:
        """Match the arguments, without the brackets around them.

        Raises:
            UnsupportedSchemaError: the schema has keywords that cannot be followed.
        """
        found = listed_parameters(self._function, self._schema, self._strict)
        return self._members([(name, schema, required) for name, schema, required in found])

    def any_members(self) -> str:
        """Match any arguments, without the brackets around them."""
        grammar = self._grammar
        name = grammar.rule("NAME", r"""/[^\s{}\[\],:<>"'\\\\]+/""")
        member = grammar.rule("member", f'{name} ":" {self._any_value()}')
        return f'({member} ("," {member})*)?'

    def _members(self, members: Sequence[tuple[str, Any, bool]]) -> str:
        items = [(f"{self._name(name)} {self._value(name, schema)}", required) for name, schema, required in members]
        return self._grammar.listed(items, ",")

    def _name(self, name: str) -> str:
        is_bare = name and not any(sign in name for sign in _NAME_SIGNS)
        return self._grammar.text(f"{name}:" if is_bare else f"{QUOTE}{name}{QUOTE}:")

    def _any_value(self) -> str:
        if not self._any:
            grammar = self._grammar
            self._any = grammar.declare("any")
            text = f"{grammar.text(QUOTE)} {grammar.until(QUOTE)}"
            plain = grammar.json({"type": ["number", "boolean", "null"]})
            items = f'"[" ({self._any} ("," {self._any})*)? "]"'
            grammar.define(self._any, f'{text} | {plain} | {items} | "{{" {self.any_members()} "}}"')
        return self._any

    def _value(self, name: str, schema: Any) -> str:
        """Match a value. ``name``: the name of its parameter."""
        if not isinstance(schema, Mapping) or not schema.keys() - ANNOTATIONS - DEFINITIONS:
            return self._any_value()
        if isinstance(reference := schema.get("$ref"), str):
            self._check(name, schema, frozenset({"$ref"}))
            return self._referred(name, reference)
        for union in ("anyOf", "oneOf"):
            if isinstance(choices := schema.get(union), list):
                self._check(name, schema, frozenset({union, "type"}))
                return self._one_of([self._value(name, each) for each in choices])
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            self._check(name, schema, frozenset({"const", "enum", "type", *LOOSE_OF_STRINGS}))
            return self._one_of([self._grammar.text(_written(each)) for each in values])
        types = schema.get("type")
        if not isinstance(types, str | list):
            raise self._unsupported(name, "a schema without a type")
        return self._one_of(
            [self._typed(name, each, schema) for each in ([types] if isinstance(types, str) else types)]
        )

    def _one_of(self, expressions: Sequence[str]) -> str:
        return f"({' | '.join(dict.fromkeys(expressions))})"

    def _referred(self, name: str, reference: str) -> str:
        if reference not in self._definitions:
            rule = self._definitions[reference] = self._grammar.declare("definition")
            value: Any = self._schema
            for part in reference.removeprefix("#/").split("/"):
                value = value.get(part) if isinstance(value, Mapping) else None
            if value is None:
                raise self._unsupported(name, f"$ref {reference[:100]!r}")
            self._grammar.define(rule, self._value(name, value))
        return self._definitions[reference]

    def _typed(self, name: str, kind: Any, schema: Mapping[str, Any]) -> str:
        grammar = self._grammar
        if kind in _PLAIN:
            return grammar.json({**schema, "type": kind})
        if kind not in _KNOWN:
            raise self._unsupported(name, f"type {kind!r}")
        others = frozenset[str]().union(*_KNOWN.values()) if isinstance(schema["type"], list) else frozenset[str]()
        self._check(name, schema, frozenset({"type"}) | _KNOWN[kind] | others, _LOOSE[kind])
        if kind == "string":
            return f"{grammar.text(QUOTE)} {grammar.until(QUOTE)}"
        return self._list(name, schema) if kind == "array" else self._object(name, schema)

    def _list(self, name: str, schema: Mapping[str, Any]) -> str:
        item = self._grammar.rule("item", self._value(name, schema.get("items", True)))
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
        return f'"[" {item} {more} "]"' if least else f'"[" ({item} {more})? "]"'

    def _object(self, name: str, schema: Mapping[str, Any]) -> str:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            if self._strict and isinstance(schema.get("additionalProperties"), Mapping):
                raise self._unsupported(name, "additionalProperties")
            return '"{}"' if schema.get("additionalProperties") is False else f'"{{" {self.any_members()} "}}"'
        required = schema.get("required", [])
        members = [(key, value, key in required) for key, value in properties.items() if value is not False]
        return f'"{{" {self._members(members)} "}}"'

    def _check(
        self, name: str, schema: Mapping[str, Any], known: frozenset[str], loose: frozenset[str] = frozenset()
    ) -> None:
        known = known | ANNOTATIONS | DEFINITIONS | (frozenset() if self._strict else loose)
        if unknown := sorted(each for each in map(str, schema.keys() - known) if not each.startswith("x-")):
            raise self._unsupported(name, ", ".join(unknown)[:200])

    def _unsupported(self, name: str, what: str) -> UnsupportedSchemaError:
        return UnsupportedSchemaError(
            f"{what} in the parameter {name!r} of {self._function!r} cannot be followed in the format of this model"
        )


def _written(value: Any) -> str:
    """Return a value as Gemma writes it."""
    if isinstance(value, str):
        return f"{QUOTE}{value}{QUOTE}"
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}:{_written(each)}' for key, each in value.items())}}}"
    return json.dumps(value)
