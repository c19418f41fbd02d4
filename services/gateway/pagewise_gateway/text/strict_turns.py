"""Conversations as strict chat templates take them.

The APIs allow several turns of one role in a row, a system message anywhere, a user's text behind the result of a tool,
and ids of any length. Each function here changes a conversation so that a template takes it that refuses one of these.
The message that a function makes of another one depends on that message and those before it only, and a message is only
ever extended by later ones. So the prompt of a turn stays a prefix of the next turn's, as far as the template allows.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any

Message = dict[str, Any]

ID_LENGTH = 9
"""The length of ids of calls that Mistral's templates check. Ids that are made here have letters and digits only."""
_ALPHABET = digits + ascii_letters
_REASONING = ("reasoning", "reasoning_content", "thinking")


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the beginning. Later ones become the user's, and join the user's beside them, because
    there are templates in which the user and the assistant have to alternate. Behind the result of a tool they join
    that, because in such templates it is the assistant's turn there."""
    begun = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    made = _merged(messages[:begun], lambda last, role: True)
    last, joins = "system", False  # whether the last message was the system's, and became the user's
    for message in messages[begun:]:
        is_system = message["role"] == "system"
        role = "user" if is_system else message["role"]
        behind_result = is_system and last == "tool"
        if behind_result or (last == role and (is_system or joins)):
            made[-1] = _joined(made[-1], message)
        else:
            made.append({**message, "role": role})
        last, joins = made[-1]["role"], is_system and not behind_result
    return made


def without_system(messages: Sequence[Message]) -> list[Message]:
    """Make the system message at the beginning the user's, and join it with the user's behind it."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    first, *others = messages
    if others and others[0]["role"] == "user":
        first, *others = _joined(first, others[0]), *others[1:]
    return [{**first, "role": "user"}, *others]


def with_text_in_results(messages: Sequence[Message]) -> list[Message]:
    """Join the user's text behind the result of a tool with that result."""
    return _merged(messages, lambda last, role: (last, role) == ("tool", "user"))


def with_alternating_roles(messages: Sequence[Message]) -> list[Message]:
    """Join messages of the user that follow each other, and of the assistant. An assistant that speaks first answers an
    empty message of the user."""
    first = next((one["role"] for one in messages if one["role"] != "system"), "")
    messages = with_user(messages) if first == "assistant" else messages
    return _merged(messages, lambda last, role: last == role and role in ("user", "assistant"))


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Give calls, and the results that name them, ids of nine characters; equal ids stay equal."""
    made: list[Message] = []
    for message in messages:
        message = dict(message)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [{**call, "id": _short(call["id"])} for call in calls]
        if (answered := message.get("tool_call_id")) is not None:
            message["tool_call_id"] = _short(answered)
        made.append(message)
    return made


def with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Give each of several calls in a message one of its own, with its result behind it."""
    made: list[Message] = []
    for message in messages:
        calls = message.get("tool_calls") or []
        if message["role"] == "tool":
            made.insert(_behind_call(made, message.get("tool_call_id")), message)
        elif len(calls) > 1:
            made.append({**message, "tool_calls": [calls[0]]})
            content = "" if message.get("content") is not None else None
            made += ({"role": message["role"], "content": content, "tool_calls": [call]} for call in calls[1:])
        else:
            made.append(message)
    return made


def _behind_call(messages: Sequence[Message], call_id: str | None) -> int:
    """Where the result of a call belongs: behind the first one of that id that has none, in the last calls."""
    begun = len(messages)
    while begun and (messages[begun - 1].get("tool_calls") or messages[begun - 1]["role"] == "tool"):
        begun -= 1
    for place in range(begun, len(messages)):
        answered = place + 1 < len(messages) and messages[place + 1]["role"] == "tool"
        if not answered and any(call["id"] == call_id for call in messages[place].get("tool_calls") or ()):
            return place + 1
    return len(messages)


def with_user(messages: Sequence[Message]) -> list[Message]:
    """Let the user say nothing behind the system's messages at the beginning if it does not speak there."""
    begun = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    if begun < len(messages) and messages[begun]["role"] == "user":
        return list(messages)
    return [*messages[:begun], {"role": "user", "content": ""}, *messages[begun:]]


def with_names(messages: Sequence[Message]) -> list[Message]:
    """Give results the names of the functions that were called."""
    names: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        name = names.get(message.get("tool_call_id") or "")
        made.append({**message, "name": name} if name is not None and "name" not in message else message)
    return made


def _short(call_id: str) -> str:
    if len(call_id) == ID_LENGTH:
        return call_id
    number = int.from_bytes(sha256(call_id.encode()).digest()[:16])
    return "".join(_ALPHABET[number // 62**place % 62] for place in range(ID_LENGTH))


def _merged(messages: Sequence[Message], joins: Callable[[str, str], bool]) -> list[Message]:
    """Join messages with those before them. ``joins``: whether to, by the role of the one before and its own."""
    made: list[Message] = []
    for message in messages:
        if made and joins(made[-1]["role"], message["role"]):
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(first: Message, second: Message) -> Message:
    """One message with the contents of two, and with the calls of both."""
    joined = {**second, **first}
    for name, between in (("content", "\n\n"), *((name, "\n") for name in _REASONING)):
        if first.get(name) and second.get(name):
            joined[name] = f"{first[name]}{between}{second[name]}"
        elif second.get(name):
            joined[name] = second[name]
    if second.get("tool_calls"):
        joined["tool_calls"] = [*first.get("tool_calls", ()), *second["tool_calls"]]
    return joined
