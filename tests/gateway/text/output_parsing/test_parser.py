"""Golden transcripts of all formats, whole and cut everywhere, and texts that no model would write."""

import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.output_parsing import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Delta,
    MessageParser,
    Tools,
    joined,
    make_format,
)
from pagewise_gateway.text.output_parsing.deltas import ParsedCall, ParsedMessage

from tests.gateway.text.output_parsing.tables import TOOLS, Transcript
from tests.gateway.text.output_parsing.transcripts import TRANSCRIPTS
from tests.gateway.text.output_parsing.written_calls import qwen

FORMATS = sorted(
    {(each.tool_parser, each.reasoning_parser) for each in TRANSCRIPTS},
    key=lambda names: (names[0] or "", names[1] or ""),
)


def parsed(
    names: tuple[str | None, str | None], pieces: Iterable[str], prompt: str = "", parallel: bool = True
) -> ParsedMessage:
    found = make_format(*names)
    assert found is not None
    parser = MessageParser(found, found.start(prompt, None), TOOLS, parallel=parallel)
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.finish()
    assert all(delta.text for delta in deltas)
    return joined(deltas)


def test_every_format_has_transcripts() -> None:
    assert {each.tool_parser for each in TRANSCRIPTS} == {None, *TOOL_FORMATS}
    assert {each.reasoning_parser for each in TRANSCRIPTS} == {None, *REASONING_FORMATS}


@pytest.mark.parametrize(
    "given", TRANSCRIPTS, ids=lambda each: f"{each.tool_parser}-{each.reasoning_parser}-{each.name}"
)
def test_a_transcript_whole_and_cut_at_every_position(given: Transcript) -> None:
    names, text = (given.tool_parser, given.reasoning_parser), given.text
    assert parsed(names, [text], given.prompt) == given.message
    assert parsed(names, text, given.prompt) == given.message
    for at in range(1, len(text)):
        assert parsed(names, [text[:at], text[at:]], given.prompt) == given.message


@pytest.mark.parametrize("given", [each for each in TRANSCRIPTS if each.calls], ids=lambda each: each.name)
def test_a_transcript_that_is_cut_off_anywhere_is_a_beginning(given: Transcript) -> None:
    """Reported parts of a call stay the same, whenever the text ends."""
    names = given.tool_parser, given.reasoning_parser
    for end in range(len(given.text)):
        message = parsed(names, [given.text[:end]], given.prompt)
        for call, whole in zip(message.calls, given.message.calls, strict=False):
            assert whole.name == call.name
            assert whole.arguments.startswith(call.arguments)


def test_only_the_first_call_counts_without_parallel_calls() -> None:
    for each in TRANSCRIPTS:
        message = parsed((each.tool_parser, each.reasoning_parser), each.text, each.prompt, parallel=False)
        assert message.calls == each.message.calls[:1]
        assert (message.content, message.reasoning) == (each.content, each.reasoning)


UNESCAPED = '{"a": "he said "hi", "b": 1}'
MISSING = [
    (
        ("hermes", None),
        f'<tool_call>\n{{"name": "save", "arguments": {UNESCAPED}}}\n</tool_call>Hi'
        '<tool_call>\n{"name": "get_time"}\n</tool_call>',
        ParsedMessage("Hi", "", [ParsedCall("save", f"{UNESCAPED}}}\n"), ParsedCall("get_time", "{}")]),
    ),
    (("hermes", None), '<tool_call>{"name: 1\n</tool_call>Hi', ParsedMessage('<tool_call>{"name: 1\n</tool_call>Hi')),
    (
        ("mistral", None),
        '[TOOL_CALLS]save[ARGS]{"a": "\\\n[TOOL_CALLS]get_time[ARGS]{}',
        ParsedMessage("", "", [ParsedCall("save", '{"a": "\\\n'), ParsedCall("get_time", "{}")]),
    ),
    (
        ("glm45", None),
        '<tool_call>get_weather\n<arg_key>tags</arg_key>\n<arg_value>["1\n</tool_call>Hi',
        ParsedMessage("Hi", "", [ParsedCall("get_weather", '{"tags": ')]),
    ),
]


@pytest.mark.parametrize(("names", "text", "message"), MISSING, ids=lambda value: repr(value)[:30])
def test_a_call_in_which_a_quote_is_missing_ends_behind_the_line(
    names: tuple[str, None], text: str, message: ParsedMessage
) -> None:
    """JSON has no line breaks inside of strings, so an open quote there begins no string."""
    assert parsed(names, [text]) == message
    for at in range(1, len(text)):
        assert parsed(names, [text[:at], text[at:]]) == message
    assert parsed(names, text) == message


def test_the_ends_of_calls_are_text_if_the_value_goes_on() -> None:
    """That is not known before the output ends, so they are held back."""
    block = "\n<function=get_time>\n</function>\n</tool_call>\n"
    text = qwen("get_weather", city=f"see{block}and", days="1")
    message = ParsedMessage("", "", [ParsedCall("get_weather", json.dumps({"city": f"see{block}and", "days": 1}))])
    names = ("qwen3_coder", None)
    assert parsed(names, [text]) == parsed(names, text) == message
    for at in range(1, len(text)):
        assert parsed(names, [text[:at], text[at:]]) == message
    cut = text[: text.index("and")]
    assert parsed(names, cut).calls == [ParsedCall("get_weather", '{"city": "see\\n<function=get_time>"}')]


REFERRING: dict[str, Any] = {
    "properties": {
        "a": {"$ref": "#/$defs/Int"},
        "b": {"allOf": [{"$ref": "#/$defs/Alias"}, {"minimum": 1}]},
        "c": {"anyOf": [{"$ref": "#/$defs/Int"}, {"type": "null"}]},
        "d": {"$ref": "#/$defs/x~1y"},
        "e": {"$ref": "#/$defs/Color"},
        "f": {"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "null"]}]},
        "g": {"$ref": "#/$defs/Circle"},
        "h": {"$ref": "other.json#/x"},
    },
    "allOf": [{"properties": {"i": {"type": "boolean"}}}],
    "$defs": {
        "Int": {"type": "integer"},
        "Alias": {"$ref": "#/$defs/Int"},
        "x/y": {"type": "string"},
        "Color": {"enum": ["1", "2"]},
        "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"allOf": [{"$ref": "#/$defs/Circle"}]}, {"type": "string"}]},
        **{str(number): {"anyOf": [{"$ref": f"#/$defs/{number + 1}"}] * 2} for number in range(100)},
    },
}


def test_types_are_found_behind_references_and_in_parts() -> None:
    tools = Tools({"f": {**REFERRING, "properties": {**REFERRING["properties"], "bomb": {"$ref": "#/$defs/0"}}}})
    found = {name: set(tools.types("f", name)) for name in (*"abcdefghi", "bomb")}
    assert found == {
        "a": {"integer"}, "b": {"integer"}, "c": {"integer", "null"}, "d": {"string"}, "e": {"string"},
        "f": {"integer"}, "g": {"string"}, "h": set(), "i": {"boolean"}, "bomb": set(),
    }  # fmt: skip


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"),
    *("<|python_tag|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "to=functions.save"),
    *(
        "<\uff5ctool\u2581calls\u2581begin\uff5c>",
        "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>",
        "<\uff5ctool\u2581call\u2581end\uff5c>",
        "```json\n",
        "```",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "save", "get_weather", "city", "analysis", "final"),
    *('{"name": "save", "arguments": ', '"name"', ":", '"', "{", "}", "[", "]", "(", ")", "=", ",", ";", "'", "\\"),
    *("<function=", "</function>", "<parameter=", "</parameter>", ">", 'string="true"', "<minimax:tool_call>"),
    *("<invoke name=", "<\uff5cDSML\uff5cinvoke name=", "<\uff5cDSML\uff5cparameter name=", "</invoke>", "<TOOLCALL>"),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "functions.save:0", "<|tool_call_argument_begin|>"),
    *("<|tool_call>", "call:save{", '<|"|>', "<tool_call|>", "<|channel>thought\n", "<channel|>", "city:"),
    *("\n", "  ", "<", "é🙂", "1", "null", '"parameters": {"a": 1}', "[save(city='", "x" * 300),
]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.sampled_from(FORMATS), st.data())
def test_any_text_is_the_same_message_however_it_is_cut(
    fragments: list[str], names: tuple[str | None, str | None], data: st.DataObject
) -> None:
    text = "".join(fragments)
    message = parsed(names, [text])
    assert parsed(names, text) == message
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert parsed(names, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == message


@pytest.mark.parametrize("piece", ["a <b[", "<", "x</tool_call>y", "<tool_call>", "a"])
def test_what_a_parser_keeps_does_not_grow_with_the_text(piece: str) -> None:
    """The kept text is searched and copied with every piece, so the work would grow with the square of the text."""
    found = make_format("hermes", "qwen3")
    assert found is not None
    parser = MessageParser(found, "ended", TOOLS)
    length = 0
    for number in range(1, 3001):
        length += sum(len(delta.text) for delta in parser.push(piece))
        assert number * len(piece) - length <= len("<tool_call>") + len(piece)


DEEP = "[" * 200_000 + "]" * 200_000


def test_values_that_are_nested_too_deeply_are_text() -> None:
    """Python's decoder raises an error for them that is no error of JSON."""
    text = f"<tool_call>save\n<arg_key>a</arg_key>\n<arg_value>{DEEP}</arg_value>\n</tool_call>"
    (call,) = parsed(("glm45", None), [text]).calls
    assert json.loads(call.arguments) == {"a": DEEP}
    message = parsed(("hermes", None), [f'<tool_call>{{"name": {DEEP}}}</tool_call>'])
    assert (message.calls, message.content) == ([], f'<tool_call>{{"name": {DEEP}}}</tool_call>')
    (call,) = parsed(("hermes", None), [f'<tool_call>{{"name": "save", "arguments": {DEEP}}}</tool_call>']).calls
    assert call.arguments == DEEP


@pytest.mark.timeout(30)  # with the square of the text, an hour
def test_where_a_call_begins_is_found_in_the_beginning_only() -> None:
    text = "```" + " " * 400_000 + "x"
    assert parsed(("pythonic", None), [text]).content == text
    assert parsed(("pythonic", None), ["[" + "a" * 600 + "()]"]).content == "[" + "a" * 600 + "()]"


@pytest.mark.parametrize("given", [each for each in TRANSCRIPTS if each.calls], ids=lambda each: each.name)
def test_whether_the_last_call_is_whole(given: Transcript) -> None:
    found = make_format(given.tool_parser, given.reasoning_parser)
    assert found is not None
    for end in range(len(given.text) + 1):
        parser = MessageParser(found, found.start(given.prompt, None), TOOLS)
        calls = joined([*parser.push(given.text[:end]), *parser.finish()]).calls
        if parser.whole and calls:
            whole = given.message.calls[len(calls) - 1].arguments
            # A number may continue, and text that is no JSON has no end.
            assert calls[-1].arguments == whole or not whole.startswith("{")
        elif calls:
            with pytest.raises(ValueError, match=r"."):
                json.loads(calls[-1].arguments)


def told(parser: MessageParser, text: str) -> str:
    return "".join(delta.text for delta in parser.push(text) if delta.kind in ("content", "reasoning"))


PIECES = ["<", "</", "<t", "tool", "_call>", "think>", "a", "[", "<<", "<\uff5c", "<|", "[TOOL", "x y", "`"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(FORMATS))
def test_only_what_may_begin_a_delimiter_is_held_back(pieces: list[str], names: tuple[str | None, str | None]) -> None:
    """A text that has no whole marker is passed on up to the beginning of one."""
    found = make_format(*names)
    assert found is not None
    parser, text = MessageParser(found, "ended", TOOLS, continues=True), "."
    length = len(told(parser, text))
    for piece in pieces:
        text += piece
        length += len(told(parser, piece))
        if any(each in text for each in found.delimiters):
            return
        begun = [each[:n] for each in found.delimiters for n in range(1, len(each)) if text.endswith(each[:n])]
        assert len(text) - length <= max(map(len, begun), default=0)


@pytest.mark.parametrize(
    ("names", "marker", "pieces"),
    [
        (("hermes", None), "<tool_call>", ["`", " a", "[1", "{a"]),
        (("glm45", None), "<tool_call>", ["`", "a b", "{", "[", '"']),
        (("mistral", None), "[TOOL_CALLS]", ["`", "a b", "{]", "[1", "a. b"]),
        (("deepseek_v31", None), "<\uff5ctool\u2581call\u2581begin\uff5c>", ["`", "a b", "a\n", "[", "{"]),
        (("llama3_json", None), "<|python_tag|>", ["`", "print", '{"a":1']),
    ],
)
def test_a_marker_is_passed_on_as_soon_as_no_call_can_follow(
    names: tuple[str, None], marker: str, pieces: list[str]
) -> None:
    found = make_format(*names)
    assert found is not None
    for piece in pieces:
        parser = MessageParser(found, "main", TOOLS)
        assert told(parser, f"x {marker}") == "x"
        assert told(parser, piece).strip() == f"{marker}{piece}".strip().removesuffix("<").strip()


def _kept(message: ParsedMessage) -> str:
    """The characters of a message but for white space, which may differ at borders."""
    return "".join((message.reasoning + message.content).split())


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.sampled_from(FRAGMENTS) | st.text("<>[]{}|/\"'`\n ab:", max_size=4), max_size=14),
    st.sampled_from(FORMATS),
    st.sampled_from(["", "<think>", "<think></think>", "[THINK]"]),
    st.data(),
)
def test_no_character_is_lost(
    fragments: list[str], names: tuple[str | None, str | None], prompt: str, data: st.DataObject
) -> None:
    """Of a text without calls, all is content or reasoning, but for the delimiters of that."""
    text = "".join(fragments)
    message = parsed(names, [text], prompt)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    assert parsed(names, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], prompt) == message
    found = make_format(*names)
    assert found is not None
    if message.calls or found.harmony:
        return
    whole, reasoning = "".join(text.split()), found.reasoning
    if reasoning is not None and found.start(prompt, None) != "ended":
        begun = whole.startswith(reasoning.opening) and found.start(prompt, None) != "reasoning"
        whole = whole.removeprefix(reasoning.opening) if begun else whole
        if begun or found.start(prompt, None) != "main":
            whole = whole.replace(reasoning.closing, "", 1)
    assert _kept(message) == whole


def delimiters(names: tuple[str | None, str | None]) -> tuple[str, ...]:
    found = make_format(*names)
    return found.delimiters if found is not None else ()


PROSE = ["See ", "`", "a b. ", "\n", "{", "}", "[1]", '"', "<b>", "</b>", "it's", ", ", "é🙂 "]
MARKERS = sorted({marker for names in FORMATS for marker in delimiters(names)})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PROSE + MARKERS), max_size=14), st.sampled_from(FORMATS), st.data())
def test_markers_in_prose_are_content(
    pieces: list[str], names: tuple[str | None, str | None], data: st.DataObject
) -> None:
    found = make_format(*names)
    assert found is not None
    text = "See " + "".join(pieces).rstrip() + " ."
    prompt = found.reasoning.closing if found.reasoning is not None else ""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(names, pieces, prompt) == ParsedMessage(text)


CALLS = [
    next(each for each in TRANSCRIPTS if each.tool_parser == parser and each.name == name)
    for parser, name in [
        ("hermes", "a call"),
        ("hermes", "arguments before the name"),
        ("glm45", "what is not declared"),
        ("mistral", "delimiters inside of strings"),
        ("deepseek_v31", "version 3.1"),
        ("deepseek_v3", "delimiters inside of strings"),
        ("qwen3_coder", "two in one outer tag, and on one line"),
        ("minimax_m2", "text is as it is"),
        ("deepseek_v32", "types that tags and schemas name"),
        ("kimi_k2", "the same id twice, and white space"),
        ("gemma4", "delimiters inside of strings"),
        ("nemotron_json", "no list"),
    ]
]


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(CALLS), st.lists(st.sampled_from(PROSE + MARKERS)), st.lists(st.sampled_from(PROSE)), st.data())
def test_calls_between_prose_leave_all_of_it(
    call: Transcript, before: list[str], after: list[str], data: st.DataObject
) -> None:
    content = f"See {''.join(before)}".rstrip(), f"so {''.join(after)}."
    text = f"{content[0]} {call.text} {content[1]}"
    names = call.tool_parser, call.reasoning_parser
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(names, pieces, "</think>") == ParsedMessage("\n".join(content), "", call.message.calls)


@pytest.mark.parametrize("names", FORMATS)
def test_under_a_grammar_for_the_answer_calls_come_first_or_not_at_all(names: tuple[str | None, str | None]) -> None:
    found = make_format(*names)
    assert found is not None
    for each in TRANSCRIPTS:
        if (each.tool_parser, each.reasoning_parser) != names or found.harmony:
            continue
        for text in ('{"a": "', '"'):
            answer = text + each.text
            for pieces in ([answer], answer):
                parser = MessageParser(found, "ended", TOOLS, calls_first=True)
                message = joined([delta for piece in pieces for delta in parser.push(piece)] + parser.finish())
                assert (message.content, message.calls) == (answer.rstrip(), [])
        if each.calls and not each.content and not each.reasoning:
            parser = MessageParser(found, "ended", TOOLS, calls_first=True)
            assert joined([*parser.push(each.text), *parser.finish()]).calls == each.message.calls


def test_text_is_passed_on_as_soon_as_it_is_no_delimiter() -> None:
    found = make_format("hermes", "qwen3")
    assert found is not None
    parser, content_told = MessageParser(found, "main", TOOLS), ""
    for piece, content in [
        ("if a <", "if a"),
        (" b <", "if a < b"),
        ("t", "if a < b"),
        ("d>", "if a < b <td>"),
        ("</", "if a < b <td></"),
        ("td><", "if a < b <td></td>"),
        ("<", "if a < b <td></td><"),
        ("x", "if a < b <td></td><<x"),
    ]:
        content_told += told(parser, piece)
        assert content_told == content


def test_values_that_a_grammar_allows_are_parsed_as_they_are() -> None:
    values = ("a", '["x</arg_value> </tool_call>"]'), ("b", "1e999"), ("c", f"[{'9' * 5000}]"), ("d", '"e"')
    message = ParsedMessage("", "", [ParsedCall("save", "{" + ", ".join(f'"{key}": {v}' for key, v in values) + "}")])
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values)
    glm = f"<tool_call>save\n{pairs}</tool_call>"
    python = f"[save({', '.join(f'{key}={value}' for key, value in values)})]"
    for name, text in (("glm45", glm), ("pythonic", python)):
        assert parsed((name, None), [text]) == message
        assert parsed((name, None), text) == message
        for at in range(1, 200):
            assert parsed((name, None), [text[:at], text[at:]]) == message


@pytest.mark.parametrize("length", [255, 256])
def test_long_names_of_functions(length: int) -> None:
    found = make_format("pythonic", None)
    assert found is not None
    parser = MessageParser(found, "main", Tools({"f" * length: {}}))
    calls = joined([*parser.push(f"[{'f' * length}(), {'f' * length}()]"), *parser.finish()]).calls
    assert [each.name for each in calls] == ["f" * length] * 2


@pytest.mark.parametrize("repeated", ['<tool_call>{"x":', '<tool_call>{"arguments":["'])
def test_thousands_of_markers_without_a_call_take_little_time_at_the_end(repeated: str) -> None:
    text = repeated * 2000
    began = time.thread_time()
    message = parsed(("hermes", None), [text])
    assert time.thread_time() - began < 1.0
    assert message.content == text
