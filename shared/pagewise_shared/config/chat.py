"""The options of gateways about conversations: chat templates, tool calls and reasoning."""

from typing import Annotated, Literal

from msgspec import Meta

from pagewise_shared.config.lora_options import GatewayLoraOptions

ToolCallParser = Literal[
    "deepseek_v3", "deepseek_v31", "glm45", "hermes", "llama3_json", "mistral", "openai", "pythonic"
]
ReasoningParser = Literal["deepseek_r1", "deepseek_v3", "glm45", "mistral", "openai_gptoss", "qwen3"]


class ChatConfig(GatewayLoraOptions, frozen=True, kw_only=True):
    """Options of ``pagewise-gateway`` about conversations, by the names that vLLM has for them.

    It has those of adapters as its base because a struct of msgspec can have one base with fields only.
    """

    enable_auto_tool_choice: Annotated[
        bool,
        Meta(
            description="let the model decide whether it calls a tool; needs --tool-call-parser",
            extra={"more": "[tools.md](tools.md) tells more of tools and reasoning."},
        ),
    ] = False
    tool_call_parser: Annotated[
        ToolCallParser | None, Meta(description="format in which the model writes tool calls")
    ] = None
    reasoning_parser: Annotated[
        ReasoningParser | None, Meta(description="format in which the model writes its reasoning")
    ] = None
    default_chat_template_kwargs: Annotated[
        str | None,
        Meta(
            description="variables of the chat template that requests need not give, as JSON",
            extra={"metavar": "JSON"},
        ),
    ] = None
