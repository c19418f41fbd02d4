"""The deltas of a message, and the message that they add up to."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple
from urllib.parse import unquote

from pagewise_gateway.text.output_parsing.scanning import JsonValue

_MOST_PARTS = 256
"""Schemas that are read to find the types of a parameter."""

DeltaKind = Literal["content", "reasoning", "call", "arguments"]


class Delta(NamedTuple):
    """A piece of a message. The text of a ``call``, which begins a tool call, is the name of its function, and
    ``call_id`` its id, if the model wrote one. ``arguments`` belong to the last call."""

    kind: DeltaKind
    text: str
    call_id: str = ""


@dataclass(slots=True)
class ParsedCall:
    """A tool call. ``arguments``: the model's text, which is JSON unless it is cut off or invalid. ``id``: the id that
    the model wrote; empty: it wrote no id."""

    name: str
    arguments: str = ""
    id: str = ""


@dataclass(slots=True)
class ParsedMessage:
    """The message that an output adds up to."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list)


def joined(deltas: Iterable[Delta]) -> ParsedMessage:
    """Return the message that these deltas add up to."""
    content, reasoning, calls, arguments = [], [], [], []
    for kind, text, call_id in deltas:
        if kind == "content":
            content.append(text)
        elif kind == "reasoning":
            reasoning.append(text)
        elif kind == "call":
            calls.append(ParsedCall(text, "", call_id))
            arguments.append([""])
        else:
            arguments[-1].append(text)
    for call, parts in zip(calls, arguments, strict=True):
        call.arguments = "".join(parts)
    return ParsedMessage("".join(content), "".join(reasoning), calls)


class Tools:
    """The names of the tools of a request, and the types of their parameters."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any] | None]) -> None:
        """``parameters``: the JSON schema of the parameters of each tool, by its name."""
        self._types = {name: _property_types(schema or {}) for name, schema in parameters.items()}

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def parameters(self, name: str) -> Collection[str]:
        """Return the names of the parameters that a tool declares."""
        return self._types.get(name, {})

    def types(self, name: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter of a tool may have; empty: they are not declared."""
        return self._types.get(name, {}).get(parameter, frozenset())


def schema_types(schema: Any, root: Any = None) -> list[str]:
    """Return the JSON types that a schema declares: itself, by its texts, in the parts of ``allOf`` and of unions, or
    in the schema of its ``$ref``. ``root``: the document of the references; None: they are not followed."""
    return _DeclaredTypes(root).of(schema)


def _property_types(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    found: dict[str, frozenset[str]] = {}
    for part in _DeclaredTypes(schema).parts(schema, set()):
        properties = part.get("properties")
        for name, declared in properties.items() if isinstance(properties, Mapping) else ():
            found.setdefault(name, frozenset(schema_types(declared, schema)))
    return found


class _DeclaredTypes:
    """Finds the types that schemas of one document declare. A reference is not followed from itself, and a schema with
    very many parts is read in part, so that every schema takes a short time."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = _MOST_PARTS

    def of(self, schema: Any, passed: frozenset[str] = frozenset()) -> list[str]:
        """Return the types of a schema. ``passed``: the references on the way to it."""
        found: list[str] = []
        followed = set(passed)
        for part in self.parts(schema, followed):
            declared = part.get("type", _types_of_texts(part))
            own = [declared] if isinstance(declared, str) else []
            if isinstance(declared, list):
                own += [each for each in declared if isinstance(each, str)]
            for union in ("anyOf", "oneOf"):
                choices = part.get(union)
                for choice in choices if isinstance(choices, list) else ():
                    own += self.of(choice, frozenset(followed))
            # A value has a type of each part that declares some.
            found = [each for each in found if each in own] or found or own
        return list(dict.fromkeys(found))

    def parts(self, schema: Any, followed: set[str]) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that a value has to fulfil together: the schema itself, that of its ``$ref``, and the parts
        of ``allOf``. ``followed``: references that were followed already; this call adds its own ones."""
        waiting = [schema]
        while waiting and self._left:
            part = waiting.pop(0)
            if not isinstance(part, Mapping):
                continue
            self._left -= 1
            yield part
            if isinstance(ref := part.get("$ref"), str) and ref not in followed:
                followed.add(ref)
                waiting.append(_referred(self._root, ref))
            if isinstance(together := part.get("allOf"), list):
                waiting += together


def _referred(root: Any, ref: str) -> Any:
    """Return the schema of a reference into its own document, such as ``#/$defs/Name``; None: there is none."""
    start, *names = ref.split("/")
    found = root if start == "#" else None
    for name in names:
        found = found.get(unquote(name).replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _types_of_texts(schema: Mapping[str, Any]) -> list[str]:
    """Return the types of the values that a schema lists, if these are texts, or texts and null."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(each, str | None) for each in values):
        return []
    return [name for name, kind in (("string", str), ("null", type(None))) if any(isinstance(v, kind) for v in values)]


class MessageBuilder:
    """Makes the deltas of a message.

    Content and reasoning become deltas as they come, except for white space at their borders, which is left out; their
    parts are joined by line breaks.

    Fields:
        num_calls: how many tool calls have begun.
        whole: whether the arguments of the last call that counts are complete.
    """

    __slots__ = ("_arguments", "_deltas", "_ids", "_parallel", "content", "num_calls", "reasoning", "whole")

    def __init__(self, parallel: bool) -> None:
        self._deltas: list[Delta] = []
        self.content, self.reasoning = _Trimmed("content", self._deltas), _Trimmed("reasoning", self._deltas)
        self.reasoning.border()
        self.num_calls = 0
        self.whole = True
        self._arguments: JsonValue | None = None
        self._parallel = parallel  # whether calls after the first one count
        self._ids: set[str] = set()  # the ids that the model wrote for calls

    def take(self) -> list[Delta]:
        """Return the new deltas."""
        new = self._deltas.copy()
        self._deltas.clear()
        return new

    def border(self) -> None:
        """Note that content and reasoning end here, and may continue later."""
        self.content.border()
        self.reasoning.border()

    def add(self, found: list[Delta]) -> None:
        """Add the deltas of a reader of calls."""
        for delta in found:
            if delta.kind == "content":
                self.content.push(delta.text)
                continue
            if delta.kind == "call":
                self.num_calls += 1
                self.content.border()
                if delta.call_id in self._ids:  # clients tell calls apart by their ids
                    delta = delta._replace(call_id="")
                self._ids.add(delta.call_id)
            if delta.text and (self._parallel or self.num_calls == 1):
                self._follow(delta)
                self._deltas.append(delta)

    def _follow(self, delta: Delta) -> None:
        if delta.kind == "call":
            self._arguments, self.whole = None, False
        elif not self.whole:
            if self._arguments is None:
                self._arguments = JsonValue()
                self.whole = delta.text[0] not in '{["'  # a reader passes invalid arguments on at once
            self.whole = self.whole or self._arguments.end(delta.text, 0) >= 0


class _Trimmed:
    """Makes deltas of text without white space at its borders. ``begun``: whether there was any other text."""

    __slots__ = ("_bordered", "_deltas", "_fresh", "_held", "_kind", "begun")

    def __init__(self, kind: DeltaKind, deltas: list[Delta]) -> None:
        self._kind, self._deltas = kind, deltas
        self._bordered = self._fresh = self.begun = False
        self._held: list[str] = []

    def push(self, text: str) -> None:
        stripped = text.rstrip()
        if not stripped:
            self._held.append(text)
            return
        before = ("\n" if self.begun else "") if self._fresh else "".join(self._held)
        self._deltas.append(Delta(self._kind, before + (stripped.lstrip() if self._fresh else stripped)))
        self._held = [text[len(stripped) :]]  # white space waits for more text
        self.begun, self._fresh = True, False

    def border(self) -> None:
        self._bordered = self._fresh = True
        self._held = []

    def finish(self) -> None:
        # A text without any border is not changed, so its white space at the end stays.
        held = "".join(self._held)
        if held and not self._bordered:
            self._deltas.append(Delta(self._kind, held))
