"""The parameters of a model's reasoning, in the bodies of several APIs."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

ThinkingTokens = Annotated[
    int,
    Meta(
        ge=-1,
        le=2**31 - 1,
        description="The most tokens of the output's reasoning, which then ends; -1: any number. Needs "
        "--reasoning-parser.",
    ),
]
ReasoningEffort = Annotated[
    Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"],
    Meta(description="A variable of the chat template, as in chat_template_kwargs."),
]


class ReasoningOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """OpenRouter's names for ``thinking_token_budget``, ``reasoning_effort`` and the negation of ``include_reasoning``.

    ``enabled``: the value of the variables ``enable_thinking`` and ``thinking`` of the chat template.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    effort: ReasoningEffort | None = None
    exclude: bool | None = None
    enabled: bool | None = None

    def fields(self) -> dict[str, int | str | bool]:
        """Return the given fields by the names that chats have for them."""
        given = {
            "thinking_token_budget": self.max_tokens,
            "reasoning_effort": self.effort,
            "include_reasoning": None if self.exclude is None else not self.exclude,
        }
        return {name: value for name, value in given.items() if value is not None}


def thinking_variables(thinks: bool) -> dict[str, Any]:
    """Return the variables with which most chat templates turn thinking on and off."""
    return {"enable_thinking": thinks, "thinking": thinks}
