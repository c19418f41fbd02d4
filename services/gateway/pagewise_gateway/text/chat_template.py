"""Renders conversations, and the tools that they may use, with a model's chat templates."""

from collections.abc import Sequence
from typing import Any

from pagewise_gateway.text.errors import NoChatTemplateError
from pagewise_gateway.text.template import Template

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


class ChatTemplate:
    """A model's chat template. ``of_tools``: the one for conversations with tools, if the model has two."""

    def __init__(self, template: str | None, of_tools: str | None, special_tokens: dict[str, str]) -> None:
        self._default = None if template is None else Template(template, special_tokens)
        self._of_tools = self._default if of_tools is None else Template(of_tools, special_tokens)

    @property
    def writes_tools(self) -> bool:
        """Whether a conversation with tools renders with them, which is tried; true if there is no template."""
        return self._of_tools is None or self._of_tools.writes_tools

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
        joined by line breaks. A strict template gets the conversation in the form that it takes (``strict_turns``).
        ``tools``: in OpenAI's shape, as the template gets them.

        Raises:
            NoChatTemplateError: the model has no chat template.
            ChatTemplateError: the template refuses the conversation.
        """
        return self.choose(tools).render(
            [_flat(message) for message in messages],
            tools=tools,
            variables=template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )


def _flat(message: dict[str, Any]) -> dict[str, Any]:
    if isinstance(content := message.get("content"), list):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    return message
