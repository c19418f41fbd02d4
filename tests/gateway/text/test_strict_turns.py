"""Conversations that the APIs allow pass strict templates, and others get them as they are."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_gateway.text.template import ChatTemplate, ChatTemplateError, renderer

from tests.gateway.text.strict_templates import (
    GEMMA,
    LENIENT,
    LLAMA_2,
    LLAMA_3,
    MISTRAL,
    NAMES,
    ONLY_IDS,
    TEMPLATES,
    USER,
)

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    return {"role": "system", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(*ids: str, text: str = "") -> Message:
    calls = [{"id": one, "type": "function", "function": {"name": "f", "arguments": {}}} for one in ids]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def result(call_id: str, text: str = "done") -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def render(template: str, *messages: Message) -> str:
    return ChatTemplate(template, None, {}).render(messages, add_generation_prompt=False)


def as_in_transformers(template: str, *messages: Message) -> str:
    rendered, _ = renderer()([list(messages)], chat_template=template)
    return str(rendered[0])


NINE = "abcdefgh1"


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (MISTRAL, [user("a"), user("b")], "[user]a\n\nb"),
        (MISTRAL, [user("a"), assistant("b"), assistant("c"), user("d")], "[user]a[assistant]b\n\nc[user]d"),
        (MISTRAL, [system("s"), user("a"), user("b"), user("c")], "[system]s[user]a\n\nb\n\nc"),
        (
            MISTRAL,
            [user("a"), call(NINE), result(NINE), user("b")],
            f"[user]a[assistant]f{NINE}[tool]done\n\nb",
        ),
        (
            MISTRAL,
            [user("a"), call(NINE, NINE), result(NINE, "x"), result(NINE, "y"), user("b"), user("c"), assistant("d")],
            f"[user]a[assistant]f{NINE}f{NINE}[tool]x[tool]y\n\nb\n\nc[assistant]d",
        ),
        (
            MISTRAL,
            [user("a"), assistant("b"), call(NINE), result(NINE), assistant("c"), user("d")],
            f"[user]a[assistant]bf{NINE}[tool]done[assistant]c[user]d",
        ),
        (MISTRAL, [assistant("a"), user("b")], "[user][assistant]a[user]b"),
        (GEMMA, [system("s"), user("a")], "[user]s\n\na"),
        (GEMMA, [system("s"), system("t"), user("a"), user("b"), assistant("c")], "[user]s\n\nt\n\na\n\nb[assistant]c"),
        (GEMMA, [system("s")], "[user]s"),
        (LLAMA_2, [system("s"), user("a"), user("b"), assistant("c")], "[system]s[user]a\n\nb[assistant]c"),
        (LENIENT, [user("a"), user("b"), assistant("c"), assistant("d")], "[user]a[user]b[assistant]c[assistant]d"),
        (
            LENIENT,
            [user("a"), call("toolu_1"), result("toolu_1"), user("b")],
            "[user]a[assistant]ftoolu_1[tool]done[user]b",
        ),
        (
            ONLY_IDS,
            [user("a"), user("b"), call(NINE), result(NINE), user("c")],
            f"[user]a[user]b[assistant]f{NINE}[tool]done[user]c",
        ),
        (
            LLAMA_3,
            [user("a"), call("1", "2", "3", text="b"), result("2", "y"), result("1", "x"), result("3", "z"), user("c")],
            "[user]a[assistant]bf1[tool]x[assistant]f2[tool]y[assistant]f3[tool]z[user]c",
        ),
        (
            LLAMA_3,  # ids that repeat, within a message and in the next one
            [user("a"), call("1", "1"), result("1", "x"), result("1", "y"), call("1"), result("1", "z"), result("2")],
            "[user]a[assistant]f1[tool]x[assistant]f1[tool]y[assistant]f1[tool]z[tool]done",
        ),
        (
            NAMES,
            [user("a"), call("1"), result("1"), call("2"), result("2")],
            "[user]a" + "[assistant]f{}[toolf]done" * 2,
        ),
        (USER, [system("s")], "[system]s[user]"),
        (USER, [system("s"), user("a"), assistant("b")], "[system]s[user]a[assistant]b"),
    ],
)
def test_what_strict_templates_get(template: str, messages: list[Message], expected: str) -> None:
    assert render(template, *messages) == expected.format(1, 2)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_takes_it_gets_as_it_is(name: str) -> None:
    template = TEMPLATES[name]
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    assert render(template, *messages) == as_in_transformers(template, *messages)
    if name != "gemma":
        messages = [system("s"), *messages]
        assert render(template, *messages) == as_in_transformers(template, *messages)
    if name not in ("gemma", "llama 2", "llama 3", "names"):
        messages = [user("a"), call(NINE, "123456789"), result(NINE), result("123456789"), assistant("b"), user("c")]
        assert render(template, *messages) == as_in_transformers(template, *messages)


def test_a_conversation_that_is_refused_in_any_form_says_why() -> None:
    with pytest.raises(ChatTemplateError, match="must alternate"):
        render(GEMMA, user("a"), call(NINE), result(NINE), result(NINE))


@pytest.mark.parametrize("call_id", ["toolu_01A" + "b" * 20, "call_abc", "x", "é" * 8, "with-a-dash", "f" * 256])
@pytest.mark.parametrize("template", [MISTRAL, ONLY_IDS])
def test_ids_become_nine_letters_and_digits_and_stay_equal(template: str, call_id: str) -> None:
    messages = [user("a"), call(call_id, "other"), result(call_id), result("other")]
    rendered = render(template.replace("[{{ m.role }}]", "[{{ m.role }}{{ m.tool_call_id }}]"), *messages)
    ids = rendered.partition("[assistant]f")[2][:9], rendered.partition("[tool")[2][:9]
    assert ids[0] == ids[1]
    assert ids[0].isalnum()
    assert ids[0].isascii()
    again = render(template.replace("[{{ m.role }}]", "[{{ m.role }}{{ m.tool_call_id }}]"), user("z"), *messages[1:])
    assert ids[0] in again


def test_different_ids_stay_different() -> None:
    ids = [f"call_{number}" for number in range(2000)]
    rendered = render(ONLY_IDS, user("a"), call(*ids))
    assert len({rendered[start : start + 9] for start in range(len("[user]a[assistant]f"), len(rendered), 10)}) == 2000


def test_messages_that_are_joined_keep_their_calls_and_reasoning() -> None:
    template = MISTRAL.replace("{{ m.content or '' }}", "{{ m.content or '' }}<{{ m.reasoning }}>")
    thinking = [{**assistant("b"), "reasoning": "r"}, {**call(NINE, text="c"), "reasoning": "s"}]
    rendered = render(template, user("a"), *thinking, result(NINE))
    assert rendered == f"[user]a<>[assistant]b\n\nc<r\ns>f{NINE}[tool]done<>"


TEXTS = st.sampled_from(["a", "b\n", " c", "ü", "<tag>"])


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Turns as the APIs allow them: calls are answered before the assistant continues."""
    made = [system(draw(TEXTS))] * draw(st.integers(0, 2))
    for _ in range(draw(st.integers(1, 6))):
        made += [user(text) for text in draw(st.lists(TEXTS, max_size=3))]
        made += [assistant(text) for text in draw(st.lists(TEXTS, max_size=2))]
        if ids := draw(st.lists(st.sampled_from([NINE, "toolu_01", "call_2"]), max_size=2, unique=True)):
            made += [call(*ids, text=draw(TEXTS)), *(result(one, draw(TEXTS)) for one in ids)]
        if draw(st.booleans()):
            made.append(system(draw(TEXTS)))
    return [*made, user("last")]


@pytest.mark.parametrize("name", ["mistral", "llama 3", "ids", "lenient"])
@given(messages=conversations())
@settings(max_examples=60, deadline=None)
def test_the_prompt_of_a_turn_is_a_prefix_of_the_next(name: str, messages: list[Message]) -> None:
    template = MODELS[name]
    prompt = ""
    for end in range(1, len(messages) + 1):
        if messages[end - 1]["role"] in ("user", "tool"):
            longer = template.render(messages[:end], add_generation_prompt=False)
            assert longer.startswith(prompt)
            prompt = longer


MODELS = {name: ChatTemplate(text, None, {}) for name, text in TEMPLATES.items()}
