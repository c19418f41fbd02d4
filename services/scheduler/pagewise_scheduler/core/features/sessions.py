"""The sessions of one executor, and the last blocks of requests that have ended."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagewise_scheduler.core.memory.eviction_history import ENDED
from pagewise_scheduler.core.memory.predicted_uses import own_blocks
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock

_MOST_SESSIONS, _MOST_ENDED = 1 << 14, 1 << 10
_MOST_THINGS = 16
"""The most events, such as tools, for which the longest wait of a session is recorded."""


@dataclass(slots=True, eq=False)
class Session:
    """A session. ``last``: the last block of its last turn, which left it at ``left`` (seconds).

    ``prediction``: of its return; 0: none. ``due``: the seconds within which it returns if the hint is kept, or does
    not if it has ended; negative: no hint, or it was judged already.
    ``counted``: see ``PredictedUses.reach``. ``called``: its last turn has called tools. ``waits_for``: the event
    for which it waits; "": a hint is known. ``longest``: the seconds of its longest wait for each event so far.
    ``parent``: the number of the session with whose blocks it begins; 0: none.
    ``children``: the sessions that begin with its blocks; ended ones leave when another session joins.
    """

    number: int
    key: str
    last: CachedBlock | None = None
    request_id: str = ""
    left: float = 0.0
    prediction: int = 0
    due: float = -1.0
    counted: int = 0
    called: bool = False
    waits_for: str = ""
    longest: dict[str, float] = field(default_factory=dict)
    parent: int = 0
    children: "list[Session]" = field(default_factory=list)

    def adopt(self, child: "Session") -> None:
        """Let another session begin with the blocks of this one, unless that one has a parent already."""
        if child is not self and not child.parent:
            child.parent = self.number
            self.children = [*(one for one in self.children if one.prediction != ENDED), child]

    def has_waited(self, seconds: float) -> None:
        """A turn has come so many seconds after the last one had left."""
        if self.waits_for and (self.waits_for in self.longest or len(self.longest) < _MOST_THINGS):
            self.longest[self.waits_for] = max(seconds, self.longest.get(self.waits_for, 0.0))

    def part_of(self, thing: str) -> str:
        """Return the class of this session's waits for an event: its longest wait so far, to a power of two."""
        return str(int(self.longest[thing]).bit_length()) if thing in self.longest else ""

    def heirs(self) -> "dict[CachedBlock, Session | None]":
        """Return the blocks of this session with which live ones begin, and which session does; None: several do."""
        heirs: dict[CachedBlock, Session | None] = {}
        for child in self.children:
            if child.prediction != ENDED:
                for node in own_blocks(child.last, self.number):
                    heirs[node] = child if node not in heirs else None
        return heirs


class Sessions:
    """All sessions by API key, cache salt and name, and the last requests that have ended.

    Of more than ``_MOST_SESSIONS``, the ones that were not seen for the longest are forgotten.
    """

    def __init__(self) -> None:
        self._by_name: OrderedDict[tuple[str, str | None, str], Session] = OrderedDict()
        self._by_number: dict[int, Session] = {}
        self._count = 0
        self._ended: OrderedDict[tuple[str, str], CachedBlock] = OrderedDict()

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_name.values())

    def of(self, key: str, cache_salt: str | None, name: str, parent: str = "") -> Session:
        """Return a session, which is seen now. A new one begins with the blocks of ``parent``, if there is one."""
        full_name = key, cache_salt, name
        session = self._by_name.get(full_name)
        if session is None:
            self._count += 1
            session = self._by_name[full_name] = self._by_number[self._count] = Session(self._count, key)
            if (begins_as := self.find(key, cache_salt, parent)) is not None:
                begins_as.adopt(session)
            if len(self._by_name) > _MOST_SESSIONS:
                del self._by_number[self._by_name.popitem(last=False)[1].number]
        self._by_name.move_to_end(full_name)
        return session

    def find(self, key: str, cache_salt: str | None, name: str) -> Session | None:
        """Return a session if it is known."""
        return self._by_name.get((key, cache_salt, name))

    def numbered(self, number: int) -> Session | None:
        """Return the session of a number if it is known."""
        return self._by_number.get(number)

    def ended(self, key: str, request_id: str, last: CachedBlock) -> None:
        """A request has ended, and leaves the blocks up to ``last``."""
        self._ended[key, request_id] = last
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def last_of(self, key: str, request_id: str) -> CachedBlock | None:
        """Return the last block of a request that has ended, if it is remembered."""
        return self._ended.get((key, request_id))

    def clear(self) -> None:
        """Forget all of them."""
        self._by_name.clear()
        self._by_number.clear()
        self._ended.clear()
