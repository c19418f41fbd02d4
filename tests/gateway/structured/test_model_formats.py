"""The parsers that are found for models, by templates that write calls and reasoning as those of known models do."""

import pytest
from pagewise_gateway.structured.model_formats import find_reasoning_parser, find_tool_parser
from pagewise_gateway.text.output_parsing import REASONING_FORMATS, TOOL_FORMATS
from pagewise_gateway.text.template import ChatTemplate

from tests.gateway.text.harmony_template import HARMONY

NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TEXT = "{{ c.function.arguments }}"
DSML = "\uff5cDSML\uff5c"
BEGIN, SEPARATOR, END = (f"<\uff5ctool\u2581{part}\uff5c>" for part in ("call\u2581begin", "sep", "call\u2581end"))


def pairs(pair: str) -> str:
    return f"{{% for k, v in c.function.arguments.items() %}}{pair}{{% endfor %}}"


GEMMA = pairs("{{ k }}:" + '<|"|>{{ v }}<|"|>')
THINK = "{% if '</think>' in (m.content or '') %}{{ '<think>' }}{% endif %}"
WRITTEN = {
    "deepseek_v3": f"{BEGIN}function{SEPARATOR}{NAME}\n```json\n{TEXT}\n```{END}",
    "deepseek_v31": f"{BEGIN}{NAME}{SEPARATOR}{JSON}{END}",
    "deepseek_v32": f'<{DSML}function_calls>\n<{DSML}invoke name="{NAME}">\n'
    + pairs(f'<{DSML}parameter name="{{{{ k }}}}" string="true">{{{{ v }}}}</{DSML}parameter>\n')
    + f"</{DSML}invoke>\n</{DSML}function_calls>",
    "gemma4": f"<|tool_call>call:{NAME}{{{{ '{{' }}}}{GEMMA}{{{{ '}}' }}}}<tool_call|>",
    "glm45": f"<tool_call>{NAME}\n"
    + pairs("<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n")
    + "</tool_call>",
    "glm47": f"<tool_call>{NAME}" + pairs("<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>") + "</tool_call>",
    "hermes": f'<tool_call>\n{{"name": "{NAME}", "arguments": {JSON}}}\n</tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    + f"{JSON}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f'{{{{ "{{" }}}}"name": "{NAME}", "parameters": {JSON}}}',
    "minimax_m2": f'<minimax:tool_call>\n<invoke name="{NAME}">\n'
    + pairs('<parameter name="{{ k }}">{{ v }}</parameter>\n')
    + "</invoke>\n</minimax:tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "{NAME}", "arguments": {JSON}, "id": "{{{{ c.id }}}}"}}]',
    "nemotron_json": f'<TOOLCALL>[{{"name": "{NAME}", "arguments": {JSON}}}]</TOOLCALL>',
    "pythonic": f"[{NAME}({pairs('{{ k }}={{ v | tojson }}')})]",
    "qwen3_coder": f"<tool_call>\n<function={NAME}>\n"
    + pairs("<parameter={{ k }}>\n{{ v }}\n</parameter>\n")
    + "</function>\n</tool_call>",
}
"""A call as templates write it, by the name of its parser."""


def template(call: str, prompt: str = "<|assistant|>\n", more: str = "") -> ChatTemplate:
    text = (
        "{% for m in messages %}<|{{ m.role }}|>\n" + more + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        f"{call}{{% endfor %}}<|end|>{{% endfor %}}{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )
    return ChatTemplate(text, None, {})


def test_every_format_is_found() -> None:
    assert TOOL_FORMATS.keys() - WRITTEN.keys() == {"openai", "qwen3_xml"}, "the latter is the same as qwen3_coder"


@pytest.mark.parametrize("name", WRITTEN)
def test_the_parser_of_calls_is_that_of_the_template(name: str) -> None:
    found = find_tool_parser("auto", template(WRITTEN[name]), "")
    assert found == (name, "the chat template writes calls in it")
    opened = template(WRITTEN[name], "<|assistant|>\n<think>\n")
    assert find_tool_parser("auto", opened, "gpt_oss").name == name, "the template goes before the family"
    for given, expected in (("hermes", "hermes"), ("none", None)):
        assert find_tool_parser(given, opened, "").name == expected


def test_the_parsers_of_harmony() -> None:
    made = ChatTemplate(HARMONY, None, {})
    assert find_tool_parser("auto", made, "").name == "openai"
    assert find_reasoning_parser("auto", "openai", made).name == "openai_gptoss"


@pytest.mark.parametrize(
    ("call", "model_type", "name", "reason"),
    [
        ("{{ raise_exception('no') }}", "", None, "the chat template writes no calls"),
        ("{{ c | tojson }}", "llama", None, "the chat template writes no calls"),
        ("", "kimi_k2", "kimi_k2", "it is the format of the family kimi_k2"),
    ],
)
def test_a_format_that_the_template_does_not_show(call: str, model_type: str, name: str | None, reason: str) -> None:
    found = find_tool_parser("auto", template(call), model_type)
    assert found.name == name
    assert reason in found.reason
    without = ChatTemplate(None, None, {})
    assert find_tool_parser("auto", without, model_type) == (None, "the model has no chat template")
    assert find_reasoning_parser("auto", None, without).name is None


@pytest.mark.parametrize(
    ("texts", "tool_parser", "name"),
    [
        ("<think>x</think>", "hermes", "qwen3"),
        ("<think>x</think>", None, "qwen3"),
        ("<think>x</think>", "qwen3_coder", "qwen3"),
        ("<think>x</think>", "glm47", "glm47"),
        ("<think>x</think>", "kimi_k2", "kimi_k2"),
        ("<think>x</think>", "minimax_m2", "minimax_m2"),
        ("<think>x</think>", "deepseek_v32", "deepseek_v3"),
        ("<think>x</think>", "nemotron_json", "nemotron_v3"),
        ("</think>", "deepseek_v3", "deepseek_r1"),
        ("[THINK]x[/THINK]", "mistral", "mistral"),
        ("<|channel>thought\n<channel|>", "gemma4", "gemma4"),
        ("<think>", "hermes", None),
        ("", "gemma4", None),
    ],
)
def test_the_parser_of_reasoning_is_that_of_the_template(texts: str, tool_parser: str | None, name: str | None) -> None:
    made = template("", more=f"{{{{ {texts!r} }}}}")
    assert find_reasoning_parser("auto", tool_parser, made).name == name
    assert find_reasoning_parser("none", tool_parser, made).name is None
    assert name is None or name in REASONING_FORMATS
