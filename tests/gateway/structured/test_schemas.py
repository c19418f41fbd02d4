"""Which schemas are refused, and why."""

from typing import Any

import pytest
from pagewise_gateway.structured.grammars import check_grammar, json_schema_grammar
from pagewise_gateway.structured.schemas import MAX_LEVELS
from pagewise_gateway.structured.walk import MAX_DEPTH, GrammarError

STRING = {"type": "string"}
UNHONOURED: list[tuple[Any, str]] = [
    ({"not": STRING}, "keywords that are not supported: not"),
    ({"type": "array", "uniqueItems": True}, "keywords that are not supported: uniqueItems"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf is only supported where its schemas exclude each"),
    ({"if": STRING, "then": STRING}, "keywords that are not supported: if, then"),
    ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    ({"type": "array", "contains": STRING}, "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"anyOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, "dynamicRef"),
    ({"type": "string", "format": "iban"}, "Unknown format: iban"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"type": "strng"}, "Invalid type: strng"),
    ({"patternProperties": {"^a": STRING}}, "the keyword patternProperties is not supported"),
    ({"properties": {"a": {"items": {"patternProperties": {"^a": STRING}}}}}, "patternProperties"),
    ({"properties": {"a": {"items": [{"patternProperties": {"^a": STRING}}]}}}, "patternProperties"),
    ({"$defs": {"a": {"patternProperties": {"^a": STRING}}}, "$ref": "#/$defs/a"}, "patternProperties"),
    ({"anyOf": [STRING, {"additionalProperties": {"patternProperties": {"^a": STRING}}}]}, "patternProperties"),
    ({"$ref": "#/hidden/a~1b", "hidden": {"a/b": {"patternProperties": {"^a": STRING}}}}, "patternProperties"),
    ({"$ref": "#/hidden/0", "hidden": [{"patternProperties": {"^a": STRING}}]}, "patternProperties"),
    ({"$ref": "#/h%69dden", "hidden": {"patternProperties": {"^a": STRING}}}, "patternProperties"),
    ({"x-guidance": {"lenient": True}, "not": STRING}, "the keyword x-guidance is not supported"),
    ({"type": "object", "minProperties": 2}, "minProperties above 1"),
    ({"$ref": "https://example.com/schema"}, "'https://example.com/schema' is not supported"),
    ({"$ref": "#anchor", "$defs": {"a": {"$anchor": "anchor"}}}, "'#anchor' is not supported"),
    ({"$ref": "#/$defs/nothing"}, "refers to nothing"),
    ({"properties": {"a": {"$id": "b", "items": {"$ref": "#"}}}}, "$id is only supported at the top"),
    (False, "nothing matches the schema false"),
    (5, "a JSON schema is an object, true or false"),
    ("{", "it is not valid JSON"),
    ("[]", "a JSON schema is an object"),
]


@pytest.mark.parametrize(("schema", "why"), UNHONOURED, ids=lambda value: repr(value)[:50])
def test_what_is_not_honoured_is_refused_by_name(schema: Any, why: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(json_schema_grammar(schema))
    assert why in str(refused.value)


HONOURED: list[Any] = [
    True,
    {},
    '{"type": "integer"}',
    {"type": "object", "properties": {"patternProperties": STRING, "x-guidance": STRING, "not": STRING}},
    {"$defs": {"patternProperties": STRING}, "$ref": "#/$defs/patternProperties"},
    {"const": {"patternProperties": {}}},
    {"enum": [{"not": 1}, {"patternProperties": 1}]},
    {"default": {"patternProperties": 1}, "examples": [{"not": 1}], "type": "object"},
    {"type": "object", "minProperties": 1},
    {"type": "object", "properties": {"a": STRING, "b": STRING}, "required": ["a", "b"], "minProperties": 2},
    {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    {"$id": "https://example.com/root", "$defs": {"a": STRING}, "$ref": "#/$defs/a"},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}},
    {"type": "array", "items": {"$ref": "#"}},
    {"type": "array", "prefixItems": [STRING], "items": False},
    {"allOf": [{"type": "object", "properties": {"a": STRING}}, {"properties": {"b": STRING}}]},
]


@pytest.mark.parametrize("schema", HONOURED, ids=lambda value: repr(value)[:50])
def test_what_is_honoured_is_taken(schema: Any) -> None:
    check_grammar(json_schema_grammar(schema))


def test_schemas_that_would_overflow_the_stack_are_refused() -> None:
    chain = {f"d{number}": {"items": {"$ref": f"#/$defs/d{number + 1}"}} for number in range(MAX_LEVELS)}
    with pytest.raises(GrammarError, match=f"more than {MAX_LEVELS} levels together"):
        json_schema_grammar({"$ref": "#/$defs/d0", "$defs": chain | {f"d{MAX_LEVELS}": True}})
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match=f"nested too deeply, the limit is {MAX_DEPTH}"):
        json_schema_grammar(deep)
    with pytest.raises(GrammarError, match=r"nested too deeply|not valid JSON"):
        json_schema_grammar('{"items":' * 100_000 + "{}" + "}" * 100_000)


def test_properties_that_are_not_named_may_be_forbidden() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "properties": {}}, "b": {"type": "object"}}}
    grammar = json_schema_grammar(schema, additional_properties=False)
    assert grammar.count('"additionalProperties":false') == 2
