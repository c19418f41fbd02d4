"""Renders conversations, and the tools that they may use, with a model's chat template."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple

from pagewise_gateway.text.errors import ChatTemplateError, NoChatTemplateError

log = logging.getLogger(__name__)

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


class Dialect(NamedTuple):
    """What a template expects of messages that call tools.

    Fields:
        arguments_as_text: arguments are a text, and not an object. Templates that do not say how they encode an object
            would write it as Python does.
        empty_content: a message without content has an empty one, and not null.
        broken_as_text: where arguments are an object, the template takes a text, too, for those that are no JSON.
    """

    arguments_as_text: bool = False
    empty_content: bool = False
    broken_as_text: bool = False


_DIALECTS = (Dialect(), Dialect(False, True), Dialect(True, False), Dialect(True, True))


class ChatTemplate:
    """A model's chat template. ``of_tools``: the one for conversations with tools, if the model has two."""

    def __init__(self, template: str | None, of_tools: str | None, special_tokens: dict[str, str]) -> None:
        self._template, self._of_tools, self._special_tokens = template, of_tools, special_tokens
        self._late_system: dict[str, bool] = {}

    @cached_property
    def writes_tools(self) -> bool:
        """Whether a conversation with tools renders with them, which is tried; true if there is no template."""
        if self._template is None and self._of_tools is None:
            return True
        parameters = {"type": "object", "properties": {}}
        function = {"name": "probe_tool", "description": "probe", "parameters": parameters}
        user = {"role": "user", "content": "probe"}
        for messages in ([user], [{"role": "system", "content": "probe"}, user]):
            with suppress(ChatTemplateError):
                if "probe_tool" in self.render(messages, tools=[{"type": "function", "function": function}]):
                    return True
        return False

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """Render a conversation.

        ``messages``: role and content, and what else the template knows; a content that is a list of text parts is
        joined by line breaks. A template that takes system messages at the beginning only gets one of them, and later
        ones as the user's. ``tools``: in OpenAI's shape, as the template gets them.

        Raises:
            NoChatTemplateError: the model has no chat template.
            ChatTemplateError: the template refuses the conversation.
        """
        template = self._of_tools if tools and self._of_tools is not None else self._template
        if template is None:
            reason = "no chat template" if self._of_tools is None else "no default chat template, only one for tools"
            raise NoChatTemplateError(f"the model has {reason}: use /v1/completions")
        flat = [_flatten(message, template) for message in messages]
        if any(message.get("role") == "system" for message in flat[1:]) and not self._takes_late_system(template):
            flat = _with_one_system(flat)
        try:
            rendered: list[str]
            rendered, _ = renderer()(
                [flat],
                tools=list(tools) if tools else None,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self._special_tokens, **(template_kwargs or {})},
            )
        except Exception as error:  # whatever a template written by others may raise
            raise ChatTemplateError(f"the model's chat template refuses the conversation: {error}") from error
        return rendered[0]

    @cached_property
    def dialect(self) -> Dialect:
        """How the template wants messages that call tools. It is tried with a conversation that has one."""
        for dialect in _DIALECTS:
            if self._renders_calls(dialect):
                takes_text = "probe_broken" in self._render_call(dialect, "probe_broken")
                if not takes_text:
                    log.info("the chat template takes arguments as objects only: those that are no JSON are left out")
                return dialect._replace(broken_as_text=takes_text)
        return Dialect()

    def _takes_late_system(self, template: str) -> bool:
        """Whether a template writes system messages that are not the first message. It is tried once."""
        if template not in self._late_system:
            roles = ("system", "user", "system", "user")
            messages = [{"role": role, "content": f"probe_{number}"} for number, role in enumerate(roles)]
            try:
                rendered, _ = renderer()([messages], chat_template=template, **self._special_tokens)
                self._late_system[template] = "probe_0" in rendered[0] and "probe_2" in rendered[0]
            except Exception:  # whatever a template written by others may raise
                self._late_system[template] = False
            if not self._late_system[template]:
                log.info("the chat template takes one system message: more are joined with it, or become the user's")
        return self._late_system[template]

    def _renders_calls(self, dialect: Dialect) -> bool:
        """Whether the template writes a call, and its arguments as JSON."""
        text = self._render_call(dialect, '{"probe_key": 1}' if dialect.arguments_as_text else {"probe_key": 1})
        as_python, as_string, null = "'probe_key'" in text, '\\"probe_key' in text, "None" in text
        return "probe_name" in text and "probe_key" in text and not (as_python or as_string or null)

    def _render_call(self, dialect: Dialect, arguments: dict[str, Any] | str) -> str:
        """Return a conversation with a call; an empty text: the template refuses it."""
        function = {"name": "probe_name", "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        content = "" if dialect.empty_content else None
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "probe", "tool_call_id": "abcdefghi", "name": "probe_name"},
        ]
        parameters = {"type": "object", "properties": {}}
        described = {"name": "probe", "description": "", "parameters": parameters}
        try:
            return self.render(messages, tools=[{"type": "function", "function": described}])
        except ChatTemplateError:
            return ""


def renderer() -> Callable[..., Any]:
    """Return the function of transformers that renders. Importing it takes half a second."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template


def _flatten(message: dict[str, Any], template: str) -> dict[str, Any]:
    flat = dict(message)
    if isinstance(content := flat.get("content"), list):
        flat["content"] = "\n".join(part["text"] for part in content)
    if flat.get("role") == "developer" and "developer" not in template:
        flat["role"] = "system"  # OpenAI's newer name for it, which most templates do not know
    if "reasoning_content" in flat and ".thinking" in template:  # the name that gpt-oss has for it
        flat["thinking"] = flat["reasoning_content"]
    return flat


def _with_one_system(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning. Later ones become the user's, and join the user's beside them, because
    there are templates in which the user and the assistant have to alternate. Behind the result of a tool they join
    that, because in such templates it is the assistant's turn there."""
    made: list[dict[str, Any]] = []
    begun = joins = False  # whether there was another message than the system's; whether the last one was the system's
    for message in messages:
        is_system = message["role"] == "system"
        begun = begun or not is_system
        role = "user" if is_system and begun else message["role"]
        if is_system and made and made[-1]["role"] == "tool":
            role, is_system = "tool", False
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        elif made and made[-1]["role"] == role and (is_system or (joins and role == "user")):
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append({**message, "role": role})
        joins = is_system
    return made
