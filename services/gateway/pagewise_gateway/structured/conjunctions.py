"""Limits the regular expressions that one text has to match together.

llguidance combines each character class that one of the expressions allows next with each class of every other one, in
one step that none of its limits interrupts. The time for this grows with the product of their numbers, and with the
lengths of the expressions. It passes when a grammar is compiled, or in the middle of an output, where all sequences of
the executor wait for it.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pagewise_gateway.structured.walk import GrammarError, objects

MAX_WORK = 200_000
"""Combinations of character classes, times characters. The worst of 1,000 random ones took 0.11 s for a bitmask."""
_FORMAT_CLASSES, _FORMAT_CHARACTERS = 8, 256
"""Classes of a ``format`` that allow one byte (``email`` has seven with digits), and characters of a long one."""
_MOST_NODES = 20_000
_CLASS = re.compile(r"\\[pP](?:\{[^}]*\}|.)|\\[a-zA-Z]|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\.", re.DOTALL)
_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
_LARK = re.compile(
    r'(?P<text>"(?:\\.|[^"\\])*"i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|//[^\n]*'
    r"|^[ \t]*[?!]?(?P<rule>[A-Za-z_]\w*)(?:\.-?\d+)?(?:\[[^\]\n]*\])?[ \t]*:|(?P<name>[A-Z_][A-Z0-9_]*)\b|(?P<both>&)",
    re.MULTILINE,
)

_MOST_SIZE = (MAX_WORK, MAX_WORK, 17)
"""Classes, characters and conjunctions of a terminal that exceed the limit by themselves (2**18 is above it)."""

_Term = dict[str, Any] | frozenset[int]
"""A schema, or numbers of nodes of which one has to match."""
_Member = str | int | None
"""A property or an item of a value; None: any member that the schema does not name."""


def num_classes(regex: str) -> int:
    """Return an upper bound of the classes of a regular expression that contain the same byte: at least 2, one for
    literal characters and one for the text around a match."""
    classes = set()
    nested = 0
    for found in _CLASS.findall(regex):
        if found[0] == "\\" and not found[1].isalpha():
            continue  # a literal character
        classes.add(found)
        nested += found.count("[", 1) if found[0] == "[" else 0
    return 2 + len(classes) + nested + len(_FLAGS.findall(regex))


def check_conjunctions(schema: Any, resolve: Callable[[str], Any]) -> None:
    """Check the patterns and formats that one string has to match together, because schemas are merged.

    ``resolve``: returns the schema to which a ``$ref`` refers.

    Raises:
        GrammarError: there are too many of them, or too many schemas are merged to find that out.
    """
    num_expressions = sum(isinstance(one.get(name), str) for one in objects(schema) for name in ("pattern", "format"))
    if num_expressions < 2:  # a single one is combined with nothing, and merging large unions takes long
        return
    try:
        _Merged(resolve).check(schema)
    except RecursionError:
        raise GrammarError("too many alternatives refer to each other") from None


class Together(NamedTuple):
    """Expressions that a text has to match together: how many, combinations of their classes, and characters."""

    number: int = 0
    combinations: int = 1
    characters: int = 0

    def joined(self, other: "Together") -> "Together":
        """Return these expressions and others."""
        combinations = min(self.combinations * other.combinations, MAX_WORK + 1)
        return Together(self.number + other.number, combinations, self.characters + other.characters)

    @property
    def too_much(self) -> bool:
        """Whether they may take too long. One alone is combined with nothing."""
        return self.number > 1 and self.combinations * self.characters > MAX_WORK


class _Merged:
    """The schemas that apply to each value of a document. A node is the number of a set of schemas that hold together.

    Each set is examined once. A node that is reached again while it is examined refers to itself, which adds nothing.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._numbers: dict[frozenset[int | frozenset[int]], int] = {}
        self._terms: list[list[_Term]] = []
        self._flattened: dict[int, list[_Term]] = {}
        self._joined: dict[int, Together] = {}
        self._members: dict[int, dict[_Member, None]] = {}
        self._children: dict[tuple[int, type, _Member], int] = {}
        self._nothing = self._node([])

    def check(self, schema: Any) -> None:
        waiting, seen = [self._node([schema])], set()
        while waiting:
            if (node := waiting.pop()) in seen:
                continue
            seen.add(node)
            if self._together(node).too_much:
                raise GrammarError(
                    "the patterns and formats that a string has to match together are too many, or too long: "
                    f"combinations of their classes of characters, times characters, may be at most {MAX_WORK}"
                )
            waiting += [self._child(node, type(member), member) for member in self._named(node)]
            waiting += (self._child(node, str, None), self._child(node, int, None))

    def _node(self, terms: Iterable[Any]) -> int:
        kept = {
            id(term) if isinstance(term, dict) else term: term for term in terms if isinstance(term, dict | frozenset)
        }
        key = frozenset(kept)
        if key not in self._numbers:
            if len(self._numbers) == _MOST_NODES:
                raise GrammarError("too many schemas are merged by allOf, anyOf, oneOf or $ref")
            self._numbers[key] = len(self._terms)
            self._terms.append(list(kept.values()))
        return self._numbers[key]

    def _flat(self, node: int) -> list[_Term]:
        """Return all terms of a node, and the terms that they refer to."""
        if node in self._flattened:
            return self._flattened[node]
        waiting: list[Any] = list(self._terms[node])
        found: dict[int | frozenset[int], _Term] = {}
        while waiting:
            term = waiting.pop()
            key = id(term) if isinstance(term, dict) else term
            if not isinstance(term, dict | frozenset) or key in found:
                continue
            found[key] = term
            if isinstance(term, dict):
                waiting += self._applied(term)
        return self._flattened.setdefault(node, list(found.values()))

    def _applied(self, schema: dict[str, Any]) -> Iterator[Any]:
        """Yield the terms that apply to the same values as a schema does."""
        if isinstance(reference := schema.get("$ref"), str):
            yield self._resolve(reference)
        if isinstance(parts := schema.get("allOf"), list):
            yield from parts
        for keyword in ("anyOf", "oneOf"):
            if isinstance(parts := schema.get(keyword), list):
                yield frozenset(self._node([part]) for part in parts)

    def _together(self, node: int) -> "Together":
        if node in self._joined:
            return self._joined[node]
        self._joined[node] = result = Together()
        patterns = set()
        for term in self._flat(node):
            if isinstance(term, frozenset):
                branches = [self._together(branch) for branch in term] or [result]
                result = result.joined(Together(*map(max, zip(*branches, strict=True))))
                continue
            if isinstance(pattern := term.get("pattern"), str):
                patterns.add(pattern)
            if isinstance(term.get("format"), str):
                result = result.joined(Together(1, _FORMAT_CLASSES, _FORMAT_CHARACTERS))
        for pattern in patterns:
            result = result.joined(Together(1, num_classes(pattern), len(pattern)))
        self._joined[node] = result
        return result

    def _named(self, node: int) -> dict[_Member, None]:
        """Return the properties and items for which a node has schemas of their own."""
        if node in self._members:
            return self._members[node]
        self._members[node] = {}
        members: dict[_Member, None] = {}
        for term in self._flat(node):
            if isinstance(term, frozenset):
                for branch in term:
                    members |= self._named(branch)
            else:
                members |= dict.fromkeys(_properties(term))
                members |= dict.fromkeys(range(len(_prefix(term))))
        self._members[node] = members
        return members

    def _child(self, node: int, kind: type, member: _Member) -> int:
        """Return the node of a property (``kind``: str) or of an item (int)."""
        key = node, kind, member
        if key in self._children:
            return self._children[key]
        self._children[key] = self._nothing
        terms: list[Any] = []
        for term in self._flat(node):
            if isinstance(term, frozenset):
                terms += self._either({self._child(branch, kind, member) for branch in term} - {self._nothing})
            elif kind is str:
                terms.append(_properties(term).get(member, term.get("additionalProperties")))
            else:
                terms.append(_item(term, member))
        self._children[key] = self._node(terms)
        return self._children[key]

    def _either(self, branches: set[int]) -> list[_Term]:
        """Return alternatives as terms. Nested ones become one set, so that a recursive schema has finitely many."""
        flat: set[int] = set()
        for branch in branches:
            terms = self._terms[branch]
            flat |= terms[0] if len(terms) == 1 and isinstance(terms[0], frozenset) else {branch}
        if len(flat) == 1:
            return list(self._terms[flat.pop()])
        return [frozenset(flat)] if flat else []


def _properties(term: dict[str, Any]) -> dict[_Member, Any]:
    properties = term.get("properties")
    return properties if isinstance(properties, dict) else {}


def _prefix(term: dict[str, Any]) -> list[Any]:
    # Drafts before 2020-12 have these schemas in ``items``.
    return next((found for name in ("prefixItems", "items") if isinstance(found := term.get(name), list)), [])


def _item(term: dict[str, Any], member: _Member) -> Any:
    prefix, items = _prefix(term), term.get("items")
    if isinstance(member, int) and member < len(prefix):
        return prefix[member]
    return term.get("additionalItems") if isinstance(items, list) else items


def check_terminals(lark: str) -> None:
    """Check the expressions that each terminal of a grammar in Lark's form, with its references, joins with ``&``.

    Raises:
        GrammarError: a terminal joins too many.
    """
    terminals: dict[str, list[re.Match[str]]] = {"": []}
    parts = terminals[""]
    for found in _LARK.finditer(lark):
        if found["rule"]:
            parts = terminals.setdefault(found["rule"], [])
        else:
            parts.append(found)
    if not any(part["both"] for parts in terminals.values() for part in parts):
        return
    totals: dict[str, _Size] = {}
    try:
        for name in terminals:
            size = _size_of(name, terminals, totals)
            combinations = (2 + size.classes) ** (size.conjunctions + 1)
            if Together(size.conjunctions + 1, combinations, size.characters).too_much:
                raise GrammarError(
                    f"the expressions that {name} joins with & are too many, or too long: combinations of their "
                    f"classes of characters, times characters, may be at most {MAX_WORK}"
                )
    except RecursionError:
        raise GrammarError("terminals refer to each other too deeply") from None


class _Size(NamedTuple):
    """The expressions of a terminal: their classes (beside the two that each has), characters and conjunctions."""

    classes: int = 0
    characters: int = 0
    conjunctions: int = 0


def _size_of(name: str, terminals: dict[str, list[re.Match[str]]], totals: dict[str, _Size]) -> _Size:
    """Return the size of a terminal with its references. ``totals``: gets the size of each terminal by its name."""
    if name not in totals:
        totals[name] = _Size()  # for a terminal that refers to itself, which the library refuses
        sizes = [_Size()]
        for part in terminals.get(name, ()):
            if part["name"]:
                sizes.append(_size_of(part["name"], terminals, totals))
            elif part["regex"]:
                sizes.append(_Size(num_classes(part["regex"]) - 2, len(part["regex"])))
            else:
                sizes.append(_Size(0, len(part["text"] or ""), bool(part["both"])))
        sums = map(sum, zip(*sizes, strict=True))
        totals[name] = _Size(*map(min, sums, _MOST_SIZE))
    return totals[name]
