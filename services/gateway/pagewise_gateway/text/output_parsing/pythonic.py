"""Reads tool calls that are a list of calls in Python, such as ``[f(a=1), g(b="x")]``.

Gemma 3 has no format of its own; the templates that are used with it write calls like this, sometimes in a block that
is fenced as ``tool_code``.
"""

import re
from collections.abc import Generator

from pagewise_gateway.text.output_parsing.deltas import Tools
from pagewise_gateway.text.output_parsing.python_arguments import PythonArguments
from pagewise_gateway.text.output_parsing.reader import CallText, EndOfTextError

_MOST_BEGIN = 512
"""Characters in which a call has to begin; what is longer is no call."""
_BEGIN = re.compile(r"(?:```(?:tool_code|python)?\s*)?\[?\s*([A-Za-z_][\w.-]*)\(")
_MAY_BEGIN = re.compile(r"(?:`{1,3}[a-z_]*\s*)?\[?\s*(?:[A-Za-z_][\w.-]*)?")
_NEXT = re.compile(r"[\s,;]*([A-Za-z_][\w.-]*)\(")
_MAY_BE_NEXT = re.compile(r"[\s,;]*(?:[A-Za-z_][\w.-]*)?")


def pythonic_calls(source: CallText, tools: Tools) -> Generator[None]:
    """Read calls of ``tools``. A call is passed on when it is whole, and its name alone if it is cut off."""
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
    """Match the text as soon as it is there. ``beginning``: matches beginnings of such texts."""
    while (found := pattern.match(source.text, 0, _MOST_BEGIN + 1)) is None:
        if len(source.text) >= _MOST_BEGIN or beginning.fullmatch(source.text) is None:
            return None
        yield
    return found


def _arguments(source: CallText, name: str) -> Generator[None]:
    """Read the arguments of a call."""
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
    """Read a mark that closes the list or the block, which is a part of the calls; False: it is not there."""
    while not (behind := source.text.lstrip()).startswith(mark):
        if not mark.startswith(behind) or len(source.text) >= _MOST_BEGIN:
            return False
        yield
    source.text = behind.removeprefix(mark)
    return True
