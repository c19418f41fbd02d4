"""The deltas that a parser makes of the text of an output, and the message that they add up to."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

DeltaKind = Literal["content", "reasoning", "call", "arguments"]


class Delta(NamedTuple):
    """A piece of a message.

    A ``call`` begins a tool call; its text is the name of the function. ``arguments`` belong to the call that began
    last.
    """

    kind: DeltaKind
    text: str


@dataclass(slots=True)
class ParsedCall:
    """A tool call. ``arguments``: the text as the model wrote it, which is JSON unless it is cut off or wrong."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """The message that an output adds up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> ParsedMessage:
    """Return the message that these deltas add up to."""
    content, reasoning, names, arguments = [], [], [], []
    for kind, text in deltas:
        if kind == "content":
            content.append(text)
        elif kind == "reasoning":
            reasoning.append(text)
        elif kind == "call":
            names.append(text)
            arguments.append([""])
        else:
            arguments[-1].append(text)
    calls = [ParsedCall(name, "".join(parts)) for name, parts in zip(names, arguments, strict=True)]
    return ParsedMessage("".join(content), "".join(reasoning), calls)


class Tools:
    """The names of the tools of a request, and the types of their parameters, which a parser has to know."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None]) -> None:
        """``parameters``: the JSON schema of the parameters of each tool, by its name."""
        self._types = {name: _property_types(schema or {}) for name, schema in parameters.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter of a tool may have; none: they are not declared."""
        return self._types.get(name, {}).get(parameter, frozenset())


def first_of(text: str, delimiters: Sequence[str]) -> tuple[int, int] | None:
    """Return where the first of these delimiters begins and ends in a text, if one is in it."""
    found = [(text.find(each), each) for each in delimiters]
    start, delimiter = min(((at, each) for at, each in found if at >= 0), default=(-1, ""))
    return (start, start + len(delimiter)) if start >= 0 else None


def begun(text: str, delimiters: Sequence[str]) -> int:
    """Return how many characters at the end of a text may begin one of these delimiters."""
    most = 0
    for delimiter in delimiters:
        tail = text[-(len(delimiter) - 1) :] if len(delimiter) > 1 else ""
        at = tail.find(delimiter[0])
        while at >= 0 and not delimiter.startswith(tail[at:]):
            at = tail.find(delimiter[0], at + 1)
        most = max(most, len(tail) - at if at >= 0 else 0)
    return most


def begins(text: str, delimiters: Sequence[str]) -> bool:
    """Return whether a text is the beginning of one of these delimiters."""
    return any(each.startswith(text) for each in delimiters)


def as_json(value: object) -> str:
    """Return a value as JSON. Half of a surrogate pair, which no encoding has, stays an escape."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if _encodable(text) else json.dumps(value)


def is_json(text: str) -> bool:
    """Return whether a text is JSON, with numbers of any size."""
    try:
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def as_text(value: object) -> str:
    """Return a value if it is a text that can be encoded, else an empty one."""
    return value if isinstance(value, str) and _encodable(value) else ""


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _property_types(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {}
    return {name: frozenset(schema_types(declared)) for name, declared in properties.items()}


def schema_types(schema: Any) -> list[str]:
    """Return the JSON types that a schema declares, or that the parts of its union declare."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    found = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        found += [each for each in declared if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            found += schema_types(choice)
    return found
