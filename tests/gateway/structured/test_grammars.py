"""Grammars that are no schemas: their matches, found by llguidance with a tokenizer of single bytes."""

import asyncio
import threading

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from pagewise_gateway.structured.grammars import (
    Grammars,
    Validate,
    check_grammar,
    choice_grammar,
    context_free_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
    structural_tag_grammar,
)
from pagewise_gateway.structured.walk import GrammarError
from pagewise_shared.sampling import MAX_GRAMMAR_BYTES


class Bytes:
    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENIZER = LLTokenizer(TokenizerWrapper(Bytes()))


def takes(grammar: str, text: str) -> bool:
    check_grammar(grammar)
    matcher = LLMatcher(TOKENIZER, grammar, log_level=0)
    return all(matcher.consume_token(byte) for byte in text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        [""],
        ["", "a", "ab"],
        ['q"', "a\\n", "a\nb"],
        ["日本", "😀", "\x00", "\x7f"],
        ["a", "a"],
        ["%json {}"],
    ],
    ids=repr,
)
def test_choices(choices: list[str]) -> None:
    grammar = choice_grammar(choices)
    assert all(takes(grammar, choice) for choice in choices)
    assert not takes(grammar, "other")
    assert takes(grammar, "") == ("" in choices)


def test_many_choices_are_one_lexeme() -> None:
    choices = [f"choice {number}" for number in range(12_000)]
    grammar = choice_grammar(choices)
    assert takes(grammar, "choice 11999")
    assert not takes(grammar, "choice 12000")


def test_regular_expressions_match_the_whole_text() -> None:
    for regex, good, bad in (("a|b", "b", "ab"), ("^a$", "a", ""), (r"\d{2}/x", "12/x", "1/x"), ("", "", "a")):
        assert takes(regex_grammar(regex), good)
        assert not takes(regex_grammar(regex), bad)


def test_context_free_grammars() -> None:
    lark = context_free_grammar('start: "(" start ")" | "x"')
    assert takes(lark, "((x))")
    assert not takes(lark, "((x)")
    gbnf = context_free_grammar('root ::= "a" digit*\ndigit ::= [0-9]')
    assert takes(gbnf, "a12")
    assert takes(context_free_grammar('start: "x" %json {"type": "integer"}'), "x12")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('start: %json {"patternProperties": {"^a": {}}, "additionalProperties": false}', "patternProperties"),
        ('start: "a" %json {"items": {"x-guidance": {}}} "b"', "x-guidance"),
        (
            '{"grammars": [{"json_schema": {"patternProperties": {"^a": {}}, "additionalProperties": false}}]}',
            "neither Lark's nor GBNF's",
        ),
        ("start: other", "unknown name"),
        ("start: /(?=a)/", "look-around"),
        ("start: r0\n" + "".join(f"r{n}: r{n + 1}\n" for n in range(40_000)) + 'r40000: "a"', "at most 2048 rules"),
        ("root ::= (", "GBNF"),
    ],
)
def test_grammars_that_cannot_be_used(text: str, why: str) -> None:
    with pytest.raises(GrammarError) as refused:
        check_grammar(context_free_grammar(text))
    assert why in str(refused.value)


def test_structural_tags() -> None:
    grammar = structural_tag_grammar(
        [("<f=a>", {"type": "integer"}, "</f>"), ("<f=b>", '{"type": "boolean"}', "</f>")], ["<f="]
    )
    assert takes(grammar, "before <f=a>12</f> between <f=b>true</f> after")
    assert takes(grammar, "nothing")
    assert not takes(grammar, "<f=a>true</f>")
    assert not takes(grammar, "<f=c>")
    with pytest.raises(GrammarError, match="no trigger begins"):
        structural_tag_grammar([("<g>", {}, "")], ["<f"])
    with pytest.raises(GrammarError, match="patternProperties"):
        structural_tag_grammar([("<f>", {"patternProperties": {"^a": {}}, "additionalProperties": False}, "")], ["<f"])


def test_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    assert takes(json_schema_grammar(schema), '{ "a" :\n 1 }')
    assert not takes(json_schema_grammar(schema, whitespace=False), '{"a": 1}')
    assert takes(json_schema_grammar(schema, whitespace=False), '{"a":1}')
    assert takes(json_schema_grammar(schema, whitespace_pattern=" ?"), '{"a": 1}')
    assert not takes(json_schema_grammar(schema, whitespace_pattern=" ?"), '{"a":  1}')
    assert takes(json_object_grammar(), '{"any": [1, {"thing": null}]}')
    assert not takes(json_object_grammar(), "[]")


def test_the_size_is_limited() -> None:
    names = [f"property_{number}" for number in range(3000)]
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": names}
    check_grammar(json_schema_grammar(schema))
    with pytest.raises(GrammarError, match=f"bytes as a grammar, the limit is {MAX_GRAMMAR_BYTES}"):
        check_grammar(choice_grammar([f"{number:05} {'é' * 20}" for number in range(6000)]))


def test_texts_that_cannot_be_written_are_no_choices() -> None:
    with pytest.raises(GrammarError, match="no valid Unicode text"):
        choice_grammar(["a", "\ud800"])


async def test_grammars_are_made_off_the_loop_and_checked_once() -> None:
    grammars, threads = Grammars(), []

    def make(_: Validate) -> str:
        threads.append(threading.current_thread().name)
        return regex_grammar("[0-9]+")

    first, second = await asyncio.gather(grammars.checked(make, "a"), grammars.checked(make, "b"))
    assert first == second
    assert set(threads) <= {"grammars_0", "grammars_1"}
    with pytest.raises(GrammarError):
        await grammars.checked(lambda _: regex_grammar("("), "a")
    grammars.close()
    assert await grammars.checked(make, "a") == first
    grammars.close()
