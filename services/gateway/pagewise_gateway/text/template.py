"""The chat template of a model. Rendering small conversations shows its dialect, and which messages it refuses."""

import json
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, NamedTuple

from jinja2 import TemplateSyntaxError
from pagewise_shared.errors import PagewiseError

from pagewise_gateway.text import strict_turns

log = logging.getLogger(__name__)

Message = dict[str, Any]
_USER: Message = {"role": "user", "content": "probe_user"}
_ASSISTANT: Message = {"role": "assistant", "content": "probe_assistant"}
_SYSTEM: Message = {"role": "system", "content": "probe_system"}
_FUNCTION = {"name": "probe_tool", "description": "probe", "parameters": {"type": "object", "properties": {}}}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_UNDESCRIBED = [{"type": "function", "function": {**_FUNCTION, "description": ""}}]
PROBE_CALL = "probe_name", '{"probe_key": "probe_value"}'
"""The call of ``written_calls``: a name and arguments."""
_SHORT_ID, _LONG_ID = "abcdefghi", "call_0123456789abcdef"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that templates name."""
RESERVED_NAMES = {
    "conversations",
    "messages",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
    *SPECIAL_TOKENS,
}
"""Variables that requests may not set."""


class ChatTemplateError(PagewiseError):
    """The model's chat template cannot render a conversation; the text gives the reason."""


class NoChatTemplateError(ChatTemplateError):
    """The model has no chat template."""


class Dialect(NamedTuple):
    """The form in which a template expects messages that call tools.

    Fields:
        arguments_as_text: arguments are a text, and not an object, which some templates would write as Python does.
        empty_content: a message without content has an empty text, and not null.
        broken_as_text: where arguments are an object, the template takes a text for arguments that are no JSON.
    """

    arguments_as_text: bool = False
    empty_content: bool = False
    broken_as_text: bool = False


_Shape = Callable[[Sequence[Message]], list[Message]]
_LOGGED: dict[_Shape, str] = {
    strict_turns.with_one_system: "one system message: more are joined with it, or become the user's",
    strict_turns.without_system: "no system message: it becomes the user's",
    strict_turns.with_text_in_results: "no text of the user behind a tool's result: the text joins the result",
    strict_turns.with_alternating_roles: "alternating roles only: turns of one role are joined",
    strict_turns.with_user: "no conversation without the user: it gets an empty message of the user",
    strict_turns.with_single_calls: "one call in a message only: each of several gets a message of its own",
    strict_turns.with_text_in_reasoning: "no text beside reasoning in a message with calls: it joins the reasoning",
    strict_turns.with_values_of_results: "no text of a result as it is: results that are JSON are given as values",
    strict_turns.with_names: "no result of a tool without its name: it gets that of the call",
    strict_turns.with_short_ids: "ids of calls of nine characters only: others are shortened",
}
"""The log line for a template that needs one of these functions."""
_DIALECTS = (Dialect(), Dialect(False, True), Dialect(True, False), Dialect(True, True))


class Template:
    """A template. ``source``: its text."""

    def __init__(self, text: str, special_tokens: dict[str, str]) -> None:
        """``special_tokens``: the texts of special tokens by their names in templates."""
        self.source, self._special_tokens = text, special_tokens

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """Render a conversation, which is adapted first if the template is strict (``strict_turns``).

        ``messages``: role and content, and other fields that the template knows; a content that is a list of text parts
        is joined by line breaks. ``tools``: in OpenAI's shape, as the template gets them.

        Raises:
            ChatTemplateError: the template refuses the conversation.
        """
        given = [self._named(message) for message in messages]
        rest = {
            "tools": [self._described(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            **self._special_tokens,
            **(template_kwargs or {}),
        }
        shaped = self._shaped(given)
        try:
            return self._rendered(shaped, **rest)
        except Exception as error:  # a template may raise any error
            if shaped != given:
                try:
                    return self._rendered(given, **rest)
                except Exception:
                    log.debug("the chat template refuses the conversation as it was given, too", exc_info=True)
            if isinstance(error, TemplateSyntaxError):
                raise ChatTemplateError(
                    f"the model's chat template is broken: {error} (line {error.lineno})"
                ) from error
            raise ChatTemplateError(f"the model's chat template refuses the conversation: {error}") from error

    @cached_property
    def dialect(self) -> Dialect:
        """The form of messages that call tools, found by rendering such a conversation."""
        for dialect in _DIALECTS:
            if self._renders_calls(dialect):
                takes_text = "probe_broken" in (self._tried(_called(dialect, "probe_broken")) or "")
                if not takes_text:
                    log.info("the chat template takes arguments as objects only: those that are no JSON are left out")
                return dialect._replace(broken_as_text=takes_text)
        return Dialect()

    @cached_property
    def writes_tools(self) -> bool:
        """Whether a conversation with tools renders with them."""
        return any("probe_tool" in (self._tried(messages) or "") for messages in ([_USER], [_SYSTEM, _USER]))

    @cached_property
    def around_answer(self) -> tuple[str, str]:
        """The texts between the reasoning and the answer of the assistant at the end of a conversation, and behind the
        answer; empty if the template writes none."""
        reasoning = dict.fromkeys(("reasoning", "reasoning_content", "thinking"), "probe_thought")
        answer = {"role": "assistant", "content": "probe_answer", **reasoning}
        before, _, behind = (self._tried([_USER, answer], tools=False) or "").partition("probe_answer")
        return before.partition("probe_thought")[2], behind

    @cached_property
    def _knows_developer(self) -> bool:
        """Whether the template names messages of the developer, and writes them in another way than the system's."""
        if "developer" not in self.source:
            return False
        return self._tried([{**_SYSTEM, "role": "developer"}, _USER], tools=False) != self._tried(
            [_SYSTEM, _USER], tools=False
        )

    @cached_property
    def _needs_descriptions(self) -> bool:
        """Whether the template refuses a tool that has no description."""
        function = {name: value for name, value in _FUNCTION.items() if name != "description"}
        tools = [{"type": "function", "function": function}]
        return self._tried([_USER], tools=tools) is None and self._tried([_USER], tools=_UNDESCRIBED) is not None

    @cached_property
    def _shapes(self) -> list[_Shape]:
        """The adaptations that the template needs: it refuses a conversation without one, and takes a similar one."""
        late = self._tried([_SYSTEM, _USER, {**_SYSTEM, "content": "probe_late"}, _USER], tools=False) or ""
        call, turns = _called(self.dialect, {}), [_USER, _ASSISTANT, _USER]
        doubled = [_USER, _USER], [_USER, _ASSISTANT, _ASSISTANT, _USER]
        other = _called(self.dialect, {}, name="probe_other")[1]["tool_calls"]
        calls = [call[0], {**call[1], "tool_calls": [*call[1]["tool_calls"], *other]}, *call[2:] * 2]
        all_written = self._tried(calls) or ""
        thoughtful = [call[0], {**call[1], "reasoning": "probe", "reasoning_content": "probe", "thinking": "probe"}]
        quoted = self._tried([*call[:2], {**call[2], "content": '"'}]) or ""
        unnamed = [*call[:2], {key: call[2][key] for key in call[2] if key != "name"}]
        needed: dict[_Shape, bool] = {
            strict_turns.with_one_system: "probe_system" not in late or "probe_late" not in late,
            strict_turns.without_system: self._refuses([_SYSTEM, _USER], but=[_USER]),
            strict_turns.with_text_in_results: self._refuses(
                [*call, _USER], but=[*call, _ASSISTANT, _USER], tools=True
            ),
            strict_turns.with_alternating_roles: any(self._refuses(one, but=turns) for one in doubled),
            strict_turns.with_user: self._refuses([_SYSTEM], but=[_SYSTEM, _USER]),
            strict_turns.with_single_calls: "probe_name" in (self._tried(call) or "")
            and "probe_other" not in all_written,
            strict_turns.with_text_in_reasoning: self._refuses(
                [thoughtful[0], {**thoughtful[1], "content": "probe"}], but=thoughtful, tools=True
            ),
            # gpt-oss has learnt results as they are (OpenAI's Harmony); others get text, which their template formats.
            strict_turns.with_values_of_results: "<|channel|>" in self.source and '"\\""' in quoted,
            strict_turns.with_names: self._refuses(unnamed, but=call, tools=True),
            strict_turns.with_short_ids: self._refuses(_called(self.dialect, {}, _LONG_ID), but=call, tools=True),
        }
        shapes = [shape for shape, is_needed in needed.items() if is_needed]
        for shape in shapes:
            log.info("the chat template takes %s", _LOGGED[shape])
        return shapes

    def _shaped(self, messages: list[Message]) -> list[Message]:
        if len(messages) > 1 or any(message["role"] != "user" for message in messages):  # every template takes one user
            for shape in self._shapes:
                messages = shape(messages)
        return messages

    def _named(self, message: Message) -> Message:
        named = dict(message)
        if isinstance(content := message.get("content"), list):
            named["content"] = "\n".join(part["text"] for part in content)
        if named.get("role") == "developer" and not self._knows_developer:
            named["role"] = "system"  # "developer" is OpenAI's newer name for it
        if "reasoning_content" in named and ".thinking" in self.source:  # gpt-oss calls it so
            named["thinking"] = named["reasoning_content"]
        return named

    def _described(self, tool: dict[str, Any]) -> dict[str, Any]:
        function = tool.get("function")
        if not function or "description" in function or not self._needs_descriptions:
            return tool
        return {**tool, "function": {**function, "description": ""}}

    @cached_property
    def written_calls(self) -> tuple[str, ...]:
        """Texts that the template writes for an assistant's call of ``PROBE_CALL``, up to the end of the conversation;
        empty: the template refuses such conversations. One of two texts begins behind the header of the message."""
        arguments: Any = PROBE_CALL[1] if self.dialect.arguments_as_text else json.loads(PROBE_CALL[1])
        found: list[str] = []
        for call_id in (_SHORT_ID, f"functions.{PROBE_CALL[0]}:0"):  # Kimi's name is a part of the id
            messages = _called(self.dialect, arguments, call_id, PROBE_CALL[0])
            if (whole := self._tried(messages)) is not None:
                for with_header in (False, True):
                    prompt = self._tried(messages[:1], add_generation_prompt=with_header) or ""
                    same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
                    found.append(whole[sum(1 for _ in same) :])
        return tuple(dict.fromkeys(found))

    def _renders_calls(self, dialect: Dialect) -> bool:
        """Whether the template writes a call, and its arguments as JSON."""
        arguments: Any = '{"probe_key": 1}' if dialect.arguments_as_text else {"probe_key": 1}
        text = self._tried(_called(dialect, arguments)) or ""
        as_python, as_string, null = "'probe_key'" in text, '\\"probe_key' in text, "None" in text
        return "probe_name" in text and "probe_key" in text and not (as_python or as_string or null)

    def _refuses(self, messages: Sequence[Message], *, but: Sequence[Message], tools: bool = False) -> bool:
        """Whether the template refuses a conversation, but takes another one."""
        return self._tried(but, tools=tools) is not None and self._tried(messages, tools=tools) is None

    def _tried(
        self, messages: Sequence[Message], *, tools: bool | list[dict[str, Any]] = True, **variables: Any
    ) -> str | None:
        """Render a conversation without changes, with ``tools``; None: the template refuses it."""
        given = (_TOOLS if tools else None) if isinstance(tools, bool) else tools
        try:
            return self._rendered(messages, tools=given, **self._special_tokens, **variables)
        except Exception:  # a template may raise any error
            return None

    def _rendered(self, messages: Sequence[Message], **variables: Any) -> str:
        rendered: list[str]
        rendered, _ = renderer()([list(messages)], chat_template=self.source, **variables)
        return rendered[0]


def renderer() -> Callable[..., Any]:
    """Return the function of transformers that renders. The first call imports it, which takes long."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _called(
    dialect: Dialect, arguments: dict[str, Any] | str, call_id: str = _SHORT_ID, name: str = PROBE_CALL[0]
) -> list[Message]:
    if arguments == {} and dialect.arguments_as_text:
        arguments = "{}"
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    content = "" if dialect.empty_content else None
    return [
        _USER,
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": "probe_result", "tool_call_id": call_id, "name": name},
    ]


class ChatTemplate:
    """A model's chat template. ``of_tools``: the one for conversations with tools, if the model has two."""

    def __init__(self, template: str | None, of_tools: str | None, special_tokens: dict[str, str]) -> None:
        self._default = None if template is None else Template(template, special_tokens)
        self._of_tools = self._default if of_tools is None else Template(of_tools, special_tokens)

    @property
    def writes_tools(self) -> bool:
        """Whether a conversation with tools renders with them; true if there is no template."""
        return self._of_tools is None or self._of_tools.writes_tools

    @property
    def around_answer(self) -> tuple[str, str]:
        """The texts that the default template writes between reasoning and answer, and behind the answer; empty if it
        writes none."""
        return ("", "") if self._default is None else self._default.around_answer

    @property
    def texts(self) -> tuple[str, ...]:
        """The sources of the templates."""
        return tuple(dict.fromkeys(one.source for one in (self._default, self._of_tools) if one is not None))

    @property
    def written_calls(self) -> tuple[str, ...]:
        """See ``Template.written_calls``; none if there is no template."""
        return () if self._of_tools is None else self._of_tools.written_calls

    def choose(self, tools: Sequence[Any] | None) -> Template:
        """Return the template for a conversation with these tools.

        Raises:
            NoChatTemplateError: the model has none.
        """
        if (template := self._of_tools if tools else self._default) is None:
            reason = "no chat template" if self._of_tools is None else "no default chat template, only one for tools"
            raise NoChatTemplateError(f"the model has {reason}: use /v1/completions")
        return template

    def render(
        self, messages: Sequence[Message], *, tools: Sequence[dict[str, Any]] | None = None, **options: Any
    ) -> str:
        """Render a conversation with the template for these tools. ``options``, errors: as of ``Template.render``.

        Raises:
            NoChatTemplateError: the model has no chat template.
        """
        return self.choose(tools).render(messages, tools=tools, **options)
