"""Grammars of tool calls in llguidance itself: texts that a model may write, and their parser's results."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from pagewise_gateway.structured.call_parameters import UnsupportedSchemaError
from pagewise_gateway.structured.tool_calls import Function, after_reasoning, tool_call_grammar
from pagewise_gateway.text.output_parsing import (
    TOOL_FORMATS,
    MessageParser,
    OutputFormat,
    Start,
    Tools,
    joined,
    make_format,
)
from pagewise_gateway.text.output_parsing.deltas import ParsedMessage

from tests.gateway.text.tokenizer_builders import byte_level_backend

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 3},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "enum": ["a", "b"]}},
}
FUNCTIONS = [Function("get_weather", SCHEMA), Function("get_time", None)]
TOOLS = Tools({"get_weather": SCHEMA, "get_time": None})
NAMES = sorted(TOOL_FORMATS)
REASONING = {
    "openai": "openai_gptoss",
    "deepseek_v3": "deepseek_r1",
    "gemma4": "gemma4",
    "kimi_k2": "kimi_k2",
    "minimax_m2": "minimax_m2",
    "mistral": "mistral",
}
"""The parsers of reasoning for some parsers of calls; qwen3 belongs to the others."""


def output_format(name: str) -> OutputFormat:
    found = make_format(name, REASONING.get(name, "qwen3"))
    assert found is not None
    return found


def backend(special: bool) -> Any:
    """A tokenizer in which the delimiters of all formats are special tokens, or text."""
    found = {text for name in NAMES for text in output_format(name).delimiters}
    return byte_level_backend(("<|eos|>", *sorted(found)) if special else ("<|eos|>",))


BACKENDS = {special: backend(special) for special in (True, False)}
TOKENIZERS = {
    special: LLTokenizer(found.to_str(), eos_token=found.token_to_id("<|eos|>")) for special, found in BACKENDS.items()
}


def special_tokens(special: bool) -> dict[str, int]:
    decoder = BACKENDS[special].get_added_tokens_decoder()
    return {token.content: number for number, token in decoder.items() if token.special}


def matcher(grammar: str, special: bool) -> LLMatcher:
    made = LLMatcher(TOKENIZERS[special], grammar)
    assert not made.get_error(), (made.get_error(), grammar)
    return made


def allows(grammar: str, text: str, special: bool) -> bool:
    """Whether an output may be this text, and end there."""
    made = matcher(grammar, special)
    ids = BACKENDS[special].encode(text, add_special_tokens=False).ids
    return made.try_consume_tokens(ids) == len(ids) and bool(made.is_accepting())


def grammar(name: str, special: bool, start: Start = "main", **options: Any) -> str:
    functions = options.pop("functions", FUNCTIONS)
    return tool_call_grammar(
        name,
        output_format(name),
        functions,
        special_tokens(special),
        start=start,
        **options,
    )


def parsed(name: str, text: str, start: Start = "main") -> ParsedMessage:
    parser = MessageParser(output_format(name), start, TOOLS)
    return joined([*parser.push(text), *parser.finish()])


CITY = '{"city": "K\u00f6ln </b> [x]", "unit": "C"}'
_DEEPSEEK = "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"
_CALL, _SEP, _END = (f"<\uff5ctool\u2581{part}\uff5c>" for part in ("call\u2581begin", "sep", "call\u2581end"))
_DSML = "\uff5cDSML\uff5c"
PAIRS = {
    "deepseek_v32": f'<{_DSML}parameter name="KEY" string="true">VALUE</{_DSML}parameter>\n',
    "glm45": "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n",
    "glm47": "<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    "minimax_m2": '<parameter name="KEY">VALUE</parameter>\n',
    "qwen3_coder": "<parameter=KEY>\nVALUE\n</parameter>\n",
    "qwen3_xml": "<parameter=KEY>\nVALUE\n</parameter>\n",
}
"""Parameters in the formats in which they have tags."""
KINDS = {"pythonic": "python", "gemma4": "gemma"} | dict.fromkeys(PAIRS, "pairs")
"""The formats of arguments that are no JSON."""


def arguments_of(name: str, values: dict[str, Any]) -> str:
    """Arguments as a model writes them."""
    kind = KINDS.get(name)
    if kind == "pairs":
        return "".join(
            PAIRS[name]
            .replace("KEY", key)
            .replace("VALUE", value if isinstance(value, str) else json.dumps(value))
            .replace('string="true"', f'string="{json.dumps(isinstance(value, str))}"')
            for key, value in values.items()
        )
    if kind == "python":
        return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
    if kind == "gemma":
        return gemma(values)[1:-1]
    return json.dumps(values, ensure_ascii=False)


def gemma(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{gemma(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma, value))}]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else json.dumps(value)


_CODER = ("<function=NAME>\n", "</function>", "\n</tool_call>\n<tool_call>\n", "<tool_call>\n", "\n</tool_call>")
# A model's text before a call, and behind it; between calls, and around all of them.
WRITTEN: dict[str, tuple[str, str, str, str, str]] = {
    "deepseek_v3": (f"{_CALL}function{_SEP}NAME\n```json\n", f"\n```{_END}", "\n", *_DEEPSEEK),
    "deepseek_v31": (f"{_CALL}NAME{_SEP}", _END, "", *_DEEPSEEK),
    "deepseek_v32": (
        f'<{_DSML}invoke name="NAME">\n',
        f"</{_DSML}invoke>",
        "\n",
        f"<{_DSML}function_calls>\n",
        f"\n</{_DSML}function_calls>",
    ),
    "gemma4": ("<|tool_call>call:NAME{", "}<tool_call|>", "", "", ""),
    "glm45": ("<tool_call>NAME\n", "</tool_call>", "\n", "", ""),
    "glm47": ("<tool_call>NAME", "</tool_call>", "", "", ""),
    "hermes": ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n", "", ""),
    "kimi_k2": (
        "<|tool_call_begin|>functions.NAME:12<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "llama3_json": ('{"name": "NAME", "parameters": ', "}", "; ", "", ""),
    "minimax_m2": (
        '<invoke name="NAME">\n',
        "</invoke>",
        "\n",
        "<minimax:tool_call>\n",
        "\n</minimax:tool_call>",
    ),
    "mistral": ("[TOOL_CALLS]NAME[ARGS]", "", "", "", ""),
    "nemotron_json": ('{"name": "NAME", "arguments": ', "}", ", ", "<TOOLCALL>[", "]</TOOLCALL>"),
    "openai": ("<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>", "", "", "", ""),
    "pythonic": ("NAME(", ")", ", ", "[", "]"),
    "qwen3_coder": _CODER,
    "qwen3_xml": _CODER,
}
_OF_LISTS = ('{"name": "NAME", "arguments": ', "}", ", ", "[TOOL_CALLS][", "]")
"""The texts of Mistral's models that have no token before arguments."""
BOTH = pytest.mark.parametrize("special", [True, False], ids=["special", "text"])
EACH = pytest.mark.parametrize("name", NAMES)


def call(name: str, special: bool, *functions: str, arguments: str | None = None) -> str:
    """A model's text that calls these functions, the first with arguments and the others without."""
    parts = _OF_LISTS if name == "mistral" and not special else WRITTEN[name]
    before, after, between, opening, closing = parts
    given, nothing = arguments_of(name, json.loads(CITY)) if arguments is None else arguments, arguments_of(name, {})
    calls = [
        before.replace("NAME", function) + (given if not number else nothing) + after
        for number, function in enumerate(functions)
    ]
    return opening + between.join(calls) + closing


def thought(name: str) -> str:
    if name == "openai":
        return "<|channel|>analysis<|message|>hm <b> hm<|end|><|start|>assistant"
    others = {"mistral": ("[THINK]", "[/THINK]"), "gemma4": ("<|channel>thought", "<channel|>")}
    opening, closing = others.get(name, ("<think>", "</think>"))
    return f"{opening}\nhm <b> hm\n{closing}\n\n"


@BOTH
@EACH
def test_calls_that_have_to_be_made(name: str, special: bool) -> None:
    required = grammar(name, special)
    text = call(name, special, "get_weather")
    for output in (text, thought(name) + text):
        assert allows(required, output, special)
        message = parsed(name, output)
        assert [each.name for each in message.calls] == ["get_weather"]
        assert json.loads(message.calls[0].arguments) == json.loads(CITY)
        assert (message.content, message.reasoning) == ("", "hm <b> hm" if output != text else "")
    assert not allows(required, "Hello", special)
    assert not allows(required, text[:-1], special) or name in ("mistral", "openai")
    assert not allows(required, call(name, special, "get_nothing"), special)
    assert not allows(required, "x" + text, special)


@BOTH
@EACH
def test_several_calls_where_they_may_be(name: str, special: bool) -> None:
    if name == "openai":
        pytest.skip("gpt-oss makes one call at a time")
    text = call(name, special, "get_weather", "get_time", "get_time")
    assert allows(grammar(name, special), text, special)
    assert not allows(grammar(name, special, parallel=False), text, special)
    assert allows(grammar(name, special, parallel=False), call(name, special, "get_weather"), special)
    assert [each.name for each in parsed(name, text).calls] == ["get_weather", "get_time", "get_time"]


@BOTH
@EACH
def test_arguments_follow_the_schema(name: str, special: bool) -> None:
    wrong = arguments_of(name, {"city": "a", "unit": "K"})
    text = call(name, special, "get_weather", arguments=wrong)
    assert not allows(grammar(name, special), text, special)
    # A call that need not be made follows the schema if it is strict.
    strict = [Function("get_weather", SCHEMA, True), FUNCTIONS[1]]
    free = grammar(name, special, required=False, functions=strict)
    assert not allows(free, text, special)
    assert allows(free, call(name, special, "get_weather"), special)


@BOTH
@EACH
def test_calls_that_may_be_made(name: str, special: bool) -> None:
    strict = [Function("get_weather", SCHEMA, True), FUNCTIONS[1]]
    free = grammar(name, special, required=False, functions=strict)
    if name == "openai":
        answer = "<|channel|>final<|message|>Hello <b>"
        assert allows(free, thought(name) + answer, special)
        return
    assert allows(free, "Hello <b>, a [1]", special)
    assert allows(free, thought(name) + "Hello", special)
    if name not in ("llama3_json", "pythonic"):  # their calls are all of an output
        text = f"Hello <b>.\n{call(name, special, 'get_weather', 'get_time')}"
        assert allows(free, text, special)
        assert [each.name for each in parsed(name, text).calls] == ["get_weather", "get_time"]


def test_a_special_token_may_be_a_part_of_delimiters() -> None:
    """As in DeepSeek V3.2. Then the other parts of delimiters may be in strings."""
    found = byte_level_backend(("<|eos|>", _DSML))
    ids, tokenizer = {_DSML: found.token_to_id(_DSML)}, LLTokenizer(found.to_str(), eos_token=0)
    value = "</b> </p"
    text = call(
        "deepseek_v32", False, "get_weather", arguments=arguments_of("deepseek_v32", {"city": value, "unit": "C"})
    )
    strict = [Function("get_weather", SCHEMA, True), FUNCTIONS[1]]
    for required, output in ((True, text), (False, text), (False, f"a <b {text}"), (False, "a <b")):
        made = tool_call_grammar("deepseek_v32", output_format("deepseek_v32"), strict, ids, required=required)
        matching, tokens = LLMatcher(tokenizer, made), found.encode(output, add_special_tokens=False).ids
        assert matching.try_consume_tokens(tokens) == len(tokens), (matching.get_error(), made)
        assert matching.is_accepting()
    assert json.loads(parsed("deepseek_v32", text).calls[0].arguments) == {"city": value, "unit": "C"}


@BOTH
def test_reasoning_that_the_prompt_has_begun_or_ended(special: bool) -> None:
    text = call("hermes", special, "get_weather")
    begun, ended = grammar("hermes", special, "reasoning"), grammar("hermes", special, "ended")
    implied = grammar("deepseek_v3", special, "implied")
    assert allows(begun, f"hm</think>\n\n{text}", special)
    assert not allows(begun, text, special)
    assert allows(ended, text, special)
    assert not allows(ended, thought("hermes") + text, special)
    text = call("deepseek_v3", special, "get_weather")
    for before in ("hm</think>", "<think>hm</think>"):
        assert allows(implied, before + text, special)


@BOTH
def test_an_answer_that_follows_a_grammar_comes_behind_the_reasoning(special: bool) -> None:
    for inner in (LLMatcher.grammar_from_json_schema('{"type": "object"}'), "start: %json {}", 'start: "{}"'):
        for name in ("hermes", "openai"):
            made = after_reasoning(inner, output_format(name), special_tokens(special), "main")
            final = "<|channel|>final<|message|>" if name == "openai" else ""
            assert allows(made, f"{thought(name)}{final}{{}}", special)
            assert allows(made, f"{final}{{}}", special)
            assert not allows(made, f"{thought(name)}{final}x", special)


PYDANTIC: dict[str, Any] = {
    "type": "object",
    "properties": {
        "unit": {"anyOf": [{"type": "string", "enum": ["C", "F"]}, {"type": "null"}], "default": None, "title": "Unit"},
        "mode": {"type": ["string", "null"], "enum": ["b", None], "nullable": True},
        "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "name": {"type": "string", "minLength": 1, "x-note": "n"},
        "level": {"enum": ["1", "2"]},
    },
    "minProperties": 1,
    "x-order": ["unit"],
}


@BOTH
@pytest.mark.parametrize("name", [*PAIRS, "gemma4"])
def test_schemas_of_functions_that_are_not_strict(name: str, special: bool) -> None:
    """As pydantic and zod write them. The model may ignore the formats of strings."""
    made = grammar(name, special, functions=[Function("get_weather", PYDANTIC)])
    tools = Tools({"get_weather": PYDANTIC})
    for unit, mode, fits in (("C", "b", True), (None, None, True), ("K", "b", False), ("C", "c", False)):
        values = {"unit": unit, "mode": mode, "day": "2026-01-01", "name": "x", "level": "1"}
        text = call(name, special, "get_weather", arguments=arguments_of(name, values))
        assert allows(made, text, special) == fits
        parser = MessageParser(output_format(name), "main", tools)
        (found,) = joined([*parser.push(text), *parser.finish()]).calls
        assert json.loads(found.arguments) == values
    with pytest.raises(UnsupportedSchemaError, match="minProperties in"):
        grammar(name, special, functions=[Function("get_weather", PYDANTIC, True)])


FOLLOWED = {
    "title": "Arguments",
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "a": {"anyOf": [{"type": "string", "title": "A"}, {"type": "null"}], "default": None, "description": "b"},
        "n": {"type": "integer", "minimum": 2},
        "t": {"type": "string", "const": "x"},
        "no": False,
        "any": True,
    },
    "required": ["n"],
    "additionalProperties": False,
}


@BOTH
@pytest.mark.parametrize("name", KINDS)
def test_keywords_that_are_followed_or_say_nothing(name: str, special: bool) -> None:
    made = grammar(name, special, functions=[Function("get_weather", FOLLOWED)])
    for values, fits in [
        ({"a": "x y", "n": 3, "t": "x", "any": [1]}, True),
        ({"a": None, "n": 3}, True),
        ({"n": 1}, False),
        ({"n": 3, "t": "y"}, False),
        ({"n": 3, "no": 1}, False),
        ({"a": "x"}, False),
    ]:
        text = call(name, special, "get_weather", arguments=arguments_of(name, values))
        assert allows(made, text, special) == fits, values


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "at": {"$ref": "#/$defs/point"}, "a b": {"type": "null"}},
            "required": ["city"],
        },
        "tags": {"type": "array", "items": {"enum": ["a", 1, [True, "b"]]}, "minItems": 1, "maxItems": 2},
        "tree": {"$ref": "#/$defs/tree"},
        "any": {},
    },
    "$defs": {
        "point": {"type": ["array", "null"], "items": {"type": "number"}},
        "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
}


@BOTH
def test_nested_values_of_gemma(special: bool) -> None:
    made = grammar("gemma4", special, functions=[Function("get_weather", NESTED, True)])
    for values, fits in [
        ({"place": {"city": "K\u00f6ln {,}", "at": [1, 2.5]}, "tags": ["a"], "tree": [[], [[]]]}, True),
        ({"place": {"city": "", "at": None}, "tags": [1, [True, "b"]], "any": {"x": [{"y": None}, "z"]}}, True),
        ({}, True),
        ({"place": {"at": []}}, False),
        ({"place": {"city": 1}}, False),
        ({"tags": []}, False),
        ({"tags": ["a", "a", "a"]}, False),
        ({"tags": ["c"]}, False),
        ({"tree": [1]}, False),
        ({"other": 1}, False),
    ]:
        text = call("gemma4", special, "get_weather", arguments=arguments_of("gemma4", values))
        assert allows(made, text, special) == fits, values
        assert json.loads(parsed("gemma4", text).calls[0].arguments) == values
    for schema in ({"type": "string", "pattern": "a"}, {"not": {}}, {"type": "array", "uniqueItems": True}):
        with pytest.raises(UnsupportedSchemaError, match="cannot be followed in the format of this model"):
            grammar("gemma4", special, functions=[Function("f", {"properties": {"a": schema}}, True)])


@BOTH
@EACH
def test_functions_beside_strict_ones_have_any_arguments(name: str, special: bool) -> None:
    if name == "openai":
        pytest.skip("gpt-oss makes one call at a time")
    functions = [Function("get_weather", SCHEMA), Function("get_time", None, True)]
    named = "x y" if name in PAIRS else "x"
    wrong = arguments_of(name, {"unit": "K", named: [1, {"a": "b"}]})
    made = grammar(name, special, required=False, functions=functions)
    text = call(name, special, "get_weather", arguments=wrong)
    assert allows(made, text, special)
    assert [each.name for each in parsed(name, text).calls] == ["get_weather"]


@BOTH
@EACH
def test_one_call_where_there_may_be_one(name: str, special: bool) -> None:
    if name == "openai":
        pytest.skip("gpt-oss makes one call at a time")
    strict = [Function("get_weather", SCHEMA, True), FUNCTIONS[1]]
    one = grammar(name, special, required=False, functions=strict, parallel=False)
    text = call(name, special, "get_weather")
    assert allows(one, text, special)
    assert allows(one, "Hello", special)
    assert not allows(one, call(name, special, "get_weather", "get_time"), special)
    if name not in ("llama3_json", "pythonic"):
        assert not allows(one, f"{text}\n{text}", special)
    if name not in ("llama3_json", "pythonic", "mistral"):
        assert allows(one, f"Hello.\n{text}\nBye.", special)


@BOTH
def test_an_answer_of_strict_functions_has_no_calls_that_the_grammar_does_not_know(special: bool) -> None:
    """The parser reads calls in blocks of code, and behind a delimiter, too."""
    strict = [Function("get_weather", SCHEMA, True)]
    python = grammar("pythonic", special, required=False, functions=strict)
    for fence in ("```tool_code\n", "```python\n", "```", "\n ``` [", "```tool_code\n["):
        text = f"{fence}get_weather(city=1)\n```"
        assert [each.name for each in parsed("pythonic", text).calls] == ["get_weather"]
        assert not allows(python, text, special)
    for text in ("```json\n{}\n```", "`x` is [1]", "```python\nx = 1\n```", "```", "Hello get_weather(city=1)"):
        assert parsed("pythonic", text).calls == []
        assert allows(python, text, special)
    llama = grammar("llama3_json", special, required=False, functions=strict)
    for before in ("", "Hello "):
        text = f'{before}<|python_tag|>{{"name": "get_weather", "parameters": {{}}}}'
        assert parsed("llama3_json", text).calls
        assert not allows(llama, text, special)
    assert allows(llama, "Hello <|python", special)


@BOTH
@EACH
def test_calls_may_have_delimiters_inside_of_strings(name: str, special: bool) -> None:
    """The parser reads every text that the grammar allows. Special tokens are in no string."""
    ends = {"</arg_value>", "</parameter>", f"</{_DSML}parameter>", '<|"|>'}  # of strings without quotes
    delimiters = [text for text in output_format(name).delimiters if name not in KINDS or text not in ends]
    value = f"a {' '.join(delimiters)} b"
    arguments = arguments_of(name, {"city": value, "unit": "C"})
    text = call(name, special, "get_weather", arguments=arguments)
    if not special_tokens(special).keys() & delimiters:
        assert allows(grammar(name, special), text, special)
    (found,) = parsed(name, text).calls
    assert json.loads(found.arguments) == {"city": value, "unit": "C"}
