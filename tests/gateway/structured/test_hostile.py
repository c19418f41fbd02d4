"""Grammars that are made to take long, or much memory: each is taken or refused, within bounds of both.

Time is the CPU time of the thread that makes and checks them, so other work on the machine does not count. The bounds
are
generous: without the limits that they are here for, some of these take minutes.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
from pagewise_gateway.structured.grammars import (
    check_grammar,
    choice_grammar,
    context_free_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
)
from pagewise_gateway.structured.schemas import MAX_AT_LEAST_ONE, MAX_OPTIONAL
from pagewise_gateway.structured.walk import GrammarError

SECONDS = 5.0
STRING = {"type": "string"}


def refusal(make: Callable[[], str]) -> str:
    """Make a grammar and check it, in time; returns why it is refused, or nothing."""
    began = time.thread_time()
    try:
        check_grammar(make())
    except GrammarError as error:
        reason = str(error)
    else:
        reason = ""
    assert time.thread_time() - began < SECONDS
    return reason


def test_empty_lines_take_linear_time() -> None:
    """The library's own search takes half a minute for these, and holds the interpreter's lock meanwhile."""
    for form in ('root ::= "a"', 'start: "a"'):
        began = time.thread_time()
        context_free_grammar("\n" * 60_000 + form + "\n \t\n" * 20_000)
        assert time.thread_time() - began < 1.0


def test_rules_of_gbnf_are_limited() -> None:
    """The converter visits all rules once for each link of a chain of them."""

    def chain(links: int, before: str = "") -> str:
        rules = "".join(f"r{number} ::= {before}r{number + 1}\n" for number in range(links))
        return f'root ::= r0\n{rules}r{links} ::= "b"'

    assert refusal(lambda: context_free_grammar(chain(510))) == ""
    assert refusal(lambda: context_free_grammar(chain(511))) == "a grammar in GBNF may have at most 512 rules"
    long = refusal(lambda: context_free_grammar(chain(400, '"a" ' * 15)))
    assert long == "a grammar in GBNF with 402 rules may have at most 20867 characters"
    assert refusal(lambda: context_free_grammar("#\n" * 20_000 + 'root ::= "a"')) == ""
    assert "at most 65536 characters" in refusal(lambda: context_free_grammar("#\n" * 40_000 + 'root ::= "a"'))


def objects(optional: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{number}": STRING for number in range(optional)}, **more}


SCHEMAS: list[tuple[str, Any, str]] = [
    ("at least one of many", objects(4000, minProperties=1, additionalProperties=False), "may have at most 480"),
    ("at least one", objects(MAX_AT_LEAST_ONE + 1, minProperties=1, additionalProperties=False), "minProperties is"),
    (
        "at least one, merged",
        {"allOf": [objects(MAX_OPTIONAL, additionalProperties=False), {"minProperties": 1}]},
        "minProperties is only supported if at most 100 properties are not required",
    ),
    ("at least one of few", objects(MAX_AT_LEAST_ONE, minProperties=1, additionalProperties=False), ""),
    ("optional properties", objects(MAX_OPTIONAL + 1), "at most 480 properties that are not required"),
    ("required properties", objects(3000, required=[f"p{number}" for number in range(3000)]), ""),
    ("alternatives", {"anyOf": [{"const": number} for number in range(5000)]}, "anyOf may have at most 480"),
    ("objects of an enum", {"enum": [{"a": number} for number in range(5000)]}, "at most 480 arrays and objects"),
    ("texts of an enum", {"enum": [f"text {number}" for number in range(12_000)]}, ""),
    ("a long text", {"enum": ["ab" * 60_000, "c"]}, "a text in enum or const may have at most 8192 characters"),
    ("a long const", {"const": "ab" * 60_000}, "a text in enum or const"),
    ("multiples", {"type": "integer", "multipleOf": 99_999_989}, "multipleOf is only supported"),
    (
        "common multiples",
        {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]},
        "multipleOf is only supported if all its numbers divide one of at most 10000, apart from powers of ten",
    ),
    ("usual multiples", {"items": {"multipleOf": 0.01}, "minimum": 0, "properties": {"a": {"multipleOf": 3600}}}, ""),
    (
        "a product of alternatives",
        {"allOf": [{"anyOf": [objects(1, title=str(number)), objects(2)]} for number in range(18)]},
        "schema too large",
    ),
    ("patterns together", {"allOf": [{"type": "string", "pattern": f"a{n}"} for n in range(12)]}, "regex is empty"),
    ("a long string", {"type": "string", "minLength": 10**9, "maxLength": 10**9}, ""),
    ("a long array", {"type": "array", "items": STRING, "minItems": 10**9}, ""),
    ("a repetition", {"type": "string", "pattern": "^(a|b){0,100000}$"}, ""),
    (
        "nothing but itself",
        {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
        "circular references",
    ),
    (
        "references",
        {
            "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)} | {"d60": STRING},
            "$ref": "#/$defs/d0",
        },
        "",
    ),
    ("a large one", {"prefixItems": [{"type": "integer"}] * 100_000}, "bytes as a grammar, the limit is 262144"),
    ("formats", {"anyOf": [{"type": "string", "format": "uri"}] * 100}, ""),
]


@pytest.mark.parametrize(("schema", "why"), [case[1:] for case in SCHEMAS], ids=[case[0] for case in SCHEMAS])
def test_schemas(schema: Any, why: str) -> None:
    reason = refusal(lambda: json_schema_grammar(schema))
    assert why in reason if why else reason == ""
    wrapped = {"type": "array", "items": schema}
    if "$defs" not in schema:
        tag = refusal(lambda: structural_tag_grammar([("<f>", wrapped, "</f>")], ["<"]))
        assert why in tag if why else tag == ""


REGEXES: list[tuple[str, str]] = [
    ("(a|b){0,100000}", ""),
    ("((((a{0,100}){0,100}){0,100}){0,100}){0,100}", ""),
    (".*a.{200}", ""),
    (r"\p{L}{5000}", ""),
    ("a" * 40_000, "at most 32768 characters"),
    ("(" * 10_000 + "a" + ")" * 10_000, "invalid regex"),
    ("(?=a)b", "look-around"),
]


@pytest.mark.parametrize(("regex", "why"), REGEXES, ids=lambda value: value[:20])
def test_regular_expressions(regex: str, why: str) -> None:
    reason = refusal(lambda: regex_grammar(regex))
    assert why in reason if why else reason == ""


def test_choices() -> None:
    assert refusal(lambda: choice_grammar([f"choice {number}" for number in range(12_000)])) == ""
    assert "a text has 120000 characters, the limit is 8192" in refusal(lambda: choice_grammar(["ab" * 60_000, "c"]))
    assert "bytes as a grammar" in refusal(lambda: choice_grammar([f"{number:020}" for number in range(16_000)]))


GRAMMARS: list[tuple[str, str, str]] = [
    ("a repetition", 'start: a{0,100000}\na: "x" | "y"', ""),
    ("repetitions of repetitions", 'start: a{1000}\na: b{1000}\nb: c{1000}\nc: "x"', ""),
    ("a repetition in GBNF", "root ::= x{0,100000}\nx ::= [ab] y\ny ::= x | [c]", ""),
    ("optional symbols", "start: " + " ".join(["a?"] * 5000) + '\na: "x"', "grammar size"),
    ("alternatives", "start: " + " | ".join(f'"w{n}" b' for n in range(5000)) + '\nb: "c"', "grammar size"),
    ("optional symbols between schemas", "start: " + '%json {"type": "null"} a? ' * 3000 + '\na: "x"', "levels"),
    ("parentheses", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "too deeply nested"),
    ("parentheses in GBNF", "root ::= " + "(" * 900 + '"a"' + ")" * 900, "recursion"),
    (
        "terminals",
        "start: A\n" + "".join(f"A{n or ''}: A{n + 1} A{n + 1}\n" for n in range(40)) + 'A40: "b"',
        "too big",
    ),
    ("many terminals", "start: A\n" + "A: " + " | ".join(f'"word {number}"' for number in range(4000)), ""),
    ("a long text", f'start: "{"ab" * 40_000}"', "at most 65536 characters beside schemas"),
    ("a large schema", f'start: "a" %json {{"enum": [{", ".join(map(str, range(20_000)))}]}} "b"', ""),
    ("comments that look like schemas", 'start: "a" // %json\n' + "// %json {\n" * 3000, ""),
    ("ambiguous rules", 'start: s\ns: s s s | s s | "a" | ""', ""),
]


@pytest.mark.parametrize(("text", "why"), [case[1:] for case in GRAMMARS], ids=[case[0] for case in GRAMMARS])
def test_context_free_grammars(text: str, why: str) -> None:
    reason = refusal(lambda: context_free_grammar(text))
    assert why in reason if why else reason == ""


def test_structural_tags() -> None:
    many = [(f"<f{number}>", objects(20), "</f>") for number in range(128)]
    assert refusal(lambda: structural_tag_grammar(many, ["<f"])) == ""
    assert refusal(lambda: structural_tag_grammar([("<f>", True, "</f>")], ["<f"])) == ""
    assert (
        refusal(lambda: structural_tag_grammar([("<f>", False, "</f>")], ["<f"])) == "nothing matches the schema false"
    )
    large = [(f"<f{number}>", objects(400), "</f>") for number in range(128)]
    assert "bytes as a grammar" in refusal(lambda: structural_tag_grammar(large, ["<f"]))
