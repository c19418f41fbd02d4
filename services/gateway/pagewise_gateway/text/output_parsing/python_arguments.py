"""Translates the arguments of a call in Python to JSON while they arrive.

``ast.parse`` would need them as a whole, and hold the event loop for half a second for a list of some 100k tokens.
"""

import ast
import json
import re
import unicodedata
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from pagewise_gateway.text.output_parsing.deltas import as_json

_MOST_SOURCE = 16_384
"""Characters of arguments that Python may parse as a whole, if they are written in an unusual way."""
_MOST_DEPTH = 200
"""Brackets inside of each other; Python has the same limit."""
_MOST_WORD = 4096
"""Characters of the longest number that JSON writes in another way."""
_TOKEN = re.compile(r"""[()\[\]{},:=]|["'#]|[^()\[\]{},:="'#]+""")
_IN_STRING = {'"': re.compile(r'["\\]'), "'": re.compile(r"['\\]")}
_PAIRS = {")": "(", "]": "[", "}": "{"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


@dataclass(slots=True)
class _Frame:
    """Brackets that are open.

    Fields:
        kind: the opening bracket; an empty text: that of the call. place: where it is in the JSON.
        num_items: that have ended. keyed: whether the item has its key or name. filled: whether it has a value, or a
        string that is still to be its key. is_string: whether that is a string, which may go on.
    """

    kind: str
    place: int = 0
    num_items: int = 0
    keyed: bool = False
    filled: bool = False
    is_string: bool = False


class PythonArguments:
    """Reads arguments from behind the opening bracket of a call."""

    __slots__ = (
        "_comment",
        "_depth",
        "_empty",
        "_escaped",
        "_failed",
        "_frames",
        "_json",
        "_names",
        "_num_quotes",
        "_quote",
        "_repeated",
        "_string",
        "_word",
        "_written",
    )

    def __init__(self) -> None:
        self._depth = 1
        self._frames = [_Frame("")]
        self._json: list[str] = ["{"]
        self._names: set[str] = set()
        self._word: list[str] = []  # of a number, a word, or the name of an argument
        self._comment = self._repeated = False
        self._quote = self._empty = ""  # the string that is open; one that is empty, or begins one in three quotes
        self._num_quotes = 0  # behind each other at the end of the string
        self._string: list[str] = []
        self._escaped = False
        self._failed = False
        self._written: list[str] = []

    @property
    def quoting(self) -> bool:
        """Whether the text goes on inside of a string."""
        return bool(self._quote)

    def push(self, text: str) -> int:
        """Take text; return the index behind the bracket that ends the call, or -1 if it does not end in this text."""
        at = 0
        while at < len(text):
            if self._quote:
                at = self._in_string(text, at)
                continue
            if self._comment:
                end = text.find("\n", at)
                if end < 0:
                    break
                self._comment, at = False, end
            if self._empty:
                quote, self._empty = self._empty, ""
                if text[at] == quote:
                    self._quote, at = 3 * quote, at + 1
                    continue
                self._do(self._add_string, quote, quote)
            found = _TOKEN.match(text, at)
            assert found is not None
            at, sign = found.end(), found[0]
            if sign in "([{":
                self._depth += 1
                self._do(self._open, sign)
            elif sign in ")]}":
                self._depth -= 1
                if not self._depth:
                    self._written.append(text[: at - 1])
                    return at
                self._do(self._close, sign)
            elif sign in "\"'":
                self._quote = sign
            elif sign == "#":
                self._comment = True
            elif sign == ",":
                self._do(self._comma)
            elif sign == ":":
                self._do(self._colon)
            elif sign == "=":
                self._do(self._name)
            else:
                self._word.append(sign)
        self._written.append(text)
        return -1

    def finish(self) -> str:
        """Return the arguments of a call that has ended as JSON, or as they were written if that is not possible."""
        self._do(self._end)
        if not self._failed:
            return "".join(self._json)
        written = "".join(self._written)
        return (_parsed(written) if len(written) <= _MOST_SOURCE else None) or written

    def _do(self, step: Callable[..., None], *arguments: str) -> None:
        """Take a step. What cannot be understood is searched for its end only."""
        if not self._failed:
            try:
                step(*arguments)
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                self._failed, self._json, self._frames, self._word = True, [], [], []

    def _in_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._string.append(text[at])
            return at + 1
        found = _IN_STRING[self._quote[0]].search(text, at)
        end = found.end() if found is not None else len(text)
        self._string.append(text[at:end])
        if found is None or end - at > 1 or found[0] == "\\":
            self._num_quotes = 0
        if found is not None and found[0] == "\\":
            self._escaped = True
        elif found is not None:
            self._num_quotes += 1
            if self._num_quotes == len(self._quote):
                written, quote = "".join(self._string), self._quote
                self._quote, self._string, self._num_quotes = "", [], 0
                if written == quote and len(quote) == 1:
                    self._empty = quote
                else:
                    self._do(self._add_string, quote, written)
        return end

    # ---- steps: each raises an error if it does not fit ---------------------------------------------------

    def _open(self, bracket: str) -> None:
        if self._taken_word() or len(self._frames) > _MOST_DEPTH:
            raise ValueError("a call inside of arguments, or too many brackets")
        place = len(self._json)
        self._add("{" if bracket == "{" else "[")
        self._frames.append(_Frame(bracket, place))

    def _close(self, bracket: str) -> None:
        self._end_word()
        frame = self._frames[-1]
        if frame.kind != _PAIRS[bracket] or (frame.kind == "{" and frame.keyed != frame.filled):
            raise ValueError("brackets that do not fit, or an object with a key that has no value")
        if bracket == ")" and frame.filled and not frame.num_items:  # it is around a value, and makes no tuple
            self._json[frame.place] = self._json[frame.place].removesuffix("[")
        else:
            self._json.append("}" if bracket == "}" else "]")
        self._frames.pop()

    def _comma(self) -> None:
        self._end_word()
        frame = self._frames[-1]
        if not frame.filled or (frame.kind in ("", "{") and not frame.keyed):
            raise ValueError("a comma behind nothing")
        frame.num_items += 1
        frame.keyed = frame.filled = frame.is_string = False

    def _colon(self) -> None:
        frame = self._frames[-1]
        if self._taken_word() or frame.kind != "{" or frame.keyed or not frame.is_string:
            raise ValueError("a colon behind what is no key")
        self._json.append(": ")
        frame.keyed, frame.filled, frame.is_string = True, False, False

    def _name(self) -> None:
        frame, name = self._frames[-1], unicodedata.normalize("NFKC", self._taken_word())
        if frame.kind or frame.keyed or not name.isidentifier():
            raise ValueError("an argument without a name")
        self._repeated = self._repeated or name in self._names
        self._names.add(name)
        self._json.append(f"{', ' if frame.num_items else ''}{as_json(name)}: ")
        frame.keyed = True

    def _end(self) -> None:
        self._end_word()
        frame = self._frames[-1]
        if frame.kind or frame.keyed != frame.filled:
            raise ValueError("brackets that are still open, or a name without a value")
        self._json.append("}")
        if self._repeated:  # the last one of a name counts
            self._json = [as_json(json.loads("".join(self._json)))]

    def _add_string(self, quote: str, written: str) -> None:
        prefix, inner = self._taken_word(), written[: -len(quote)]
        if prefix or "\\" in inner or "\n" in inner or "\r" in inner:
            with warnings.catch_warnings():  # of escapes that Python does not know
                warnings.simplefilter("ignore")
                inner = ast.literal_eval(f"{prefix}{quote}{written}")
            if not isinstance(inner, str):
                raise ValueError("bytes")
        frame = self._frames[-1]
        if frame.filled and frame.is_string:  # strings behind each other are one
            self._json[-1] = self._json[-1][:-1]
            self._json.append(as_json(inner)[1:])
            return
        self._add(as_json(inner))
        frame.is_string = True

    def _end_word(self) -> None:
        """Add the number or the word that ends here, if there is one."""
        if word := self._taken_word():
            if (known := _WORDS.get(word)) is None:
                known = word
                if _NUMBER.fullmatch(word) is None:
                    if len(word) > _MOST_WORD:
                        raise ValueError("a number that is too long")
                    value = ast.literal_eval(word)
                    if not isinstance(value, int | float):
                        raise ValueError("a value that JSON does not have")
                    known = as_json(value)
            if self._frames[-1].kind == "{" and not self._frames[-1].keyed:
                raise ValueError("a key that is no string")
            self._add(known)

    def _taken_word(self) -> str:
        word, self._word = "".join(self._word).strip(), []
        return word

    def _add(self, value: str) -> None:
        """Add a value, a key, or what begins one."""
        frame = self._frames[-1]
        if frame.filled or (not frame.kind and not frame.keyed):
            raise ValueError("a value behind another one, or without a name")
        if frame.kind == "{" and not frame.keyed and value in ("{", "["):
            raise ValueError("a key that is no string")
        between = ", " if frame.num_items and not frame.keyed else ""
        self._json.append(between + value)
        frame.filled = True


def _parsed(written: str) -> str | None:
    """Return arguments that Python itself parses, as JSON; None: it does not, or they are not what JSON has."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = ast.parse(f"f({written}\n)", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        return as_json({_name(each): _value(each.value) for each in call.keywords})
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _name(argument: ast.keyword) -> str:
    if argument.arg is None:
        raise ValueError("arguments without a name")
    return argument.arg


def _value(node: ast.expr) -> object:
    """Return the value of an expression without names and calls.

    Raises:
        ValueError: it has some, or is nothing that JSON has.
    """
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {_key(key): _value(value) for key, value in zip(node.keys, node.values, strict=True)}
    found = ast.literal_eval(node)
    if not isinstance(found, str | int | float | None):
        raise ValueError("a value that JSON does not have")
    return found


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key that is no string")
    return node.value
