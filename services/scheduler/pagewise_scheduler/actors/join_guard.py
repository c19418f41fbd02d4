"""Who may join, how often, and under which name: the same rules for executors and for gateways."""

from collections.abc import Iterable

from pagewise_shared.curve import Keys

from pagewise_scheduler.actors.router_socket import PeerKind

MAX_TEXT = 256
"""Characters of a name."""

_AGAIN_SECONDS = 1.0
_BURST, _PER_SECOND = 256.0, 32.0


class JoinGuard:
    """Decides about Hellos of one kind of process. ``keys``: the allow-list, None where connections have no keys."""

    def __init__(self, kind: PeerKind, keys: Keys | None) -> None:
        self._kind = kind
        self._keys = keys
        self._allowance: dict[str, tuple[float, float]] = {}

    def in_time(self, key: str, joined: float | None, now: float) -> bool:
        """Whether a Hello may be looked at now, or comes too often.

        A process that waited for long has queued several: those that come right after a welcome are void. Apart from
        that each ``key`` has an allowance, large enough for a fleet that comes back all at once.
        """
        if joined is not None and now - joined < _AGAIN_SECONDS:
            return False
        left, since = self._allowance.get(key, (_BURST, now))
        left = min(_BURST, left + (now - since) * _PER_SECOND)
        self._allowance[key] = max(0.0, left - 1.0), now
        return left >= 1.0

    def revoked(self, keys: Iterable[str]) -> set[str]:
        """Those of ``keys`` that are not on the allow-list any more."""
        return set() if self._keys is None else set(keys) - self._keys.allowed(self._kind).keys()

    def refusal(self, name: str, key: str, others: Iterable[tuple[str, str]]) -> str | None:
        """Why the owner of ``key`` may not join under ``name``; None: it may.

        ``others``: names and keys of the processes of its kind that are in.
        """
        if len(name) > MAX_TEXT or not name.isprintable():
            return f"its name is longer than {MAX_TEXT} characters, or has some that cannot be printed"
        if self._keys is None:
            return None
        allowed = self._keys.allowed(self._kind)
        owner = allowed.get(key)
        if owner is None:
            kind = self._keys.kind(key)
            return "its key was revoked" if kind is None else f"its key is one for {kind}s"
        if name != owner and name in allowed.values():
            return f"the name {name} belongs to the key {name}, and its key is {owner}"
        if dict(others).get(name, key) != key:
            return f"{self._kind} {name} with another key is in already"
        return None
