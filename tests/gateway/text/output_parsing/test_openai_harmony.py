"""Outputs of gpt-oss are parsed like by OpenAI's own implementation of their format."""

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.output_parsing import Delta, MessageParser, joined, make_format
from pagewise_gateway.text.output_parsing.deltas import ParsedMessage

from tests.gateway.text.output_parsing.tables import TOOLS

harmony: Any = pytest.importorskip("openai_harmony")

NAMES = ["get_time", "save", "get_weather"]
START = "<|start|>assistant"


@pytest.fixture(scope="module")
def encoding() -> Any:
    try:
        return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except harmony.HarmonyError as error:
        pytest.skip(f"the vocabulary o200k_base is not there (TIKTOKEN_ENCODINGS_BASE names its folder): {error}")


texts = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=40).map(str.strip).filter(bool)
arguments = st.dictionaries(st.sampled_from("abc"), texts | st.integers(), max_size=3).map(json.dumps)


def message(text: str, channel: str, recipient: str = "") -> Any:
    made = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)
    return made.with_recipient(recipient).with_content_type("<|constrain|>json") if recipient else made


calls = st.builds(
    lambda text, name: message(text, "commentary", f"functions.{name}"), arguments, st.sampled_from(NAMES)
)
turns = st.tuples(
    st.lists(texts.map(lambda text: message(text, "analysis")), max_size=2),
    st.lists(texts.map(lambda text: message(text, "commentary")), max_size=1),
    st.lists(calls, max_size=2),
    st.lists(texts.map(lambda text: message(text, "final")), max_size=1),
).map(lambda parts: [one for part in parts for one in part])


def parsed(text: str, size: int) -> ParsedMessage:
    found = make_format("openai", "openai_gptoss")
    assert found is not None
    parser = MessageParser(found, found.start("", None), TOOLS, parallel=True)
    deltas: list[Delta] = []
    for start in range(0, len(text), size):
        deltas += parser.push(text[start : start + size])
    return joined(deltas + parser.finish())


@settings(max_examples=60, deadline=None)
@given(turn=turns, behind=st.booleans(), size=st.integers(1, 30))
def test_messages_are_what_openai_s_parser_finds(encoding: Any, turn: list[Any], behind: bool, size: int) -> None:
    """``behind``: the recipient of a call is named behind its channel, as models do as well."""
    written = "".join(encoding.decode(encoding.render(one)) for one in turn)
    if behind:
        written = re.sub(
            rf"{re.escape(START)}( to=functions\.\w+)<\|channel\|>(\w+)", rf"{START}<|channel|>\2\1", written
        )
    written = written.removeprefix(START)  # these are the last tokens of the prompt
    if turn and turn[-1].channel == "final":
        written = written.removesuffix("<|end|>") + "<|return|>"
    tokens = encoding.encode(written, allowed_special="all")
    expected = encoding.parse_messages_from_completion_tokens(tokens, harmony.Role.ASSISTANT) if tokens else []
    found = parsed(written, size)
    said: dict[str, list[str]] = {"analysis": [], "commentary": [], "final": []}
    called = []
    for one in expected:
        text = "".join(part.text for part in one.content)
        if one.recipient:
            called.append((one.recipient.removeprefix("functions."), text))
        else:
            said[one.channel].append(text)
    assert len(expected) == len(turn)
    assert [(call.name, call.arguments) for call in found.calls] == called
    assert found.reasoning == "\n".join(said["analysis"])
    assert found.content == "\n".join(said["commentary"] + said["final"])
