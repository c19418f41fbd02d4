"""The form that templates expect of messages that call tools, like the templates of known models."""

from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway.text.template import ChatTemplate, ChatTemplateError, Dialect, NoChatTemplateError
from pagewise_gateway.text.tokenizer import Tokenizer
from pagewise_shared.errors import ModelError
from transformers import AutoTokenizer

from tests.gateway.text.tokenizer_builders import write_model

_CALL = "{{ call.function.name }}({{ %s }})"


def template(arguments: str, content: str = "{{ message.content }}", condition: str = "message.tool_calls") -> str:
    return (
        "{% for message in messages %}[{{ message.role }}]"
        "{% if " + condition + " %}{% for call in message.tool_calls %}" + _CALL % arguments + "{% endfor %}"
        "{% else %}" + content + "{% endif %}{% endfor %}"
    )


OBJECT = template("call.function.arguments | tojson")
ITEMS = template("call.function.arguments.items() | list | tojson")
EITHER = template("call.function.arguments if call.function.arguments is string else call.function.arguments | tojson")
TEXT = template("'```json' + call.function.arguments + '```'")
WITHOUT_FILTER = template("call.function.arguments")
NULL = template("call.function.arguments | tojson", condition="message.content is none and message.tool_calls")
STRING = template("call.function.arguments | tojson + message.content")
PRINTS = template("call.function.arguments | tojson", condition="message.tool_calls") + (
    "{% for message in messages %}{{ message.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OBJECT, Dialect(False, False, True)),
        (ITEMS, Dialect(False, False)),
        (EITHER, Dialect(False, False, True)),
        (TEXT, Dialect(True, False, True)),
        (WITHOUT_FILTER, Dialect(True, False, True)),
        (NULL, Dialect(False, False, True)),
        (STRING, Dialect(False, True, True)),
        (PRINTS, Dialect(False, True, True)),
        ("{{ raise_exception('no tools') }}", Dialect()),
    ],
)
def test_what_a_template_expects_is_found_out(text: str, expected: Dialect) -> None:
    made = ChatTemplate(text, None, {})
    assert made.choose(None).dialect == expected


def test_reasoning_has_the_name_that_the_template_has_for_it() -> None:
    messages: list[dict[str, Any]] = [{"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "b"}]
    for name in ("reasoning", "reasoning_content", "thinking"):
        made = ChatTemplate("{% for message in messages %}{{ message." + name + " }}{% endfor %}", None, {})
        assert made.render(messages) == "b"


def test_a_model_may_have_a_template_for_tools(tmp_path: Path) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | tojson }}"}]
    path = write_model(tmp_path / "model", tokenizer_config={"chat_template": templates})
    render = Tokenizer.load(path).render_chat
    messages = [{"role": "user", "content": "a"}]
    assert render(messages) == "plain"
    assert render(messages, tools=[{"b": 1, "a": "ä"}]) == '[{"b": 1, "a": "ä"}]'


VARIANTS: dict[str, dict[str, object]] = {
    "a file": {"chat_template.jinja": "file"},
    "a file before the configuration": {"chat_template.jinja": "file", "tokenizer_config": {"chat_template": "text"}},
    "a text": {"tokenizer_config": {"chat_template": "text"}},
    "a list": {"tokenizer_config": {"chat_template": [{"name": "default", "template": "list"}]}},
    "a list with tools": {
        "tokenizer_config": {
            "chat_template": [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "tools"}]
        }
    },
    "an object": {"tokenizer_config": {"chat_template": {"default": "object", "tool_use": "tools", "rag": "rag"}}},
    "more files": {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "tools"},
    "more files that are not for tools": {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"},
    "more files before the configuration": {
        "additional_chat_templates/default.jinja": "more",
        "additional_chat_templates/tool_use.jinja": "tools",
        "tokenizer_config": {"chat_template": "text"},
    },
    "no default": {"additional_chat_templates/tool_use.jinja": "tools"},
}


def write_templates(path: Path, files: dict[str, object]) -> Path:
    """A model's directory with these files; the names of templates stand for templates."""

    def made(name: object) -> object:
        if isinstance(name, list):
            return [{**entry, "template": made(entry["template"])} for entry in name]
        if isinstance(name, dict):
            return {key: made(value) for key, value in name.items()}
        return f"{name}: " + "{{ bos_token }}{{ messages[0].content }}{% for t in tools or [] %}{{ t }}{% endfor %}"

    settings: Any = files.get("tokenizer_config", {})
    if "chat_template" in settings:
        settings = {"chat_template": made(settings["chat_template"])}
    write_model(
        path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|user|>", **settings}
    )
    for name, content in files.items():
        if name.endswith(".jinja"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_text(str(made(content)))
    return path


@pytest.mark.parametrize("name", VARIANTS)
def test_templates_render_as_in_transformers_wherever_they_are(name: str, tmp_path: Path) -> None:
    path = write_templates(tmp_path / "model", VARIANTS[name])
    render, theirs = Tokenizer.load(path).render_chat, AutoTokenizer.from_pretrained(path)
    for tools in (None, [{"type": "function", "function": {"name": "a"}}]):
        try:
            expected = theirs.apply_chat_template([{"role": "user", "content": "hi"}], tools=tools, tokenize=False)
        except ValueError:
            with pytest.raises(NoChatTemplateError, match="no default"):
                render([{"role": "user", "content": "hi"}], tools=tools)
        else:
            assert render([{"role": "user", "content": "hi"}], tools=tools) == expected


@pytest.mark.parametrize("given", [5, [{"name": "default", "template": 5}], {"tool_use": []}])
@pytest.mark.parametrize("file", ["tokenizer_config", "chat_template"])
def test_templates_that_are_no_texts_are_refused(file: str, given: object, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", **{file: {"chat_template": given}})
    with pytest.raises(ModelError):
        Tokenizer.load(path)


def test_a_broken_template_is_called_that(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", tokenizer_config={"chat_template": "{{ messages }}\n{% if %}"})
    with pytest.raises(ChatTemplateError, match=r"template is broken: Expected an expression.* \(line 2\)"):
        Tokenizer.load(path).render_chat([{"role": "user", "content": "a"}])


def test_templates_of_older_processors(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", chat_template={"chat_template": {"default": "a", "tool_use": "b"}})
    render = Tokenizer.load(path).render_chat
    assert (render([{"role": "user", "content": "a"}]), render([{"role": "user", "content": "a"}], tools=[{}])) == (
        "a",
        "b",
    )


@pytest.mark.parametrize(
    ("default", "of_tools", "expected"),
    [
        ("{{ messages[0].content }}", None, False),
        ("{{ tools | tojson }}", None, True),
        ("{% if messages[0].role == 'system' %}{{ tools | tojson }}{% endif %}", None, True),
        ("{{ messages[0].content }}", "{% for tool in tools %}{{ tool.function.name }}{% endfor %}", True),
        ("{{ tools | tojson }}", "{{ messages[0].content }}", False),
        (None, None, True),
    ],
)
def test_whether_a_template_writes_tools(default: str | None, of_tools: str | None, expected: bool) -> None:
    assert ChatTemplate(default, of_tools, {}).writes_tools is expected


ROLES = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
FIRST = "{% if message.role == 'system' and not loop.first %}{{ raise_exception('at the beginning') }}{% endif %}"
FIRST_ONLY = "{% for message in messages %}" + FIRST + "[{{ message.role }}]{{ message.content }}{% endfor %}"
IGNORED = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    "[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ROLES, "[system]a[system]b[user]c[system]d[user]e[assistant]f[system]g[assistant]h[user]i[user]j"),
        (FIRST_ONLY, "[system]a\n\nb[user]c\n\nd\n\ne[assistant]f[user]g[assistant]h[user]i[user]j"),
        (IGNORED, "[system]a\n\nb[user]c\n\nd\n\ne[assistant]f[user]g[assistant]h[user]i[user]j"),
    ],
)
def test_templates_that_take_one_system_message_get_one(text: str, expected: str) -> None:
    roles = ["system", "developer", "user", "system", "user", "assistant", "developer", "assistant", "user", "user"]
    messages = [{"role": role, "content": "abcdefghij"[number]} for number, role in enumerate(roles)]
    made = ChatTemplate(text, None, {})
    assert made.render(messages, add_generation_prompt=False) == expected
    assert made.render(messages[:1]) == "[system]a"
    assert made.render([*messages[2:3], *messages[8:]]) == "[user]c[user]i[user]j"


def test_a_template_that_writes_its_one_system_message_twice() -> None:
    made = ChatTemplate("{{ messages[0].content }}" + IGNORED, None, {})
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "system", "user")]
    assert made.render(messages, add_generation_prompt=False) == "s[system]s[user]u\n\ns\n\nu"


ALTERNATING = (
    "{% set seen = namespace(users=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}"
    "{% if (message.role == 'user') != (seen.users % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "{% set seen.users = seen.users + 1 %}{% elif message.role == 'system' and not loop.first %}"
    "{{ raise_exception('at the beginning') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)


def test_a_late_system_message_behind_the_result_of_a_tool() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "b", "tool_call_id": "a"},
        {"role": "system", "content": "c"},
        {"role": "system", "content": "d"},
    ]
    made = ChatTemplate(ALTERNATING, None, {})
    assert made.render(messages) == "[user]a[assistant][tool]b\n\nc\n\nd"
    messages += [{"role": "assistant", "content": "e"}, {"role": "user", "content": "f"}]
    assert made.render(messages) == "[user]a[assistant][tool]b\n\nc\n\nd[assistant]e[user]f"
