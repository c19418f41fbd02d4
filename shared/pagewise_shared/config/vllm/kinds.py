"""What an option of vLLM can be here, and how its values are read."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pagewise_shared.errors import ConfigError

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT]?)")
_UNITS = {"": 1} | {unit: 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {unit: 1024**power for power, unit in enumerate("KMGT", 1)}


class Flag(NamedTuple):
    """An option of vLLM.

    Fields:
        names: how it is written; several with the same meaning or the same reason.
        text: what is here instead, or what differs. It follows "is not there: " in an error if the option is refused.
        option: the option of Pagewise that it sets; empty: it sets none.
        read: makes the value of that option; for one without a value, by its negation too.
        harmless: values that ask for nothing that is not so anyway. ``True`` and ``False`` stand for the option
            without a value, and for its ``--no-`` form.
        many: whether it takes several values.
    """

    names: tuple[str, ...]
    text: str
    option: str = ""
    read: Callable[[Any], Any] = str
    harmless: frozenset[str | bool] = frozenset()
    many: bool = False

    @property
    def switch(self) -> bool:
        """Whether it is written without a value."""
        return True in self.harmless or self.read is bool or self.read is opposite

    @property
    def accepted(self) -> bool:
        """Whether it can be given at all with an effect, or because it is always so."""
        return bool(self.option) or self.harmless not in (frozenset(), frozenset({False}))

    @property
    def nargs(self) -> int | str | None:
        """How many values ``argparse`` lets it take."""
        return 0 if self.switch else "+" if self.many else None if self.accepted else "?"

    def values(self, given: Any, name: str = "") -> dict[str, Any]:
        """Return what it sets, by the names of our options.

        ``given``: a text, or whether a switch is on. ``name``: as it was written.

        Raises:
            ConfigError: it is refused, or its value is.
        """
        if not isinstance(given, list) and given in self.harmless:
            return {}
        if not self.option:
            name = name or self.names[0]
            value = f" {given}" if isinstance(given, str) and self.accepted else ""
            raise ConfigError(f"{name}{value}, an option of vLLM, is not there: {self.text}")
        try:
            return {self.option: self.read(given)}
        except (ValueError, KeyError):
            raise ConfigError(f"{name or self.names[0]}: {given!r} cannot be used: {self.text}") from None


def alias(names: str, option: str, text: str = "", read: Callable[[Any], Any] = str, many: bool = False) -> Flag:
    """An option that is called ``option`` here. ``read``: turns its values, with their units, into ours."""
    return Flag(tuple(names.split()), text, option, read, many=many)


def always(names: str, text: str) -> Flag:
    """An option without a value that asks for what is always so; its negation is refused."""
    return Flag(tuple(names.split()), text, harmless=frozenset({True}))


def only(names: str, values: str, text: str) -> Flag:
    """An option of which these values ask for what is so anyway; all others are refused."""
    return Flag(tuple(names.split()), text, harmless=frozenset(values.split()))


def refused(names: str, text: str) -> Flag:
    """Options that there are not; ``--no-`` in front of them asks for nothing."""
    return Flag(tuple(names.split()), text, harmless=frozenset({False}))


def opposite(given: Any) -> bool:
    """Read an option without a value that switches ours off."""
    return not given


def count(text: str) -> int | str:
    """Read a number as vLLM does: 1k is 1,000, and 1K is 1,024; -1 and auto are what fits."""
    if text in ("-1", "auto"):
        return "auto"
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2]])


def bytes_of(text: str) -> str:
    """Read a number of bytes as vLLM does."""
    return f"{int(count(text))}"


def gib(text: str) -> str | None:
    """Read a size in GiB; 0 is none."""
    return f"{int(float(text) * 2**30)}" if float(text) > 0 else None


def one_of(values: Mapping[str, str]) -> Callable[[str], str]:
    """Return what reads one of these words."""
    return values.__getitem__


def api_keys(given: Any) -> str:
    """Make the value of ``PAGEWISE_API_KEYS`` of one key or several, all of them an operator's."""
    keys = [given] if isinstance(given, str) else list(given)
    if not all(re.fullmatch(r"[!\"$-+\--9;-~]+", key) for key in keys):
        raise ConfigError("--api-key: a key has a space, a comma, a colon or a # in it, or a character beyond ASCII")
    first, *others = (f"default: {key}" for key in keys)
    return ", ".join([f"{first} operator=yes", *others])
