"""The result of a check of ``pagewise doctor``."""

from typing import Literal, NamedTuple

Level = Literal["ok", "note", "problem"]


class Finding(NamedTuple):
    """A property of this machine. ``level``: "problem" keeps Pagewise from running. ``advice``: what to do about it."""

    name: str
    value: str
    level: Level = "ok"
    advice: str = ""


def noted(name: str, value: str, advice: str) -> Finding:
    """Return a finding, which is a note if there is advice."""
    return Finding(name, value, "note" if advice else "ok", advice)


def gib(size: float) -> str:
    """Return a number of bytes as a text in GiB."""
    return f"{size / 2**30:.1f} GiB"
