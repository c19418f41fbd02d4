"""What the tables of docs/wire-protocol.md say, from the structs that travel and their docstrings."""

import inspect
import re
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from msgspec import NODEFAULT, Meta, Struct
from msgspec.structs import fields
from pagewise_shared.protocol import messages
from pagewise_shared.protocol.base import Message
from pagewise_shared.protocol.gateway_messages import FromGateway, ToGateway

DIRECTIONS: dict[str, tuple[type[Struct], ...]] = {
    "from_executor": get_args(messages.FromExecutor),
    "from_scheduler": get_args(messages.FromScheduler),
    "between_executors": (messages.ReadBlocks, messages.Blocks),
    "from_gateway": tuple(one for one in get_args(FromGateway) if one not in get_args(messages.FromExecutor)),
    "to_gateway": tuple(one for one in get_args(ToGateway) if one not in get_args(messages.FromScheduler)),
}
"""The messages of each direction; of gateways, those that executors have not."""

_EVERYWHERE = {"epoch": "of the connection, by the last welcome", "step": "number of the step under this epoch"}
"""What fields mean that many messages have, unless a message says something else of them."""

Row = tuple[str, str, str, str]


def described(name: str) -> Iterator[tuple[str, list[Row]]]:
    """Yield each message of a direction, or each of the "parts" of all: what it is, and a row for each field."""
    for struct in _parts() if name == "parts" else DIRECTIONS[name]:
        what, meanings = _docstring(struct)
        yield (
            f"**`{struct.__name__}`**. {what}",
            [
                (f"`{one.name}`", _type(one.type), _default(one.default), meanings.get(one.name, ""))
                for one in fields(struct)
            ],
        )


def _docstring(struct: type[Struct]) -> tuple[str, dict[str, str]]:
    """Return the first paragraph of a struct's docstring, and what the docstring says of each field.

    A field's part begins with its name and a colon, at the beginning of a sentence; several fields may share one.
    """
    text = inspect.cleandoc(struct.__doc__ or "").replace("Fields:\n", "")
    flat, names = " ".join(text.split()), [one.name for one in fields(struct)]
    one = "`{0,2}(?:" + "|".join(names) + ")`{0,2}"
    begins = list(re.finditer(rf"(?<=[.;:] )({one}(?:, {one})*): ", flat)) if names else []
    ends = [match.start() for match in begins[1:]] + [len(flat)]
    meanings = {name: told for name, told in _EVERYWHERE.items() if name in names}
    for match, end in zip(begins, ends, strict=False):
        told = flat[match.end() : end].strip().rstrip(".;").replace("``", "`")
        meanings |= dict.fromkeys(match[1].replace("`", "").split(", "), told)
    first = " ".join(text.partition("\n\n")[0].split())
    what = first[: begins[0].start()] if begins else first
    return what.strip().replace("``", "`"), meanings


def _parts() -> list[type[Struct]]:
    """Return the structs that messages are made of, each after the first that has it."""
    found: dict[type[Struct], None] = {}
    todo = [struct for direction in DIRECTIONS.values() for struct in direction]
    while todo:
        struct = todo.pop(0)
        inner = [part for one in fields(struct) for part in _structs(one.type) if part not in found]
        found |= dict.fromkeys(inner)
        todo += inner
    return list(found)


def _structs(hint: Any) -> Iterator[type[Struct]]:
    if isinstance(hint, type) and issubclass(hint, Struct) and not issubclass(hint, Message):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)


def _type(hint: Any) -> str:
    """Return a type in words: ``list of X`` for a tuple of any length."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return ", ".join([_type(arguments[0]), *_bounds(arguments[1])])
    if origin is Literal:
        return " or ".join(f'"{value}"' for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(_type(inner) for inner in arguments)
    if origin is tuple:
        inner = [_type(each) for each in arguments if each is not Ellipsis]
        return f"list of {inner[0]}" if Ellipsis in arguments else f"({', '.join(inner)})"
    if hint is NoneType:
        return "nil"
    return f"`{hint.__name__}`" if issubclass(hint, Struct) else str(hint.__name__)


def _bounds(meta: Meta) -> Iterator[str]:
    for bound, text in ((meta.ge, "at least {:,}"), (meta.le, "at most {:,}"), (meta.max_length, "at most {:,} long")):
        if bound is not None:
            yield text.format(bound)


def _default(value: Any) -> str:
    """Return a default, nothing for a field that has none."""
    if value is NODEFAULT:
        return ""
    if value is None:
        return "nil"
    if value in ("", b"", ()):
        return "empty"
    if isinstance(value, Struct):
        return f"`{type(value).__name__}()`"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"
