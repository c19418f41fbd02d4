"""Fields that other servers have and Pagewise does not: they are refused by name, unless their value has no effect."""

from typing import Any

from pagewise_gateway.http.errors import UnsupportedParameterError
from pagewise_gateway.http.schema import ChatMessage

_ALWAYS_REFUSED = (
    # OpenAI
    "audio conversation max_tool_calls moderation prediction reasoning_effort web_search_options "
    # Anthropic
    "compaction container diagnostics fallbacks inference_geo thread "
    # vLLM
    "chat_template ec_transfer_params guided_choice guided_decoding_backend guided_grammar guided_json guided_regex "
    "kv_transfer_params logits_processors logprob_token_ids media_io_kwargs mm_processor_kwargs prompt_embeds "
    "prompt_logprobs repetition_detection request_id thinking_token_budget"
)
# Field -> values that have no effect, and so are accepted. Null always is.
_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ALWAYS_REFUSED.split(), ()),
    # OpenAI
    "function_call": ("none",),
    "functions": ([],),
    "include_reasoning": (True, False),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("low", "medium", "high"),
    # Anthropic
    "mcp_servers": ([],),
    "speed": ("standard",),
    # vLLM
    "documents": ([],),
    "echo": (False,),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "truncation_side": ("left",),
    "vllm_xargs": ({},),
    "watermarking": (False,),
}
# The same for the fields of a message.
_MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}
_MESSAGE_KNOWN = frozenset(ChatMessage.__struct_fields__)


def drop_unsupported(fields: dict[str, Any], known: frozenset[str], of_chat: bool) -> dict[str, Any]:
    """Return the fields without nulls and without unsupported fields whose values have no effect.

    ``known``: the fields of the request's struct, which are kept. ``of_chat``: whether it has messages of a chat.

    Raises:
        UnsupportedParameterError: the value of an unsupported field would have an effect.
    """
    kept = _drop(fields, _FIELDS, known, "")
    if of_chat and isinstance(messages := kept.get("messages"), list):
        kept["messages"] = [_drop_in_message(message, i) for i, message in enumerate(messages)]
    return kept


def _drop(
    fields: dict[str, Any], table: dict[str, tuple[Any, ...]], known: frozenset[str], prefix: str
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None:
            # An unknown name is kept, so that it is refused even as null.
            if name not in table and name not in known:
                kept[name] = value
        elif name in known or name not in table:
            kept[name] = value
        elif not any(type(value) is type(harmless) and value == harmless for harmless in table[name]):
            raise UnsupportedParameterError(f"{prefix}{name} is not supported by Pagewise", f"{prefix}{name}")
    return kept


def _drop_in_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    location = f"messages[{index}]"
    if message.get("role") == "function":
        raise UnsupportedParameterError(f"{location}: messages of role function are not supported; tool is", location)
    kept = _drop(message, _MESSAGE_FIELDS, _MESSAGE_KNOWN, f"{location}.")
    if isinstance(parts := kept.get("content"), list):
        for i, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedParameterError(
                    f"{location}.content[{i}]: parts of type {kind} are not supported: only text is",
                    f"{location}.content[{i}]",
                )
    return kept
