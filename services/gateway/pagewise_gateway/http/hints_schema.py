"""Fields of requests that say which session a prompt belongs to, and when its KV is used again.

They are Pagewise's own, OpenAI's, and those of NVIDIA Dynamo and TensorRT-LLM that have the same meaning here. Other
fields of these two are accepted, and have no effect.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

LONGEST_SESSION = 1024
"""The maximum number of characters of a session's name, and of a ``prompt_cache_key``, which may be one."""
LONGEST_SECONDS = 604_800
"""A week, in seconds: the longest time that hints and advice may name."""
_DURATION = "[1-9][0-9]{0,4}[smh]"

SessionId = Annotated[
    str,
    Meta(
        min_length=1,
        max_length=LONGEST_SESSION,
        description="The session that the request is a turn of. The end of a turn is the likely beginning of the next.",
    ),
]
CacheKey = Annotated[
    str,
    Meta(
        max_length=LONGEST_SESSION,
        description="Prompts of one key are expected to share a beginning, at whose end states and windows are kept. "
        "It is the session of the request if nothing else names one.",
    ),
]
CacheRetention = Annotated[
    str,
    Meta(
        pattern=rf"^(in_memory|in-memory|{_DURATION})$(?!\n)",
        description="How long the cached KV of this prompt and its answer should be kept: 24h, 30m, 90s, or "
        "in_memory, which leaves it to the server. A hint, not a promise.",
    ),
]
Duration = Annotated[str, Meta(pattern=rf"^{_DURATION}$(?!\n)", description="A time such as 1h, 5m or 90s.")]
Seconds = Annotated[float, Meta(ge=0, le=LONGEST_SECONDS)]
CacheSalt = Annotated[
    str, Meta(min_length=1, max_length=256, description="Requests of a key share cached KV only with the same salt.")
]


def seconds_of(duration: str) -> int:
    """Return the seconds of a ``Duration``."""
    return int(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


class CacheHints(Struct, forbid_unknown_fields=True, frozen=True):
    """What the client knows about the next use of the prompt and its answer.

    ``returns_in``: the seconds after which the next turn is expected. ``ends``: there is no next turn. ``parent``: the
    session whose prompt this one begins with, such as that of the agent which has started this one.
    """

    returns_in: Seconds | None = None
    ends: bool | None = None
    parent: SessionId | None = None


class PromptCacheBreakpoint(Struct, forbid_unknown_fields=True, frozen=True):
    """A cache breakpoint: the prefix that ends here is expected to be used again."""

    mode: Literal["explicit"] = "explicit"
    ttl: CacheRetention | None = None


class PromptCacheOptions(Struct, forbid_unknown_fields=True, frozen=True):
    """``ttl``: as ``prompt_cache_retention``. ``mode``: without effect, because all prefixes are cached."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: CacheRetention | None = None
    prewarm: Literal[False] | None = None


class AgentHints(Struct, frozen=True):
    """Dynamo's hints. ``priority``: higher runs earlier, as far as the API key may. The others have no effect."""

    priority: Annotated[int, Meta(ge=-(2**31) + 1, le=2**31 - 1)] | None = None


class SessionControl(Struct, frozen=True):
    """Dynamo's session of the request. The action ``close`` ends it with the answer; ``timeout`` has no effect."""

    session_id: SessionId
    action: Literal["open", "close"] | None = None


class NvCacheControl(Struct, frozen=True):
    """Dynamo's request to keep the prefix. ``ttl``: as ``prompt_cache_retention``."""

    type: Literal["ephemeral"] = "ephemeral"
    ttl: CacheRetention | None = None


class NvExt(Struct, frozen=True):
    """Extensions of NVIDIA Dynamo. ``cache_salt``: as that of the request, which wins. ``greed_sampling``,
    ``use_raw_prompt`` and ``token_data`` would change the answer, and are not supported. Those that are not listed have
    no effect."""

    cache_salt: CacheSalt | None = None
    greed_sampling: Literal[False] | None = None
    use_raw_prompt: Literal[False] | None = None
    token_data: None = None
    agent_hints: AgentHints | None = None
    session_control: SessionControl | None = None
    cache_control: NvCacheControl | None = None


class TokenRangeRetention(Struct, frozen=True):
    """The priority of a range of the prompt's tokens, from 0 to 100, and the milliseconds for which it holds."""

    priority: Annotated[int, Meta(ge=0, le=100)]
    token_start: Annotated[int, Meta(ge=0)] = 0
    token_end: Annotated[int, Meta(ge=0)] | None = None
    duration_ms: Annotated[float, Meta(ge=0, le=1000 * LONGEST_SECONDS)] | None = None


class KvCacheRetentionConfig(Struct, frozen=True):
    """TensorRT-LLM's retention. The prompt and its answer should be kept for the longest time of a range of tokens, or
    of the answer, whose priority is above the usual 35. Lower priorities, and those without a time, have no effect."""

    token_range_retention_configs: Annotated[list[TokenRangeRetention], Meta(max_length=64)] = []
    decode_retention_priority: Annotated[int, Meta(ge=0, le=100)] = 35
    decode_duration_ms: Annotated[float, Meta(ge=0, le=1000 * LONGEST_SECONDS)] | None = None


class ConversationParams(Struct, frozen=True):
    """TensorRT-LLM's name of a conversation, which is a session."""

    conversation_id: SessionId


class ReuseFields(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions, chats and responses share."""

    session_id: SessionId | None = None
    cache_hints: CacheHints | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: CacheRetention | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    nvext: NvExt | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    conversation_params: ConversationParams | None = None
