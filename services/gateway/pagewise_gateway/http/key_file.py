"""API keys as operators write them: one line each, in a file or in an environment variable.

    # name: key, limits that differ from those of the --key-... options, and what else the key may do
    alice: sk-live-9f3b...
    batch: sk-live-77aa...   concurrent=4 tokens-per-minute=200000
    batch: sk-next-1c0d...
    chat:  sk-live-b21e...   priority=-10 share=frontend
    ops:   sk-live-e07f...   operator=yes

A name may have several keys, so that a key can be replaced while both the old and the new one are valid. They belong
to one client, with one set of rights. Only digests of keys are kept, made with a secret that only this process has.
"""

import hmac
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import KeyLimits

SOLE_NAME = "default"
"""The name of a key that the environment variable holds without a name. It is the owner's, and so an operator's."""

_LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})(?:\s*:\s*|\s+)(?P<key>[\x21-\x7e]+)(?P<rights>(?:\s+\S+)*)"
)
_GROUP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMITS = {
    "concurrent": "concurrent",
    "requests-per-minute": "requests_per_minute",
    "tokens-per-minute": "tokens_per_minute",
}
_RIGHTS = (*_LIMITS, "priority", "share", "operator")
_LEAST_PRIORITY = -(2**31)
LOWEST_PRIORITY = 0
"""The lowest priority that a client may ask for whose line grants none."""
MOST_KEYS = 10_000
"""How many keys there may be."""
_SECRET = secrets.token_bytes(32)


class Rights(Struct, frozen=True):
    """What the holders of the API keys of one name may do.

    Fields:
        limits: what the scheduler holds them to, over all gateways.
        priority: the lowest priority that their requests may ask for, which runs the earliest. None: any.
        share: the group of names whose requests share cached KV; empty: requests of this name share it with each other.
        operator: they see the requests of all keys in ``/debug``, and ``/metrics``.
    """

    limits: KeyLimits = KeyLimits()
    priority: int | None = LOWEST_PRIORITY
    share: str = ""
    operator: bool = False


@dataclass(slots=True)
class KeyTable:
    """The valid keys. ``names``: the name of each key, by digest. ``rights``: what each name may do."""

    names: dict[bytes, str] = field(default_factory=dict)
    rights: dict[str, Rights] = field(default_factory=dict)


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
        if match is None or match["key"].partition("=")[0] in _RIGHTS:
            raise ConfigError(f"{where}: write NAME: KEY, then what it may do, such as concurrent=4")
        name, digest = match["name"], digest_of(match["key"])
        if digest in table.names:
            raise ConfigError(f"{where}: the key of {name} is there already")
        if len(table.names) >= MOST_KEYS:
            raise ConfigError(f"{where}: more than {MOST_KEYS} keys")
        table.names[digest] = name
        table.rights.setdefault(name, Rights(usual))
        if match["rights"]:
            if name in set_in:
                raise ConfigError(f"{where}: what {name} may do is set already, in {set_in[name]}")
            set_in[name] = where
            table.rights[name] = _rights_of(match["rights"].split(), usual, where)


def read_variable(text: str, source: str, usual: KeyLimits, table: KeyTable) -> None:
    """Add the keys of an environment variable: lines as in a file, entries between commas, or one key without a name.

    Raises:
        ConfigError: as in ``read_keys``.
    """
    text = text.strip()
    if re.fullmatch(r"[^\s,:#]+", text):
        text = f"{SOLE_NAME}: {text} operator=yes"
    read_keys(text.replace(",", "\n"), source, usual, table)


def _rights_of(words: list[str], usual: KeyLimits, where: str) -> Rights:
    limits: dict[str, int | None] = {}
    others: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name in _LIMITS:
            limits[_LIMITS[name]] = _limit(name, value, where)
        elif name == "priority":
            others[name] = _priority(value, where)
        elif name == "share":
            if not _GROUP.fullmatch(value):
                raise ConfigError(f"{where}: share takes a name of up to 64 letters, digits, dots, - and _")
            others[name] = value
        elif name == "operator":
            if value not in ("yes", "no"):
                raise ConfigError(f"{where}: operator takes yes or no")
            others[name] = value == "yes"
        else:
            raise ConfigError(f"{where}: what follows the key has to be one of {', '.join(_RIGHTS)}, = and a value")
    return Rights(replace(usual, **limits), **others)


def _limit(name: str, value: str, where: str) -> int | None:
    if value == "none":
        return None
    if not (value.isdecimal() and int(value[:12]) > 0 and len(value) <= 12):
        raise ConfigError(f"{where}: {name} takes a whole number from 1, or none")
    return int(value)


def _priority(value: str, where: str) -> int:
    if re.fullmatch(r"0|-[0-9]{1,10}", value) and int(value) >= _LEAST_PRIORITY:
        return int(value)
    raise ConfigError(f"{where}: priority takes a whole number from {_LEAST_PRIORITY} to 0, the lowest one allowed")
