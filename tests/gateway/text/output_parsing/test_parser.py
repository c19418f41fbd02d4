"""Golden transcripts of all formats, whole and cut everywhere, and texts that no model would write."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.output_parsing import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Delta,
    MessageParser,
    joined,
    make_format,
)
from pagewise_gateway.text.output_parsing.deltas import ParsedMessage
from pagewise_gateway.text.output_parsing.regions import Regions

from tests.gateway.text.output_parsing.transcripts import TOOLS, TRANSCRIPTS, Transcript

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
    """What was told of a call stays so, whenever the text ends."""
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
    """Its buffers are searched and copied with every piece, so the work would grow with the square of the text."""
    found = make_format("hermes", "qwen3")
    assert found is not None
    regions = Regions(found.template)
    length = 0
    for _ in range(3000):
        length += sum(len(event.text) for event in regions.push(piece))
        assert len(regions._parser._buffer) <= 4096 + 100
        assert len(regions._held) <= len("</tool_call>")
    assert length <= 3000 * len(piece)
