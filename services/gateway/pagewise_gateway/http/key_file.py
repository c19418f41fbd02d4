"""API keys as operators write them: one line each, in a file or in an environment variable.

    # name: key, and limits that differ from those of the --key-... options
    alice: sk-live-9f3b...
    batch: sk-live-77aa...   concurrent=4 tokens-per-minute=200000
    batch: sk-next-1c0d...

A name may have several keys, so that a key can be replaced while both the old and the new one are valid. They belong
to one client, with one set of limits. Only digests of keys are kept, made with a secret that only this process has.
"""

import hmac
import re
import secrets
from dataclasses import dataclass, field

from msgspec.structs import replace
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

SOLE_NAME = "default"
"""The name of a key that the environment variable holds without a name."""

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:\s*:\s*|\s+)(?P<key>[\x21-\x7e]+)(?P<limits>(?:\s+\S+)*)"
)
_LIMITS = {
    "concurrent": "concurrent",
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
}
_MOST_KEYS = 10_000
_SECRET = secrets.token_bytes(32)


@dataclass(slots=True)
class KeyTable:
    """The valid keys. ``names``: the name of each key, by digest. ``limits``: the limits of each name."""

    names: dict[bytes, str] = field(default_factory=dict)
    limits: dict[str, KeyLimits] = field(default_factory=dict)


def digest_of(key: str) -> bytes:
    """Return the digest by which a key is stored and looked up.

    Nobody outside this process can compute the digest of a guessed key. So the time that a lookup takes reveals nothing
    about the valid keys, in whichever way it compares digests.
    """
    return hmac.digest(_SECRET, key.encode(errors="surrogateescape"), "sha256")


def read_keys(text: str, source: str, usual: KeyLimits, table: KeyTable) -> None:
    """Add the keys in ``text`` to ``table``. ``usual``: the limits of names for which no line sets others.

    Raises:
        ConfigError: a line cannot be understood. The text names ``source`` and the line, never a key.
    """
    set_in: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or match["key"].partition("=")[0] in _LIMITS:
            raise ConfigError(f"{where}: write NAME: KEY, then limits such as concurrent=4 if there are any")
        name, digest = match["name"], digest_of(match["key"])
        if digest in table.names:
            raise ConfigError(f"{where}: the key of {name} is there already")
        if len(table.names) >= _MOST_KEYS:
            raise ConfigError(f"{where}: more than {_MOST_KEYS} keys")
        table.names[digest] = name
        table.limits.setdefault(name, usual)
        if match["limits"]:
            if name in set_in:
                raise ConfigError(f"{where}: limits of {name} are set already, in {set_in[name]}")
            set_in[name] = where
            table.limits[name] = _limits_of(match["limits"].split(), usual, where)


def read_variable(text: str, source: str, usual: KeyLimits, table: KeyTable) -> None:
    """Add the keys of an environment variable: lines as in a file, entries between commas, or one key without a name.

    Raises:
        ConfigError: as in ``read_keys``.
    """
    text = text.strip()
    if re.fullmatch(r"[^\s,:#]+", text):
        text = f"{SOLE_NAME}: {text}"
    read_keys(text.replace(",", "\n"), source, usual, table)


def _limits_of(limits: list[str], usual: KeyLimits, where: str) -> KeyLimits:
    changes: dict[str, int | None] = {}
    for limit in limits:
        name, _, value = limit.partition("=")
        if name not in _LIMITS:
            raise ConfigError(f"{where}: what follows the key has to be one of {', '.join(_LIMITS)}, = and a number")
        if value != "none" and not (value.isdecimal() and int(value[:12]) > 0 and len(value) <= 12):
            raise ConfigError(f"{where}: {name} takes a whole number from 1, or none")
        changes[_LIMITS[name]] = None if value == "none" else int(value)
    return replace(usual, **changes)
