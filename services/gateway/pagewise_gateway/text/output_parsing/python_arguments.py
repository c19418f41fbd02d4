"""Translates the arguments of a call in Python to JSON while they arrive.

``ast.parse`` would need them as a whole, and hold the event loop for half a second for a list of some 100k tokens.
Here each token becomes that of JSON, and the parser of JSON finds out at the end whether they make sense.
"""

import ast
import json
import re
import unicodedata
import warnings

from pagewise_gateway.text.output_parsing.deltas import as_json, is_json

_MOST_SOURCE = 16_384
"""Characters of arguments that Python may parse as a whole, if they are written in an unusual way."""
_MOST_DEPTH = 200
"""Brackets inside of each other; Python has the same limit."""
_MOST_WORD = 4096
"""Characters of the longest number that JSON writes in another way."""
_TOKEN = re.compile(r"""[()\[\]{},:=]|"(?:"")?|'(?:'')?|\#[^\n]*|[^()\[\]{},:="'#]+""")
_OPEN_QUOTES = ("'", "''", '"', '""')
"""Ends of a text that may be, or begin, the quotes of a string."""
_BODY = {
    quote: re.compile(rf"(?:[^\\{sign}]++|\\.|{again})*+", re.DOTALL)
    for sign in "\"'"
    for quote, again in ((sign, "(?!)"), (3 * sign, f"{sign}{{1,2}}(?=[^{sign}])"))
}
"""What the strings of these quotes contain, as far as it is there."""
_PAIRS = {")": "(", "]": "[", "}": "{"}
_OPENING = frozenset("([{")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CALL = ""
"""Stands for the opening bracket of the call."""


class PythonArguments:
    """Reads arguments from behind the opening bracket of a call."""

    __slots__ = ("_body", "_failed", "_held", "_json", "_names", "_open", "_quote", "_word", "_written")

    def __init__(self) -> None:
        self._written: list[str] = []
        self._held = ""  # the end of the text, which cannot be read before more comes
        self._json = ["{"]
        self._names: list[str] = []
        self._open = [(_CALL, 0)]  # the brackets that are open, and their places in the JSON
        self._word: list[str] = []  # of a number, a word, the name of an argument, or the prefix of a string
        self._quote, self._body = "", list[str]()  # of the string that is open
        self._failed = False

    def push(self, text: str) -> int:
        """Take text; return the index behind the bracket that ends the call, or -1 if it does not end in this text."""
        self._written.append(text)
        at, num_held = 0, len(self._held)
        text, self._held = self._held + text, ""
        while at < len(text) and self._open:
            at = self._in_string(text, at) if self._quote else self._token(text, at)
        if self._open:
            return -1
        self._written[-1] = self._written[-1][: at - num_held - 1]
        return at - num_held

    def finish(self) -> str:
        """Return the arguments of a call that has ended as JSON, or as they were written if that is not possible."""
        found, written = "".join(self._json), "".join(self._written)
        if not self._failed and is_json(found):
            if len(set(self._names)) == len(self._names):
                return found
            try:
                return as_json(json.loads(found))  # the last one of a name counts
            except ValueError:  # a number that is too long for Python
                return written
        return (_parsed(written) if len(written) <= _MOST_SOURCE else None) or written

    def _token(self, text: str, at: int) -> int:
        """Read the token at an index, and return the index behind it. One that may go on is held."""
        if text[at : at + 3] in _OPEN_QUOTES:
            self._held = text[at:]
            return len(text)
        found = _TOKEN.match(text, at)
        assert found is not None
        sign, end = found[0], found.end()
        if sign in _OPENING:
            self._do(sign)
            self._open.append((sign, len(self._json) - 1))
        elif sign in _PAIRS:
            self._do(sign)
            self._open.pop()
        elif sign in ",:=":
            self._do(sign)
        elif sign[0] in "\"'":
            self._quote = sign
        elif sign[0] != "#":
            self._word.append(sign)
        elif end == len(text):  # a comment
            self._held = "#"
        return end

    def _in_string(self, text: str, at: int) -> int:
        """Read the string that goes on at an index, and return the index behind it."""
        found = _BODY[self._quote].match(text, at)
        assert found is not None
        end = found.end()
        self._body.append(text[at:end])
        if not text.startswith(self._quote, end):  # it goes on
            self._held = text[end:]
            return len(text)
        quote, body = self._quote, "".join(self._body)
        self._quote, self._body = "", []
        self._do(quote, body)
        return end + len(quote)

    def _do(self, sign: str, body: str = "") -> None:
        """Translate a token, and the word before it. If one cannot be understood, only the end is looked for."""
        word, self._word = "".join(self._word).strip(), []
        if not self._failed:
            try:
                self._json.append(self._translated(sign, word, body))
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                self._failed, self._json = True, []

    def _translated(self, sign: str, word: str, body: str) -> str:
        """Return what a token adds to the JSON. ``body``: of a string.

        Raises:
            ValueError, SyntaxError, RecursionError, MemoryError: it does not fit, so far as JSON would not tell.
        """
        bracket, place = self._open[-1]
        if sign[0] in "\"'":
            return self._string(sign, word, body)
        if sign == "=":
            return self._keyword(word)
        if word:
            self._json.append(_value_of(word))
        match sign:
            case "," if bracket == "(":
                self._json[place] = "["
            case ":" if bracket != "{":
                raise ValueError("a colon outside of an object")
            case ")" | "]" | "}":
                return self._closing(sign)
            case "(" | "[" | "{":
                if len(self._open) > _MOST_DEPTH:
                    raise ValueError("too many brackets")
                return " " if sign == "(" else sign  # around a value, unless a comma makes it a tuple
        return f"{sign} "

    def _keyword(self, word: str) -> str:
        name = unicodedata.normalize("NFKC", word)
        if self._open[-1][0] != _CALL or not name.isidentifier():
            raise ValueError("an argument without a name")
        self._names.append(name)
        return f"{as_json(name)}: "

    def _closing(self, sign: str) -> str:
        bracket, place = self._open[-1]
        if bracket not in (_CALL, _PAIRS[sign]):
            raise ValueError("brackets that do not fit")
        if bracket == "(" and len(self._json) == place + 1:
            self._json[place] = "["
        if self._json[-1] == ", ":
            self._json.pop()
            if len(self._json) == place + 1:
                raise ValueError("a comma behind nothing")
        return {"{": "}", "[": "]"}.get(self._json[place], " ")

    def _string(self, quote: str, prefix: str, body: str) -> str:
        """Return a string as JSON, together with the one before it if it is behind one."""
        if prefix or not {*"\\\n\r"}.isdisjoint(body):
            with warnings.catch_warnings():  # of escapes that Python does not know
                warnings.simplefilter("ignore")
                body = ast.literal_eval(f"{prefix}{quote}{body}{quote}")
            if not isinstance(body, str):
                raise ValueError("bytes")
        before = self._json.pop()[:-1] if self._json[-1].endswith('"') else '"'
        return before + as_json(body)[1:]


def _value_of(word: str) -> str:
    """Return a number or a word as JSON.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is neither.
    """
    if (known := _WORDS.get(word)) is not None or _NUMBER.fullmatch(word):
        return known or word
    if len(word) > _MOST_WORD:
        raise ValueError("a number that is too long")
    value = ast.literal_eval(word)
    if not isinstance(value, int | float):
        raise ValueError("a value that JSON does not have")
    return as_json(value)


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
