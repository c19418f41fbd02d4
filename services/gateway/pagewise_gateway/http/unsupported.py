"""Fields of OpenAI's, Anthropic's and vLLM's APIs that Pagewise does not support.

Such a field is refused by name, unless its value asks for nothing: SDKs and frontends send such values by default.
"""

from typing import Any

from pagewise_gateway.http.errors import UnsupportedParameterError
from pagewise_gateway.http.schema import ChatMessage

# Field -> values that ask for nothing. Null always counts as one.
_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "conversation": (),
    "function_call": ("none",),
    "functions": ([],),
    "max_tool_calls": (),
    "include_reasoning": (True, False),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_cache_options": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default", "standard_only"),
    "store": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("low", "medium", "high"),
    "web_search_options": (),
    # Anthropic
    "compaction": (),
    "container": (),
    "diagnostics": (),
    "fallbacks": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
    # vLLM
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": (),
    "echo": (False,),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "logits_processors": (),
    "logprob_token_ids": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_detection": (),
    "request_id": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "session_id": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "thinking_token_budget": (),
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


def drop_unsupported(fields: dict[str, Any], known: frozenset[str], of_chat: bool) -> dict[str, Any]:
    """Return the fields without nulls and without unsupported fields whose values ask for nothing.

    ``known``: the fields that the request's struct has; they are left alone. ``of_chat``: whether it has messages of a
    chat.

    Raises:
        UnsupportedParameterError: a field asks for something Pagewise does not do.
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


_MESSAGE_KNOWN = frozenset(ChatMessage.__struct_fields__)


def _drop_in_message(message: Any, index: int) -> Any:
    if not isinstance(message, dict):
        return message
    place = f"messages[{index}]"
    if message.get("role") == "function":
        raise UnsupportedParameterError(f"{place}: messages of role function are not supported; tool is", place)
    kept = _drop(message, _MESSAGE_FIELDS, _MESSAGE_KNOWN, f"{place}.")
    if isinstance(parts := kept.get("content"), list):
        for i, part in enumerate(parts):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind != "text":
                raise UnsupportedParameterError(
                    f"{place}.content[{i}]: parts of type {kind} are not supported: only text is",
                    f"{place}.content[{i}]",
                )
    return kept
