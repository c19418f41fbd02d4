"""Finds the session of a request, and its hints on when its prompt is used again, in its headers and its body."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from aiohttp import web
from pagewise_shared.protocol import ReuseHints

from pagewise_gateway.http.errors import InvalidRequestError
from pagewise_gateway.http.hints_schema import LONGEST_SESSION, KvCacheRetentionConfig, ReuseFields, seconds_of
from pagewise_gateway.http.schema import ChatMessage, GenerationFields

MOST_BREAKPOINTS = 4
"""The maximum number of cache breakpoints of a request, as in OpenAI's and Anthropic's APIs."""

_AGENT, _CLAUDE_CODE = "X-Claude-Code-Agent-Id", "X-Claude-Code-Session-Id"
_HEADERS = ("X-Session-Id", "X-Dynamo-Session-Id", _AGENT, _CLAUDE_CODE, "Thread-Id")
"""Headers that name the session of a request: ours and OpenCode's, Dynamo's, Claude Code's for an agent that another
agent has started, Claude Code's, and Codex'."""
_OTHERS = ("Session-Id", "session_id", "conversation_id", "X-Session-Affinity", "X-Multi-Turn-Session-Id")
"""Headers that count if there is no ``prompt_cache_key``: those of earlier versions of Codex, and of clients of
Fireworks AI. Later versions of Codex send one ``Session-Id`` and key for all agents of a session, and a ``Thread-Id``
for each."""
_PARENTS = (
    "X-Parent-Session-Id",
    "X-Dynamo-Parent-Session-Id",
    "X-Claude-Code-Parent-Agent-Id",
    "X-Codex-Parent-Thread-Id",
)
_FINAL = "X-Dynamo-Session-Final"
_NAME = re.compile(rf"[\x20-\x7e]{{1,{LONGEST_SESSION}}}")
_USER_ID = re.compile(r"_session_([0-9A-Za-z-]+)$")
_USUAL_PRIORITY = 35
"""The priority of KV in TensorRT-LLM to which no other is given."""


class _UserId(msgspec.Struct):
    """The ``user_id`` in the metadata of Claude Code, from version 2.1.78 on."""

    session_id: str = ""


def reuse_hints(request: web.Request, body: ReuseFields, tool_call_ids: tuple[int, ...]) -> ReuseHints:
    """Return the hints of a request for the scheduler. ``tool_call_ids``: of the model.

    Raises:
        InvalidRequestError: a header cannot be the name of a session.
    """
    own, nv = body.cache_hints, body.nvext
    control = nv.session_control if nv is not None else None
    parent = own.parent if own is not None and own.parent else named_in(request, _PARENTS)
    if not parent and request.headers.get(_AGENT):
        parent = named_in(request, (_CLAUDE_CODE,))
    final = request.headers.get(_FINAL, "").strip().lower() == "true"
    return ReuseHints(
        retention=_retention(body),
        tool_call_ids=tool_call_ids,
        cache_key=body.prompt_cache_key or "",
        session=session_of(request, body),
        parent=parent,
        returns_in=-1.0 if own is None or own.returns_in is None else own.returns_in,
        ends=bool(own is not None and own.ends) or final or (control is not None and control.action == "close"),
    )


def session_of(request: web.Request, body: ReuseFields) -> str:
    """Return the session of a request; empty: it names none.

    Raises:
        InvalidRequestError: a header cannot be the name of a session.
    """
    control, conversation = body.nvext.session_control if body.nvext is not None else None, body.conversation_params
    return (
        body.session_id
        or (control.session_id if control is not None else "")
        or (conversation.conversation_id if conversation is not None else "")
        or named_in(request)
        or body.prompt_cache_key
        or named_in(request, _OTHERS)
    )


def named_in(request: web.Request, headers: Sequence[str] = _HEADERS) -> str:
    """Return the name of a session in the first of the headers that the request has; empty: it has none.

    Raises:
        InvalidRequestError: it cannot be a name.
    """
    for header in headers:
        if name := request.headers.get(header, "").strip():
            if _NAME.fullmatch(name) is None:
                raise InvalidRequestError(
                    f"{header}: the name of a session has at most {LONGEST_SESSION} printable ASCII characters", header
                )
            return name
    return ""


def own_salt(body: GenerationFields) -> str | None:
    """Return the cache salt that a request names, by our field or Dynamo's."""
    return body.cache_salt or (body.nvext.cache_salt if body.nvext is not None else None)


def session_of_user(metadata: Mapping[str, Any] | None) -> str | None:
    """Return the session that Claude Code names in ``metadata.user_id``, as JSON or at its end; None: there is none."""
    user = (metadata or {}).get("user_id")
    if not isinstance(user, str):
        return None
    if found := _USER_ID.search(user):
        name = found[1]
    else:
        try:
            name = msgspec.json.decode(user, type=_UserId).session_id
        except (msgspec.MsgspecError, RecursionError):
            return None
    return name if _NAME.fullmatch(name) else None


def breakpoint_ttl(messages: Sequence[ChatMessage]) -> str | None:
    """Drop all cache breakpoints but the last ones, and return for how long the prefix up to the last should be kept.

    None: there are no breakpoints, or the last names no time.
    """
    parts = [part for one in messages if isinstance(one.content, list) for part in one.content]
    marked = [part for part in parts if part.prompt_cache_breakpoint is not None]
    for part in marked[:-MOST_BREAKPOINTS]:
        part.prompt_cache_breakpoint = None
    last = marked[-1].prompt_cache_breakpoint if marked else None
    return last.ttl if last is not None else None


def _retention(body: ReuseFields) -> int:
    """Return the seconds for which the client wants the KV of its prompt kept; 0: it names none."""
    options, nv = body.prompt_cache_options, body.nvext
    control = nv.cache_control if nv is not None else None
    given = (
        body.prompt_cache_retention
        or (options.ttl if options is not None else None)
        or (control.ttl if control is not None else None)
    )
    if given is None:
        return _longest(body.kv_cache_retention_config)
    return 0 if given.startswith("in") else seconds_of(given)


def _longest(config: KvCacheRetentionConfig | None) -> int:
    """Return the longest time, in seconds, for which KV has a priority above the usual one."""
    if config is None:
        return 0
    times = [(one.priority, one.duration_ms) for one in config.token_range_retention_configs]
    times.append((config.decode_retention_priority, config.decode_duration_ms))
    return int(max((ms for priority, ms in times if ms and priority > _USUAL_PRIORITY), default=0) // 1000)
