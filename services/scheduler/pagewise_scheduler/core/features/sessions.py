"""The sessions of one executor, and the last blocks of requests that have ended."""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pagewise_scheduler.core.memory.eviction_history import ENDED
from pagewise_scheduler.core.memory.predicted_uses import own_blocks
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

_MOST_SESSIONS, _MOST_ENDED = 1 << 14, 1 << 10
_LEAST_BLOCKS, _SHARE = 1 << 18, 2
"""Sessions hold so many blocks at most, or so many times the blocks of all tiers if these are more; requests too."""
_MOST_THINGS = 16
"""The most events, such as tools, for which the longest wait of a session is recorded."""


@dataclass(slots=True, eq=False)
class Session:
    """A session. ``name``: its API key, cache salt and name. ``last``: the last block of its last turn, which left it
    at ``left`` (seconds).

    ``prediction``: of its return; 0: none. ``due``: the seconds within which it returns if the hint is kept, or does
    not if the hint is that it ``ends``; negative: no hint, or it was judged already.
    ``counted``: see ``PredictedUses.reach``. ``called``: its last turn has called tools. ``waits_for``: the event
    for which it waits; "": a hint is known. ``longest``: the seconds of its longest wait for each event so far.
    ``parent``: the number of the session with whose blocks it begins; 0: none. ``has_children``: another session has
    begun with its blocks, or will.
    """

    number: int
    name: tuple[str, str | None, str]
    last: CachedBlock | None = None
    request_id: str = ""
    left: float = 0.0
    prediction: int = 0
    due: float = -1.0
    ends: bool = False
    counted: int = 0
    called: bool = False
    waits_for: str = ""
    longest: dict[str, float] = field(default_factory=dict)
    parent: int = 0
    has_children: bool = False

    @property
    def key(self) -> str:
        """Its API key."""
        return self.name[0]

    @property
    def is_hinted(self) -> bool:
        """Whether its prediction is a client's, of its return."""
        return self.due >= 0 and not self.ends

    def adopt(self, child: "Session") -> None:
        """Let another session begin with the blocks of this one, unless that one has a parent already."""
        if child is not self and not child.parent:
            child.parent, self.has_children = self.number, True

    def has_waited(self, seconds: float) -> None:
        """A turn has come so many seconds after the last one had left."""
        if self.waits_for and (self.waits_for in self.longest or len(self.longest) < _MOST_THINGS):
            self.longest[self.waits_for] = max(seconds, self.longest.get(self.waits_for, 0.0))

    def part_of(self, thing: str) -> str:
        """Return the class of this session's waits for an event: its longest wait so far, to a power of two."""
        return str(int(self.longest[thing]).bit_length()) if thing in self.longest else ""


_NameT = TypeVar("_NameT", bound=tuple[str, *tuple[str | None, ...]])
_ValueT = TypeVar("_ValueT")


class _Recent(OrderedDict[_NameT, _ValueT], Generic[_NameT, _ValueT]):
    """Values by names that begin with an API key, the newest last: at most so many values, and so many blocks.

    Values keep blocks in this process that have left all tiers. Of too many, the API key that has the most forgets its
    oldest value.
    """

    def __init__(self, most_blocks: int, most_values: int) -> None:
        super().__init__()
        self._most, self._least = most_blocks, most_blocks // most_values
        self._total, self._sizes, self._of_key = 0, dict[_NameT, int](), Counter[str]()

    def keep(self, name: _NameT, value: _ValueT, num_blocks: int) -> list[_ValueT]:
        """Add or renew a value that holds so many blocks; returns the values that are forgotten for it."""
        self._resize(name, max(num_blocks, self._least))
        self[name] = value
        self.move_to_end(name)
        forgotten: list[_ValueT] = []
        while self._total > self._most:
            key = max(self._of_key, key=self._of_key.__getitem__)
            oldest = next(one for one in self if one[0] == key)
            if oldest == name:
                break
            self._resize(oldest, 0)
            forgotten.append(self.pop(oldest))
        return forgotten

    def clear(self) -> None:
        """Forget all values."""
        super().clear()
        self._sizes.clear()
        self._of_key.clear()
        self._total = 0

    def _resize(self, name: _NameT, size: int) -> None:
        change = size - self._sizes.pop(name, 0)
        self._total += change
        self._of_key[name[0]] += change
        if size:
            self._sizes[name] = size


class Sessions:
    """All sessions, and the last requests that have ended, of an executor whose tiers have ``num_blocks`` blocks."""

    def __init__(self, num_blocks: int) -> None:
        most = max(_LEAST_BLOCKS, _SHARE * num_blocks)
        self._by_name = _Recent[tuple[str, str | None, str], Session](most, _MOST_SESSIONS)
        self._by_number: dict[int, Session] = {}
        self._count = 0
        self._ended = _Recent[tuple[str, str], CachedBlock](most, _MOST_ENDED)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_name.values())

    def of(self, key: str, cache_salt: str | None, name: str, parent: str = "") -> Session:
        """Return a session, which is seen now. A new one begins with the blocks of ``parent``, if there is one."""
        session = self.find(key, cache_salt, name)
        if session is None:
            self._count += 1
            session = self._by_number[self._count] = Session(self._count, (key, cache_salt, name))
            if (begins_as := self.find(key, cache_salt, parent)) is not None:
                begins_as.adopt(session)
        self._keep(session)
        return session

    def leave(self, session: Session, last: CachedBlock) -> None:
        """A turn leaves the blocks up to ``last`` to its session."""
        session.last = last
        self._keep(session)

    def _keep(self, session: Session) -> None:
        num_blocks = session.last.depth if session.last is not None else 0
        for forgotten in self._by_name.keep(session.name, session, num_blocks):
            del self._by_number[forgotten.number]

    def find(self, key: str, cache_salt: str | None, name: str) -> Session | None:
        """Return a session if it is known."""
        return self._by_name.get((key, cache_salt, name))

    def numbered(self, number: int) -> Session | None:
        """Return the session of a number if it is known."""
        return self._by_number.get(number)

    def live_parent(self, session: Session) -> int:
        """Return the number of the session that keeps the blocks with which this one begins; 0: it has ended."""
        parent = self.numbered(session.parent)
        return parent.number if parent is not None and parent.prediction != ENDED else 0

    def heirs(self, parent: Session) -> dict[CachedBlock, Session | None]:
        """Return the blocks of a session with which live ones begin, and which session does; None: several do.

        A session that has not begun yet will begin with all of them.
        """
        heirs: dict[CachedBlock, Session | None] = {}
        for child in self if parent.has_children else ():
            if child.parent == parent.number and child.prediction != ENDED:
                for node in own_blocks(child.last or parent.last, parent.number):
                    heirs[node] = child if node not in heirs else None
        return heirs

    def ended(self, key: str, request_id: str, last: CachedBlock) -> None:
        """A request has ended, and leaves the blocks up to ``last``."""
        self._ended.keep((key, request_id), last, last.depth)

    def last_of(self, key: str, request_id: str) -> CachedBlock | None:
        """Return the last block of a request that has ended, if it is remembered."""
        return self._ended.get((key, request_id))

    def clear(self) -> None:
        """Forget all of them."""
        for kept in (self._by_name, self._by_number, self._ended):
            kept.clear()
