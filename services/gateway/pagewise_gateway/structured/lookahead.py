"""Regular expressions with look-ahead, which llguidance does not have."""

import re

_TIME = r"(?:\d+H(?:\d+M)?(?:\d+(?:[.,]\d+)?S)?|\d+M(?:\d+(?:[.,]\d+)?S)?|\d+(?:[.,]\d+)?S)"
_KNOWN = {
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]@(?:[A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": (
        rf"^P(?:\d+W|(?:\d+Y(?:\d+M)?(?:\d+D)?|\d+M(?:\d+D)?|\d+D)(?:T{_TIME})?|T{_TIME})$"
    ),
}
"""Zod 4's expressions of e-mail addresses and durations, and equivalent ones without look-ahead."""
_AHEAD = "^(?="
_UNIT = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)
"""An escaped character, a class of characters, or any other character."""


def without_lookahead(pattern: str) -> list[str]:
    """Split an expression into several that all have to match. A look-ahead at its beginning becomes one of them; other
    look-around stays, and is refused when it is compiled."""
    pattern = _KNOWN.get(pattern, pattern)
    found = []
    while pattern.startswith(_AHEAD) and (end := _group_end(pattern, len(_AHEAD))) > 0:
        found.append(f"^(?:{pattern[len(_AHEAD) : end]})")
        pattern = f"^{pattern[end + 1 :]}"
    return [pattern, *found]


def _group_end(pattern: str, at: int) -> int:
    """Return the end of the group that is open at ``at``; -1: none, or it is repeated, or an alternative follows."""
    depth, end = 1, -1
    for found in _UNIT.finditer(pattern, at):
        unit = found[0]
        depth += (unit == "(") - (unit == ")")
        if depth == 0 and end < 0:
            end = found.start()
        elif depth == 0 and (unit == "|" or (unit in "*+?{" and found.start() == end + 1)):
            return -1
    return end
