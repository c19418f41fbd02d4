"""Reads tool calls that are a list of calls in Python, such as ``[f(a=1), g(b="x")]``.

Gemma 3 has no format of its own; templates for it write calls like this, sometimes in a block that is fenced as
``tool_code``.

While the arguments of a call arrive, only their ends are searched. A value that is JSON is not changed, which is fast
and allows numbers of any size; Python's own parser reads all other values.
"""

import ast
import re
import unicodedata
import warnings
from collections.abc import Generator

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.reader import CallText, EndOfTextError
from pagewise_gateway.text.output_parsing.scanning import as_json, is_json

_MOST_BEGIN = 512
"""Characters in which a call has to begin. A longer text is no call."""
_BEGIN = re.compile(r"(?:```(?:tool_code|python)?\s*)?\[?\s*([A-Za-z_][\w.-]*)\(")
_MAY_BEGIN = re.compile(r"(?:`{1,3}[a-z_]*\s*)?\[?\s*(?:[A-Za-z_][\w.-]*)?")
_NEXT = re.compile(r"[\s,;]*([A-Za-z_][\w.-]*)\(")
_MAY_BE_NEXT = re.compile(r"[\s,;]*(?:[A-Za-z_][\w.-]*)?")
_MOST_DEPTH = 200
"""Nested brackets; Python has the same limit."""
_MOST_TOKENS = 65_536
"""Tokens of arguments that Python parses, which takes 0.1 s of the event loop. More tokens have to be JSON."""
_TOKEN = re.compile(r"""[()\[\]{},]|"(?:"")?|'(?:'')?|\#[^\n]*|[^()\[\]{},"'#]+""")
_OPEN_QUOTES = ("'", "''", '"', '""')
"""Ends of a text that may be quotes of a string, or begin them."""
_BODY = {
    quote: re.compile(rf"(?:[^\\{sign}]++|\\.|{again})*+", re.DOTALL)
    for sign in "\"'"
    for quote, again in ((sign, "(?!)"), (3 * sign, f"{sign}{{1,2}}(?=[^{sign}])"))
}
"""Match the contents of a string with these quotes, as far as it has come."""
_NAMES = {"true": True, "false": False, "null": None}


def pythonic_calls(source: CallText, tools: Tools) -> Generator[None]:
    """Read calls of ``tools``. A call is passed on when it is complete; only its name if it is cut off."""
    found = yield from _match(source, _BEGIN, _MAY_BEGIN)
    if found is None or found.end() > _MOST_BEGIN or found[1] not in tools:
        return
    before, source.called = source.take(found.start(1)), True
    try:
        while (found := (yield from _match(source, _NEXT, _MAY_BE_NEXT))) is not None and found.end() < _MOST_BEGIN:
            source.take(found.end())
            yield from _arguments(source, found[1])
        for closing in ["]"] * ("[" in before) + ["```"] * ("```" in before):
            if not (yield from _closing(source, closing)):
                return
    except EndOfTextError:
        if source.text.strip():
            source.content(source.text)


def _match(
    source: CallText, pattern: re.Pattern[str], beginning: re.Pattern[str]
) -> Generator[None, None, re.Match[str] | None]:
    """Wait until the pattern matches, or ``beginning`` does not, which matches beginnings of such texts."""
    while (found := pattern.match(source.text, 0, _MOST_BEGIN + 1)) is None:
        if len(source.text) >= _MOST_BEGIN or beginning.fullmatch(source.text) is None:
            return None
        yield
    return found


def _arguments(source: CallText, name: str) -> Generator[None]:
    arguments = PythonArguments()
    try:
        while (end := arguments.push(source.text)) < 0:
            source.text = ""
            yield
    except EndOfTextError:
        source.call(name)
        raise
    source.take(end)
    source.call(name)
    source.add(arguments.finish())


def _closing(source: CallText, mark: str) -> Generator[None, None, bool]:
    """Read a mark that closes the list or the block. Returns whether there is one."""
    while not (behind := source.text.lstrip()).startswith(mark):
        if not mark.startswith(behind) or len(source.text) >= _MOST_BEGIN:
            return False
        yield
    source.text = behind.removeprefix(mark)
    return True


class PythonArguments:
    """Reads the arguments of a call after its opening bracket."""

    __slots__ = ("_arguments", "_depth", "_held", "_quote", "_too_much", "_written")

    def __init__(self) -> None:
        self._written: list[str] = []
        self._arguments: list[list[str]] = [[]]  # their tokens, without comments
        self._held = ""  # the end of the text, which cannot be read before more comes
        self._quote = ""  # of the string that is open
        self._depth = 1  # the brackets that are open
        self._too_much = False  # whether the arguments stay as they are written

    def push(self, text: str) -> int:
        """Take text; return the index after the bracket that ends the call, or -1 if it does not end in this text."""
        self._written.append(text)
        at, num_held = 0, len(self._held)
        text, self._held = self._held + text, ""
        while at < len(text) and self._depth:
            at = self._in_string(text, at) if self._quote else self._token(text, at)
        if self._depth:
            return -1
        self._written[-1] = self._written[-1][: at - num_held - 1]
        return at - num_held

    def finish(self) -> str:
        """Return the arguments of a call that has ended as JSON, or the model's text if that is not possible."""
        written = "".join(self._written)
        if self._too_much:
            return written
        num_tokens = sum(map(len, self._arguments))
        texts = ["".join(tokens) for tokens in self._arguments]
        if not texts[-1].strip():  # after the last comma, or there are no arguments
            texts.pop()
        try:  # the last argument of a name counts
            values = dict(_argument(text, only_json=num_tokens > _MOST_TOKENS) for text in texts)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return written
        return "{" + ", ".join(f"{as_json(name)}: {value}" for name, value in values.items()) + "}"

    def _token(self, text: str, at: int) -> int:
        """Read the token at an index, and return the index after it. A token that may continue is held."""
        if text[at : at + 3] in _OPEN_QUOTES:
            self._held = text[at:]
            return len(text)
        found = _TOKEN.match(text, at)
        assert found is not None
        sign, end = found[0], found.end()
        if sign[0] == "#":
            self._held = "#" if end == len(text) else ""
            return end
        if sign == "," and self._depth == 1:
            self._arguments.append([])
            return end
        self._depth += (sign in "([{") - (sign in ")]}")
        self._quote = sign if sign[0] in "\"'" else ""
        if self._depth:
            self._arguments[-1].append(sign)
        self._too_much = self._too_much or self._depth > _MOST_DEPTH
        return end

    def _in_string(self, text: str, at: int) -> int:
        """Read the string that continues at an index, and return the index after it."""
        found = _BODY[self._quote].match(text, at)
        assert found is not None
        end = found.end()
        self._arguments[-1].append(text[at:end])
        if not text.startswith(self._quote, end):  # the string has not ended
            self._held = text[end:]
            return len(text)
        self._arguments[-1].append(self._quote)
        end += len(self._quote)
        self._quote = ""
        return end


def _argument(text: str, *, only_json: bool) -> tuple[str, str]:
    """Return the name of an argument, and its value as JSON. ``only_json``: the value has to be JSON.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: there is no name, or JSON has no such value.
    """
    name, _, written = text.partition("=")
    name, written = unicodedata.normalize("NFKC", name.strip()), written.strip()
    if not name.isidentifier() or not written:
        raise ValueError("an argument without a name or a value")
    if is_json(written):
        return name, written
    if only_json:
        raise ValueError("too many tokens for Python's parser")
    return name, as_json(python_value(written))


def python_value(written: str) -> object:
    """Return the value of a literal of Python, in which ``true``, ``false`` and ``null`` are names of values, too.

    Raises:
        ValueError, SyntaxError, RecursionError, MemoryError: it is none, or JSON has no such value.
    """
    with warnings.catch_warnings():  # of escapes that Python does not know
        warnings.simplefilter("ignore")
        return _value(ast.parse(f"({written}\n)", mode="eval").body)


def _value(node: ast.expr) -> object:
    """Return the value of an expression without names and calls.

    Raises:
        ValueError: it has names or calls, or its value cannot be JSON.
    """
    match node:
        case ast.Name(id) if id in _NAMES:
            return _NAMES[id]
        case ast.List(elements) | ast.Tuple(elements):
            return list(map(_value, elements))
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
    found = ast.literal_eval(node)
    if not isinstance(found, str | int | float | None):
        raise ValueError("a value that JSON does not have")
    return found


def _key(node: ast.expr | None) -> str:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        raise ValueError("a key that is no string")
    return node.value
