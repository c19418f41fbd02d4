"""Expressions that a text has to match together: how many there may be, however a schema or a grammar joins them.

llguidance takes exponential time for them, which nothing interrupts.
"""

import json
import time
from typing import Any

import pytest
from pagewise_gateway.structured.conjunctions import check_conjunctions, num_classes
from pagewise_gateway.structured.grammars import (
    check_grammar,
    context_free_grammar,
    json_schema_grammar,
    structural_tag_grammar,
)
from pagewise_gateway.structured.walk import GrammarError

STRING = {"type": "string"}
MANY = 30


def pattern(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*a.{{{number}}}b.*"}


def each(**around: Any) -> dict[str, Any]:
    """``allOf`` of so many schemas: these, with a pattern in the place of None."""
    return {"allOf": [json.loads(json.dumps(around).replace("null", json.dumps(pattern(n)))) for n in range(MANY)]}


ATTACKS: dict[str, Any] = {
    "patterns": {"allOf": [pattern(number) for number in range(MANY)]},
    "beside a prefix": {"allOf": [STRING | {"pattern": f"^(y|z{{40}}.*a.{{{n}}}b.*)$"} for n in range(MANY)]},
    "references": {
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}", **pattern(n)} for n in range(MANY)} | {f"d{MANY}": STRING},
        "$ref": "#/$defs/d0",
    },
    "enum": {"enum": ["a", "b"], "allOf": [pattern(number) for number in range(MANY)]},
    "properties": each(properties={"x": {"properties": {"y": None}}}),
    "other properties": {"properties": {"x": STRING}} | each(additionalProperties=None),
    "a property and others": {"properties": {"x": pattern(0)}, "allOf": [each(additionalProperties=None)]},
    "items": each(items=None),
    "first items": each(prefixItems=[STRING, None]),
    "items behind the first": {"prefixItems": [STRING], "allOf": [each(items={"items": None})]},
    "alternatives": each(anyOf=[None, {"type": "boolean"}]),
    "properties of alternatives": each(anyOf=[{"properties": {"x": None}}, {"type": "boolean"}]),
    "one of": each(oneOf=[None, {"type": "boolean"}]),
    "in a part that is only referred to": {"$ref": "#/other/0", "other": [each(items=None)]},
    "formats": {"allOf": [{"format": one} for one in ("email", "uri", "uuid", "date", "time", "ipv4", "ipv6")] * 2},
}


@pytest.mark.parametrize("schema", ATTACKS.values(), ids=ATTACKS)
def test_schemas_that_join_many_patterns_are_refused_at_once(schema: Any) -> None:
    began = time.thread_time()
    with pytest.raises(GrammarError, match=r"has to match together are too many.*may be at most 200000"):
        json_schema_grammar(schema)
    with pytest.raises(GrammarError, match="has to match together are too many"):
        context_free_grammar(f'start: "a" %json {json.dumps(schema)}')
    with pytest.raises(GrammarError, match="has to match together are too many"):
        structural_tag_grammar([("<f>", STRING, "</f>"), ("<g>", schema, "</g>")], ["<"])
    assert time.thread_time() - began < 0.5


USUAL: dict[str, Any] = {
    "one pattern": {"type": "string", "pattern": r"^\w+([\.-]?\w+)*@\w+([\.-]?\w+)*(\.\w{2,})+$", "minLength": 6},
    "a pattern and a format": {"type": "string", "format": "email", "pattern": "@example\\.com$", "maxLength": 254},
    "rules of passwords": {
        "type": "string",
        "allOf": [{"pattern": each} for each in ("[A-Z]", "[a-z]", "[0-9]", r"[^\w]", "^.{8,64}$")],
    },
    "alternatives": {"anyOf": [pattern(number) for number in range(MANY)]},
    "kinds": {"anyOf": [{"properties": {"kind": {"const": n}, "id": pattern(n)}} for n in range(MANY)]},
    "inheritance": {
        "$defs": {"base": {"properties": {f"b{n}": pattern(n) for n in range(MANY)}}},
        "allOf": [{"$ref": "#/$defs/base"}, {"properties": {f"c{n}": {"format": "uuid"} for n in range(MANY)}}],
    },
    "the same twice": {"allOf": [pattern(1)] * MANY},
    "a tree": {
        "$defs": {
            "tree": {
                "properties": {
                    "left": {"$ref": "#/$defs/tree"},
                    "right": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
                    "value": pattern(1),
                }
            }
        },
        "allOf": [{"$ref": "#/$defs/tree"}, {"properties": {"left": {"properties": {"value": pattern(2)}}}}],
    },
}


@pytest.mark.parametrize("schema", USUAL.values(), ids=USUAL)
def test_usual_schemas_are_taken(schema: Any) -> None:
    reason = refusal(schema)
    assert not reason or "circular" in reason or "Unable to determine" in reason, reason  # the library's own


def refusal(schema: Any) -> str:
    """Why a schema is refused; empty: it is not."""
    try:
        check_grammar(json_schema_grammar(schema))
    except GrammarError as error:
        return str(error)
    return ""


def test_alternatives_that_refer_to_each_other_end() -> None:
    """Numbers of alternatives that double with each level, and levels that do not end."""
    doubling = {
        f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}", "properties": {f"p{n}{k}": pattern(n)}} for k in (0, 1)]}
        for n in range(60)
    }
    began = time.thread_time()
    for schema in (
        {"$defs": doubling | {"d60": STRING}, "$ref": "#/$defs/d0"},
        {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, pattern(1)]}}, "$ref": "#/$defs/a"},
        {
            "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, STRING]} for n in range(600)}
            | {"d600": STRING},
            "$ref": "#/$defs/d0",
        },
    ):
        reason = refusal(schema)
        assert not reason or "refer to each other" in reason or "merged" in reason or "too large" in reason, reason
    assert time.thread_time() - began < 5.0


HARD = [f"/.*a.{{{number}}}b.*/" for number in range(MANY)]
GRAMMARS = {
    "one terminal": "start: X\nX: " + " & ".join(HARD),
    "over lines": "start: X\nX: /a/\n  & " + "\n  & ".join(HARD),
    "two terminals": f"start: X\nX: (Y & Z)\nY: {' & '.join(HARD[:5])}\nZ: {' & '.join(HARD[5:10])}",
    "doubled": "start: X6\nX0: /.*a/ & /b.*/\n" + "".join(f'X{n + 1}: X{n} "x" & X{n} "y"\n' for n in range(6)),
}


@pytest.mark.parametrize("text", GRAMMARS.values(), ids=GRAMMARS)
def test_terminals_that_join_many_expressions_are_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="joins with & are too many"):
        context_free_grammar(text)


@pytest.mark.parametrize(
    "text", ["start: X\nX: /[a-z]+/ & /.{3,9}/ & ~/foo|bar/", 'start: "a & b" /a&b/ // & & &', "start: /(a&&b|c)*/"]
)
def test_usual_terminals_are_taken(text: str) -> None:
    assert context_free_grammar(text)


def test_classes_are_counted() -> None:
    assert num_classes("abc") == num_classes(r"a\.b") == 2
    assert num_classes("[a-z][a-z]*") == 3
    assert num_classes(r".[^a]\d\p{L}\pN[]x]") == 8
    assert num_classes("[a[bc]][a[bd]]") >= 4


def test_large_unions_without_patterns_cost_nothing() -> None:
    """A syntax tree of many kinds of nodes, which refer to all of them."""
    kinds = [f"k{number}" for number in range(60)]
    node = {"anyOf": [{"$ref": f"#/$defs/{kind}"} for kind in kinds]}
    fields = {f"f{number}": node for number in range(4)}
    definitions = {
        kind: {"properties": {"kind": {"const": kind}} | {f"{kind}{name}": node for name, node in fields.items()}}
        for kind in kinds
    }
    schema = {"$defs": definitions, **node}
    began = time.thread_time()
    check_conjunctions(schema, lambda reference: definitions[reference.rpartition("/")[2]])
    assert time.thread_time() - began < 0.1
