"""The bodies of ``/v1/cache/advice``."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from pagewise_gateway.http.hints_schema import CacheSalt, Duration, Seconds, SessionId
from pagewise_gateway.http.schema import LONGEST_TEXT, Messages, TemplateKwargs, TokenId
from pagewise_gateway.http.tools_schema import ToolList

Kind = Literal["willneed", "cold", "dontneed", "pin", "unpin", "fork", "end"]
_RequestName = Annotated[str, Meta(min_length=1, max_length=256)]


class AdviceRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of ``POST /v1/cache/advice``, about a session, a request, a response or a prompt: exactly one of these.

    ``request_id``: our id of an earlier request. ``messages``, with ``tools``: the prompt of a chat.
    ``cache_salt``, and ``model`` with a prompt: of the requests that it is about.
    """

    advice: Annotated[
        Kind,
        Meta(
            description="willneed: it is used again within the time. cold: move it from the device to a "
            "slower tier. dontneed: release it. pin: keep it for the time. unpin: end a pin. fork: it begins as the "
            "parent does. end: the session has ended."
        ),
    ]
    session_id: SessionId | None = None
    request_id: _RequestName | None = None
    response_id: _RequestName | None = None
    prompt: Annotated[str | list[TokenId], Meta(description=LONGEST_TEXT)] | None = None
    messages: Messages | None = None
    tools: ToolList | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    model: str | None = None
    cache_salt: CacheSalt | None = None
    seconds: Seconds | None = None
    ttl: Annotated[Duration, Meta(description="The seconds in another form: 90s, 5m or 1h.")] | None = None
    parent: Annotated[SessionId, Meta(description="Of a fork: the session whose prompt it begins with.")] | None = None


class AdviceAnswer(Struct):
    """Answer of ``/v1/cache/advice``.

    Fields:
        outcome: whether the advice is followed; ``clipped``: in part.
        reason: of what is clipped or refused.
        seconds: for which it holds; 0: it has no time.
        blocks, tokens: of the KV that it is about.
    """

    outcome: Literal["accepted", "clipped", "refused"]
    reason: str
    seconds: float
    blocks: int
    tokens: int
