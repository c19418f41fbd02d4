"""Schemas of functions that formats cannot follow which write parameters one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
from pagewise_gateway.structured.call_parameters import UnsupportedSchemaError
from pagewise_gateway.structured.tool_calls import Function, tool_call_grammar
from pagewise_gateway.text.output_parsing import make_format


def grammar(name: str, *, functions: Sequence[Function], required: bool = True) -> str:
    found = make_format(name, "qwen3")
    assert found is not None
    return tool_call_grammar(name, found, functions, {}, required=required)


TEXTS = {"a": {"type": "string"}}
# The schema of the parameters of a function, and the reason of the refusal. Of both formats that write them one by one.
REFUSED_OF_BOTH: list[tuple[dict[str, Any], str]] = [
    ({"properties": TEXTS, "not": {"required": ["a"]}}, "not in the parameters of 'f'"),
    ({"properties": TEXTS, "dependentRequired": {"a": ["b"]}}, "dependentRequired in the parameters of 'f'"),
    ({"properties": TEXTS, "minProperties": 1, "if": {}}, "if, minProperties in"),
    ({"anyOf": []}, "anyOf in"),
    ({"$ref": "#/$defs/p", "$defs": {"p": {}}}, r"\$ref in"),
    ({"properties": TEXTS, "required": ["a", "b"]}, "require 'b', which is not listed"),
    ({"properties": {"a": False}, "required": ["a"]}, "require 'a', which is not listed"),
    ({"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}}, r"\$ref '#/properties/b'"),
    ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, r"\$ref '#'"),
    ({"type": "string"}, "are no object"),
    ({"properties": {"a": 3}}, "the parameter 'a' of 'f' is no schema"),
]
REFUSED_OF_GLM: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a": {"type": "string", "pattern": "b+"}}}, "pattern in the parameter 'a' of 'f'"),
    ({"properties": {"a": {"type": "string", "format": "date", "minLength": 2}}}, "format, minLength in"),
    ({"properties": {"a": {"type": ["string", "integer"], "enum": ["b", 1]}}}, "enum in"),
    ({"properties": {"a": {"anyOf": [{"type": "string", "enum": ["b"]}, {"type": "integer"}]}}}, "enum in"),
    ({"properties": {"a": {"type": "string", "not": {"const": "b"}}}}, "not in the parameter"),
    (
        {"properties": {"a": {"type": "string", "enum": ["b</arg_value>c"]}}},
        "'a' of 'f' may be a text with '</arg_value>'",
    ),
    ({"properties": {" a": {}}}, "' a' of 'f' cannot be written"),
]
REFUSED_OF_PYTHON: list[tuple[dict[str, Any], str]] = [
    ({"properties": {"a-b": {}}}, "'a-b' of 'f' cannot be written"),
    ({"properties": {"\ufb01": {}}}, "cannot be written"),
]
REFUSED = [
    *(("glm45", *each) for each in (*REFUSED_OF_BOTH, *REFUSED_OF_GLM)),
    *(("pythonic", *each) for each in (*REFUSED_OF_BOTH, *REFUSED_OF_PYTHON)),
]


@pytest.mark.parametrize("required", [True, False], ids=["required", "strict"])
@pytest.mark.parametrize(("name", "schema", "reason"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_followed_is_refused_by_name(
    name: str, schema: dict[str, Any], reason: str, required: bool
) -> None:
    function = Function("f", schema, True)
    with pytest.raises(UnsupportedSchemaError, match=reason):
        grammar(name, required=required, functions=[function])
    # A function that need not be called, and is not strict, follows nothing.
    assert grammar(name, required=False, functions=[function._replace(strict=False)])


def test_functions_that_python_cannot_name_are_refused() -> None:
    for functions, required in (
        ([Function("a/b", None), Function("f", None)], True),
        ([Function("a/b", None, True), Function("f", None)], False),
        ([Function("a/b", None)], False),
    ):
        with pytest.raises(UnsupportedSchemaError, match="'a/b' cannot be called"):
            grammar("pythonic", functions=functions, required=required)
    made = grammar("pythonic", functions=[Function("a:b", None), Function("f", None, True)], required=False)
    assert made == grammar("pythonic", functions=[Function("f", None, True)], required=False)


def test_a_text_behind_a_reference_is_written_without_quotes() -> None:
    """The parser of calls reads it as a text, too."""
    definitions = {
        "Text": {"type": "string", "description": "t"},
        "Color": {"enum": ["red"]},
        "Int": {"allOf": [{"$ref": "#/$defs/Number"}, {"minimum": 1}]},
        "Number": {"type": "integer"},
        "Both": {"allOf": [{"type": "string"}, {"type": ["string", "null"]}]},
    }
    direct = {"a": {"type": "string"}, "b": {"enum": ["red"]}, "c": {"type": "integer", "minimum": 1}}
    referred = {"a": {"$ref": "#/$defs/Text"}, "b": {"$ref": "#/$defs/Color"}, "c": {"$ref": "#/$defs/Int"}}
    made = [
        grammar("qwen3_coder", functions=[Function("f", {"properties": each, "$defs": definitions}, True)])
        for each in (direct, referred)
    ]
    assert made[0] == made[1]
    with pytest.raises(UnsupportedSchemaError, match="allOf in the parameter 'a' of 'f'"):
        grammar("qwen3_coder", functions=[
            Function("f", {"properties": {"a": {"$ref": "#/$defs/Both"}}, "$defs": definitions}, True)
        ])  # fmt: skip
    wide = {str(number): {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(100)} | {"100": {}}
    with pytest.raises(UnsupportedSchemaError, match="over 1000 parts by references"):
        grammar("qwen3_coder", functions=[
            Function("f", {"properties": {"a": {"$ref": "#/$defs/0"}}, "$defs": wide}, True)
        ])  # fmt: skip


@pytest.mark.parametrize("name", ["glm45", "pythonic"])
def test_a_parameter_brings_the_definitions_that_it_needs(name: str) -> None:
    """With all definitions in each parameter, a schema of 200 KB would become a grammar of 300 MB."""
    unused = {f"unused{number}": {"type": "object", "properties": TEXTS} for number in range(300)}
    definitions = {"x/y": {"items": {"$ref": "#/$defs/z"}}, "z": {"items": {"$ref": "#/$defs/x~1y"}}, **unused}
    properties: dict[str, Any] = {f"p{number}": {"type": "integer"} for number in range(300)}
    properties["x"] = {"type": "array", "items": {"$ref": "#/$defs/x~1y/items"}}
    made = grammar(name, functions=[Function("f", {"properties": properties, "$defs": definitions}, True)])
    assert "unused" not in made
    assert made.count('"x/y": ') == made.count('"z": ') == 1
    properties |= {f"q{number}": {"$ref": f"#/$defs/unused{number}"} for number in range(300)}
    definitions |= {f"unused{number}": {"items": {"$ref": f"#/$defs/unused{number + 1}"}} for number in range(299)}
    with pytest.raises(UnsupportedSchemaError, match="more than 262144 bytes as a grammar"):
        grammar(name, functions=[Function("f", {"properties": properties, "$defs": definitions}, True)])
