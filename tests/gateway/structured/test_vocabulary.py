"""Keywords that forbid nothing are left out, and no others; values are as valid as before."""

import contextlib
import copy
import gc
import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.structured.grammars import (
    check_grammar,
    context_free_grammar,
    json_schema_grammar,
    structural_tag_grammar,
)
from pagewise_gateway.structured.lookahead import without_lookahead
from pagewise_gateway.structured.vocabulary import simplified
from pagewise_gateway.structured.walk import GrammarError

STRING: dict[str, Any] = {"type": "string"}
ANY: dict[str, Any] = {}
NEVER: dict[str, Any] = {"not": {}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_2019 = {"$schema": "https://json-schema.org/draft/2019-09/schema"}
OBJECT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": STRING, "b": {"type": "integer"}},
    "required": ["a"],
}
ARRAY: dict[str, Any] = {"type": "array", "items": STRING}

OF_ANYTHING: list[dict[str, Any]] = [
    {"$comment": "x"},
    {"$anchor": "x"},
    {"$dynamicAnchor": "x"},
    {"$recursiveAnchor": True},
    {"$vocabulary": {"https://example.com": True}},
    {"$schema": "https://example.com/dialect"},
    {"$schema": "http://json-schema.org/schema#"},
    {"$defs": {"a": {"contains": STRING}, "b": {"patternProperties": {"^a": ANY}}}},
    {"definitions": {"a": {"minProperties": 7}}},
    {"title": "x", "description": "x", "default": 1, "examples": [1], "deprecated": True},
    {"readOnly": True, "writeOnly": False, "example": 1, "externalDocs": {}, "xml": {}},
    {"contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {"uniqueItems": True}},
    {"discriminator": {"propertyName": "kind"}},
    {"not": False},
    {"not": NEVER},
    {"not": {"type": ["null", "integer"]}},
    {"not": {"enum": [None, 1, 1.5, True, [], {}]}},
    {"allOf": []},
    {"allOf": [{}, True, {"title": "x"}]},
    {"anyOf": [{"contains": STRING}, True]},
    {"anyOf": [{"description": "x"}, {"type": "null"}]},
    {"oneOf": [False, {}, NEVER]},
    {"if": {"contains": STRING}},
    {"then": {"contains": STRING}},
    {"else": {"contains": STRING}, "then": False},
    {"if": STRING, "then": True, "else": {}},
    {"if": True, "else": False},
    {"if": False, "then": {"uniqueItems": True}},
    {"minLength": 0, "pattern": ""},
    {"format": "password"},
    {"format": "binary"},
    {"format": "file-path"},
    {"format": "textarea"},
    {"propertyOrdering": ["a"], "strict": True, "x-order": 1, "nullable": False, "markdownDescription": "x"},
    {"if": {"type": "integer"}, "then": {"multipleOf": 3}},
    {"if": STRING, "then": {"type": ["string", "null"]}, "else": False},
    {"not": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 1}]}},
    {"not": {"allOf": [STRING, {"type": "number"}]}},
    {"not": {"not": STRING}},
    {"allOf": [{"anyOf": [STRING, {"type": "null"}]}, {"oneOf": [{}]}]},
    # of values of other types
    {"uniqueItems": True, "contains": ANY, "minContains": 1, "unevaluatedItems": False, "minItems": 3},
    {"propertyNames": {"pattern": "^a"}, "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False},
]
OF_OBJECTS: list[dict[str, Any]] = [
    {"propertyNames": True},
    {"propertyNames": {}},
    {"propertyNames": STRING},
    {"propertyNames": {"type": ["string", "null"], "minLength": 0, "pattern": ".*", "title": "x"}},
    {"propertyNames": {"anyOf": [STRING, {"type": "number"}]}},
    {"propertyNames": {"$ref": "#/$defs/name"}, "$defs": {"name": STRING}},
    {"patternProperties": {}},
    {"patternProperties": {"^x-": True, "^y": {}}},
    {"propertyNames": {"oneOf": [STRING]}},
    {"propertyNames": {"allOf": [STRING, {}]}},
    {"propertyNames": {"not": False}},
    {"additionalProperties": False, "maxProperties": 2},
    {"additionalProperties": False, "dependentRequired": {"z": ["y"]}, "dependentSchemas": {"z": False}},
    {"dependentRequired": {}},
    {"dependentRequired": {"b": [], "a": ["a"], "c": ["a"]}},
    {"dependentSchemas": {}},
    {"dependentSchemas": {"a": True, "b": {"title": "x"}}},
    {"dependencies": {}},
    {"dependencies": {"a": [], "b": {}, "c": ["a"]}},
    {"unevaluatedProperties": True},
    {"unevaluatedProperties": {}},
    {"additionalProperties": False, "unevaluatedProperties": False},
    {"minProperties": 0},
    {"minProperties": 1},
    {"required": ["a"], "minProperties": 1.0},
]
OF_ARRAYS: list[dict[str, Any]] = [
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"minItems": 0},
    {"contains": STRING, "minContains": 0},
    {"contains": False, "minContains": 0, "maxContains": 0},
    {"contains": STRING, "minContains": 0, "maxItems": 3, "maxContains": 4},
    {"minContains": 2},
    {"maxContains": 0},
    {"additionalItems": False},
    {"unevaluatedItems": True},
    {"unevaluatedItems": {}},
    {"unevaluatedItems": False},
]
FORBID_NOTHING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((STRING, more) for more in OF_ANYTHING),
    *((OBJECT, more) for more in OF_OBJECTS),
    *((ARRAY, more) for more in OF_ARRAYS),
    ({"type": "integer"}, {"format": "int64"}),
    ({"type": "string", "pattern": "^[0-9a-z]+$"}, {"format": "cuid2"}),
    ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b"}]}, {"format": "includes"}),
    ({"enum": ["a", "b"]}, {"format": "cuid2"}),
    ({"enum": ["a", None]}, {"not": {"enum": ["c", "d"]}}),
    ({"type": "number", "minimum": 0}, {"exclusiveMinimum": False, "exclusiveMaximum": False}),
    ({"enum": [1, "a", None]}, {"uniqueItems": True, "patternProperties": {"^a": STRING}, "minProperties": 9}),
    ({"const": True}, {"dependentSchemas": {"a": False}, "dependencies": {"a": ["b"]}, "contains": False}),
]
KEPT = ("maxItems", "required", "additionalProperties")
"""Keywords of the second schema that forbid something; they make others idle."""


@pytest.mark.parametrize(("schema", "more"), FORBID_NOTHING, ids=lambda value: repr(value)[:60])
def test_what_forbids_nothing_is_left_out(schema: dict[str, Any], more: dict[str, Any]) -> None:
    expected = {**schema, **{name: more[name] for name in KEPT if name in more}}
    for dialect in (ANY, DRAFT_7, DRAFT_2019):
        if dialect is DRAFT_7 and schema is ARRAY and "contains" in more:
            continue  # draft 7 has no minContains, so contains asks for one
        whole = {**dialect, **schema, **more}
        before = copy.deepcopy(whole)
        check_grammar(json_schema_grammar(whole))
        assert whole == before, "the schema of the request is left as it is"
        left = simplified(whole)
        for name in ("$schema", "$defs", "definitions"):
            left.pop(name, None)
        assert left == expected
    inner = {name: value for name, value in {**schema, **more}.items() if name != "$defs"}
    nested = {"type": "array", "items": {"anyOf": [{"properties": {"x": inner}}, {"type": "null"}]}}
    check_grammar(json_schema_grammar(nested | {"$defs": more.get("$defs", {})}))


COLOR = {"enum": ["red"], "type": "string", "title": "Color"}
HELD: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": STRING},
        [{}, {"a": "x"}, {"a": "x", "b": "y"}],
        [{"c": "x"}, {"a": 1}],
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "z": STRING},
            "propertyNames": {"anyOf": [{"const": "a"}, {"const": "b"}]},
        },
        [{"a": 1}, {"b": []}],
        [{"a": "x"}, {"z": "x"}],
    ),
    (
        {
            "$defs": {"Color": COLOR, "Ref": {"$ref": "#/$defs/Color"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Ref"},
            "additionalProperties": {"type": "array", "items": {"$ref": "#/$defs/Color"}},
        },
        [{"red": ["red"]}],
        [{"red": ["blue"]}, {"blue": []}],
    ),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    (
        {
            "$defs": {"Color": COLOR, "A": {"propertyNames": {"const": "a"}, "additionalProperties": STRING}},
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/A"}},
        },
        [{"x": {"a": "b"}}],
        [{"x": {"a": 1}}, {"x": {"b": "b"}}],
    ),
    ({"type": "object", "patternProperties": {"^(.*)$": STRING}}, [{}, {"a": "x"}], [{"a": 1}]),
    ({"type": "object", "patternProperties": {"": STRING}, "additionalProperties": False}, [{"a": "x"}], [{"a": 1}]),
    ({"type": "object", "patternProperties": {"^.+$": STRING}}, [{}, {"a": "x"}], [{"a": 1}]),
    ({**OBJECT, "additionalProperties": False, "patternProperties": {"": True}}, [{"a": "x", "z": 1}], [{"a": 1}]),
    ({"type": "object", "propertyNames": {"oneOf": [{"const": "a"}, {"const": "b"}]}}, [{"b": 1}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"allOf": [{"enum": ["a", "b"]}, {"enum": ["b"]}]}}, [{"b": 1}], [{"a": 1}]),
    ({**OBJECT, "unevaluatedProperties": False}, [{"a": "x"}], [{"a": "x", "z": 1}]),
    ({"type": "array", "prefixItems": [STRING], "unevaluatedItems": False}, [["a"]], [["a", 1]]),
    ({"type": "array", "unevaluatedItems": STRING}, [["a"]], [[1]]),
    ({**ARRAY, "contains": True}, [["a"]], [[]]),
    ({**ARRAY, "contains": {}, "minContains": 2, "maxContains": 3}, [["a"] * 2], [["a"], ["a"] * 4]),
    ({**STRING, "if": True, "then": {"maxLength": 1}, "else": False}, ["a"], ["ab"]),
    ({**STRING, "if": {"type": "null"}, "else": {"maxLength": 1}}, ["a"], ["ab"]),
    ({"not": {"not": STRING}}, ["a"], [1]),
    ({"enum": ["a", "b", None], "not": {"const": "b"}}, ["a", None], ["b"]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(2**62), 2**62], [2**64, -(2**64), 0.5]),
    ({"type": "number", "minimum": -3.4028234663852886e38, "maximum": 3.4028234663852886e38}, [1.5], [1e39, -1e39]),
    (
        {"type": "string", "format": "hostname", "pattern": r"^(?=.{1,9}\.?$)[a-z0-9]+(?:\.[a-z0-9]+)*\.?$"},
        ["a.b", "abcdefghi", "abcdefghi."],
        ["a..b", "abcdefghij"],
    ),
    ({"type": "string", "pattern": r"^(?=[)\]a]*$)(?=(?:.\)?){2,3}$)."}, ["a)", "aa", "aaa", "a)a)a"], ["a", "ab"]),
    ({"$defs": {"A[int] ü": STRING}, "$ref": "#/$defs/A[int] ü"}, ["a"], [1]),
    ({"anyOf": [NEVER, STRING]}, ["a"], [1]),
    ({"type": "object", "properties": {"a": NEVER}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"anyOf": [{"$ref": "#/$defs/never"}, STRING], "$defs": {"never": NEVER}}, ["a"], [1]),
    (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {**ARRAY, "uniqueItems": False}}}},
        [["a"]],
        [1],
    ),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD, ids=lambda value: repr(value)[:60])
def test_what_can_be_written_otherwise_is_held(schema: dict[str, Any], valid: list[Any], invalid: list[Any]) -> None:
    check_grammar(json_schema_grammar(schema))
    validator = jsonschema.Draft202012Validator(simplified(schema))
    assert all(map(validator.is_valid, valid))
    assert not any(map(validator.is_valid, invalid))


FORBID_SOMETHING: list[tuple[dict[str, Any], str]] = [
    ({**ARRAY, "uniqueItems": True}, "uniqueItems"),
    ({**ARRAY, "contains": STRING}, "contains"),
    ({**ARRAY, "contains": STRING, "minContains": 1}, "contains, minContains"),
    ({**ARRAY, "contains": STRING, "minContains": 0, "maxContains": 2}, "maxContains"),
    ({**ARRAY, **DRAFT_7, "contains": STRING, "minContains": 0}, "contains"),
    ({"type": "array", "anyOf": [{"prefixItems": [STRING]}, {"maxItems": 1}], "unevaluatedItems": False}, "unevalu"),
    ({**OBJECT, "propertyNames": {"format": "uuid"}}, "propertyNames"),
    ({**STRING, "pattern": "^(?=a)b|c$"}, "look-around"),
    ({**STRING, "pattern": "^(?=a)?b"}, "look-around"),
    ({**STRING, "pattern": "^(?=a"}, "regex parse error"),
    ({**OBJECT, "propertyNames": {"minLength": 1}}, "propertyNames"),
    ({**OBJECT, "propertyNames": {"anyOf": [{"pattern": "^a"}, {"const": "b"}]}}, "propertyNames"),
    ({**OBJECT, "patternProperties": {"^a": {}}, "additionalProperties": False}, "patternProperties"),
    ({"patternProperties": {"^.*$": STRING}, "additionalProperties": False}, "patternProperties"),
    ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({**OBJECT, "dependencies": {"a": ["b"]}}, "dependencies"),
    ({**OBJECT, "allOf": [{"properties": {"z": STRING}}], "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({**ARRAY, "contains": {"type": "integer"}, "minContains": 0, "maxContains": 0}, "maxContains"),
    ({"if": {"const": "a"}, "then": {"maxLength": 1}}, "if, then"),
    ({"type": "object", "maxProperties": 1, "properties": {"a": STRING}}, "maxProperties"),
    ({**STRING, "not": {"const": "a"}}, "not"),
    ({"type": "number", "not": {"type": "integer"}}, "not"),
    ({"if": STRING, "then": {"minLength": 1}}, "if, then"),
    ({"if": STRING, "else": False}, "else, if"),
    ({"oneOf": [{}, STRING]}, "oneOf is only supported"),
    ({"$dynamicRef": "#a", "$dynamicAnchor": "a"}, "$dynamicRef"),
    ({"uniqueItems": True}, "uniqueItems"),
    ({**STRING, "format": "cuid2"}, "Unknown format: cuid2"),
    ({"type": ["string", "array"], "uniqueItems": True}, "uniqueItems"),
    (NEVER, "nothing matches the schema false"),
    ({"allOf": [{"not": True}]}, "Unsatisfiable"),
]


@pytest.mark.parametrize(("schema", "why"), FORBID_SOMETHING, ids=lambda value: repr(value)[:60])
def test_what_forbids_something_and_cannot_be_held_is_refused_by_name(schema: dict[str, Any], why: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(why)):
        check_grammar(json_schema_grammar(schema))


def test_a_keyword_stays_if_a_reference_leads_through_it() -> None:
    schema = {"properties": {"a": {"anyOf": [True, {"type": "integer"}]}, "b": {"$ref": "#/properties/a/anyOf/1"}}}
    assert simplified(schema) == schema
    check_grammar(json_schema_grammar(schema))


def test_schemas_in_other_grammars_are_simplified_too() -> None:
    schema = {**OBJECT, "propertyNames": STRING}
    lark = context_free_grammar(f"start: value\nvalue: %json {json.dumps(schema)} | /x/\n")
    assert "propertyNames" not in lark
    check_grammar(lark)
    check_grammar(structural_tag_grammar([("<a>", schema, "</a>")], ["<a>"]))


def test_references_within_unions_do_not_multiply() -> None:
    definitions = {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": STRING}
    simplified({"propertyNames": {"$ref": "#/$defs/d0"}, "$defs": definitions})


TEXTS = ("a", "b", "ab", "")
TYPES = ("string", "integer", "number", "object", "array", "null", "boolean")
LEAVES = st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from([*TEXTS, 1.5, 1.0])
DOCUMENTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=6,
)


def _keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.lists(st.sampled_from(TEXTS), max_size=2, unique=True)
    named = st.dictionaries(st.sampled_from(TEXTS), inner, max_size=2)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True),
        "enum": st.lists(LEAVES, min_size=1, max_size=3),
        "const": LEAVES,
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), st.lists(inner, min_size=1, max_size=3)),
        **dict.fromkeys(("if", "then", "else", "not", "contains", "items", "propertyNames"), inner),
        **dict.fromkeys(("additionalProperties", "unevaluatedItems", "unevaluatedProperties"), inner),
        **dict.fromkeys(("minContains", "maxContains", "minItems", "maxItems"), st.integers(0, 2)),
        **dict.fromkeys(("minProperties", "minLength"), st.integers(0, 2)),
        **dict.fromkeys(("properties", "dependentSchemas"), named),
        "patternProperties": st.dictionaries(st.sampled_from(["", ".*", "^a", "^.*$"]), inner, max_size=2),
        "dependentRequired": st.dictionaries(st.sampled_from(TEXTS), names, max_size=2),
        "required": names,
        "uniqueItems": st.booleans(),
        "pattern": st.sampled_from(["", ".*", "^a"]),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#/$defs/x/anyOf/0", "#/properties/a"]),
        "description": st.just("x"),
    }
    return st.lists(st.sampled_from(sorted(keywords)), max_size=4, unique=True).flatmap(
        lambda chosen: st.fixed_dictionaries({name: keywords[name] for name in chosen})
    )


SCHEMAS = st.recursive(st.booleans() | st.sampled_from([ANY, STRING, NEVER]), _keywords, max_leaves=8)


@settings(max_examples=200, deadline=None)
@given(_keywords(SCHEMAS), SCHEMAS, SCHEMAS, st.lists(DOCUMENTS, min_size=8, max_size=20))
def test_a_simplified_schema_accepts_the_same_values(schema: dict[str, Any], x: Any, y: Any, values: list[Any]) -> None:
    schema = {**schema, "$defs": {"x": x, "y": y}}
    before, after = jsonschema.Draft202012Validator(schema), jsonschema.Draft202012Validator(simplified(schema))
    for value in values:
        try:
            results = before.is_valid(value), after.is_valid(value)
        except KeyboardInterrupt:
            raise
        except BaseException:  # a reference to nothing, or one that leads to itself, at which the library panics
            continue
        assert results[0] == results[1]


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"),
    [
        ({"contains": {}, "minContains": 0, "unevaluatedItems": False}, [1], None),
        ({"patternProperties": {"^a": True}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"if": {"properties": {"a": True}}, "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"anyOf": [True, {"properties": {"a": True}}], "unevaluatedProperties": False}, {"a": 1}, {"b": 1}),
        ({"propertyNames": {"enum": ["a"]}, "unevaluatedProperties": False}, {}, {"a": 1}),
        (
            {"dependentSchemas": {"a": {"unevaluatedProperties": True}}, "unevaluatedProperties": False},
            {"a": 1},
            {"b": 1},
        ),
        ({"allOf": [{"patternProperties": {"a": {}}}], "unevaluatedProperties": {"type": "null"}}, {"a": 1}, {"b": 1}),
    ],
    ids=["contains", "patternProperties", "if", "anyOf", "propertyNames", "unevaluatedProperties", "within"],
)
def test_what_keywords_evaluate_is_not_lost(schema: dict[str, Any], allowed: Any, refused: Any) -> None:
    for one in schema, simplified(schema):
        validator = jsonschema.Draft202012Validator(one)
        assert validator.is_valid(allowed)
        assert refused is None or not validator.is_valid(refused)


@pytest.mark.parametrize(
    "schema",
    [{"pattern": "a", "format": ["x"]}, {"pattern": ["x"]}, {"multipleOf": True}, {"const": "\ud800"}],
    ids=["format", "pattern", "multipleOf", "surrogate"],
)
def test_odd_values_are_refused_or_ignored(schema: dict[str, Any]) -> None:
    with contextlib.suppress(GrammarError):
        structural_tag_grammar([("<a>", schema, "</a>")], ["<a>"])


def test_schemas_that_many_refer_to_are_looked_at_once() -> None:
    union = {"anyOf": [{"type": "null"}] * 2000}
    reference = {"$ref": "#/$defs/E"}
    names = {f"p{number}": {"propertyNames": reference, "not": reference} for number in range(400)}
    gc.collect()  # or it may run meanwhile, over all objects of the test process
    began = time.thread_time()
    simplified({"$defs": {"E": union}, "properties": names})
    assert time.thread_time() - began < 0.3


EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([EMAIL, DURATION]), st.data())
def test_known_patterns_match_the_same_texts_without_look_ahead(pattern: str, data: st.DataObject) -> None:
    (written,) = without_lookahead(pattern)
    check_grammar(json_schema_grammar({**STRING, "pattern": written}))
    letters = st.text("aB1.-_'@", max_size=9) if pattern is EMAIL else st.text("PT1YMWDHS.,", max_size=9)
    text = data.draw(st.from_regex(written, fullmatch=True) | st.from_regex(pattern) | letters).rstrip("\n")
    assert (re.search(pattern, text) is None) == (re.search(written, text) is None)
