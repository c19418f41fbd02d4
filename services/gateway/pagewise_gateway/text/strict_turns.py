"""Adapts conversations to strict chat templates.

The APIs allow several messages of one role in a row, a system message anywhere, a user's text after the result of a
tool, ids of any length, several calls in a message, and text beside its reasoning. Each function here adapts a
conversation to templates that refuse one of these, or leave a part of it out. A resulting message depends on earlier
messages only, and later ones only extend it. So the prompt of a turn stays a prefix of the next turn's prompt, as far
as the template allows, and the prefix cache has it.
"""

from collections.abc import Callable, Sequence
from hashlib import sha256
from string import ascii_letters, digits
from typing import Any

import msgspec

Message = dict[str, Any]

ID_LENGTH = 9
"""The length of ids of calls that Mistral's templates require. Shortened ids have letters and digits only."""
_ALPHABET = digits + ascii_letters
_REASONING = ("reasoning", "reasoning_content", "thinking")


def with_one_system(messages: Sequence[Message]) -> list[Message]:
    """Join the system messages at the beginning. Later ones become the user's.

    They join the user's messages next to them, because there are templates in which the user and the assistant have to
    alternate. After the result of a tool they join the result, because such templates expect the assistant there.
    """
    begun = _num_system(messages)
    made = _merged(messages[:begun], lambda last, role: True)
    last, joins = "system", False  # whether the last message is a system message that became the user's
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
    """Make the system message at the beginning the user's, and join it with the user's message after it."""
    if not messages or messages[0]["role"] != "system":
        return list(messages)
    first, *others = messages
    if others and others[0]["role"] == "user":
        first, *others = _joined(first, others[0]), *others[1:]
    return [{**first, "role": "user"}, *others]


def with_text_in_results(messages: Sequence[Message]) -> list[Message]:
    """Join the user's text after the result of a tool with the result."""
    return _merged(messages, lambda last, role: (last, role) == ("tool", "user"))


def with_alternating_roles(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of the user, and of the assistant. An empty message of the user comes before an
    assistant that speaks first."""
    first = next((one["role"] for one in messages if one["role"] != "system"), "")
    messages = with_user(messages) if first == "assistant" else messages
    return _merged(messages, lambda last, role: last == role and role in ("user", "assistant"))


def with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Shorten the ids of calls, also in their results, to nine characters; equal ids stay equal."""
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
    """Give each of several calls in a message a message of its own, with the result of the call after it."""
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


def with_text_in_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Join the text beside reasoning in a message that calls tools with the reasoning."""
    made: list[Message] = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            named = [name for name in _REASONING if message.get(name)]
            joined = {name: f"{message[name]}\n{message['content']}" for name in named}
            message = {**message, **joined, "content": ""} if named else message
        made.append(message)
    return made


def with_values_of_results(messages: Sequence[Message]) -> list[Message]:
    """Give results of tools that are JSON as values, which a template that writes JSON does not quote."""
    return [
        {**message, "content": _value(message["content"])} if message["role"] == "tool" else message
        for message in messages
    ]


def _value(text: Any) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError):
        return text


def _behind_call(messages: Sequence[Message], call_id: str | None) -> int:
    """Return the index for the result of a call: after the first call of this id without a result, among the last."""
    begun = len(messages)
    while begun and (messages[begun - 1].get("tool_calls") or messages[begun - 1]["role"] == "tool"):
        begun -= 1
    for index in range(begun, len(messages)):
        answered = index + 1 < len(messages) and messages[index + 1]["role"] == "tool"
        if not answered and any(call["id"] == call_id for call in messages[index].get("tool_calls") or ()):
            return index + 1
    return len(messages)


def with_user(messages: Sequence[Message]) -> list[Message]:
    """Insert an empty message of the user after the system messages at the beginning, unless there is one."""
    begun = _num_system(messages)
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


def _num_system(messages: Sequence[Message]) -> int:
    """Return how many system messages there are at the beginning."""
    return next((index for index, one in enumerate(messages) if one["role"] != "system"), len(messages))


def _short(call_id: str) -> str:
    if len(call_id) == ID_LENGTH:
        return call_id
    number = int.from_bytes(sha256(call_id.encode()).digest()[:16])
    return "".join(_ALPHABET[number // 62**digit % 62] for digit in range(ID_LENGTH))


def _merged(messages: Sequence[Message], joins: Callable[[str, str], bool]) -> list[Message]:
    """Join each message with the one before it if ``joins`` of their two roles."""
    made: list[Message] = []
    for message in messages:
        if made and joins(made[-1]["role"], message["role"]):
            made[-1] = _joined(made[-1], message)
        else:
            made.append(message)
    return made


def _joined(first: Message, second: Message) -> Message:
    joined = {**second, **first}
    for name, between in (("content", "\n\n"), *((name, "\n") for name in _REASONING)):
        if first.get(name) and second.get(name):
            joined[name] = f"{first[name]}{between}{second[name]}"
        elif second.get(name):
            joined[name] = second[name]
    if second.get("tool_calls"):
        joined["tool_calls"] = [*first.get("tool_calls", ()), *second["tool_calls"]]
    return joined
