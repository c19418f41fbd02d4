"""Which processes to start and stop until the plan is met, and pauses between starts. Pure: no Ray, no clock."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

Kind = Literal["scheduler", "gateway", "executor"]
KINDS: tuple[Kind, ...] = ("scheduler", "executor", "gateway")
"""The kinds of process, in the order of their start."""

State = Literal["pending", "starting", "ready", "stopping", "stopped"]
"""The state of a member. pending: Ray has not placed it yet; starting: it runs and does not serve yet."""

PATIENCE = 30.0
"""Seconds that a replacement may wait for room before the old process makes room for it."""
_CHANGED = "its options or its version have changed"


@dataclass(slots=True, frozen=True)
class Member:
    """One process of the cluster as the controller sees it.

    Fields:
        digest: identifies the options and the version with which it was started.
        load: sequences that run and wait there.
        waited: seconds for which Ray has had no room for it.
    """

    name: str
    kind: Kind
    digest: str
    state: State
    load: int = 0
    waited: float = 0.0


class Start(NamedTuple):
    """Start a process of this kind under this name."""

    kind: Kind
    name: str
    reason: str


class Stop(NamedTuple):
    """Stop a process gracefully: an executor is drained, a gateway lets its streams end."""

    name: str
    reason: str


def reconcile(wanted: Mapping[Kind, int], digests: Mapping[Kind, str], members: Sequence[Member]) -> list[Start | Stop]:
    """Return the actions to take now. Call it again after every change.

    ``wanted``: the number of processes of each kind; ``digests``: of their options. A process with other options is
    replaced, one at a time: a new process becomes ready, then the old one stops. If Ray has no room for one more, the
    old one stops first. There can be one scheduler only, so the old one always stops first. Until the next scheduler is
    ready, nothing else is replaced: other processes could take its room, and do not become ready without it. A
    replacement that has begun gives way: if Ray has no room for the scheduler, the old process stops first.
    """
    current = [one for one in members if one.kind == "scheduler" and one.digest == digests["scheduler"]]
    may_replace = sum(one.state == "ready" for one in current) >= wanted["scheduler"]
    no_room = any(_finds_no_room(one) for one in current)
    actions: list[Start | Stop] = []
    for kind in KINDS:
        some = [one for one in members if one.kind == kind]
        if kind == "scheduler":
            actions += _reconcile_scheduler(wanted[kind], digests[kind], some)
        else:
            actions += _reconcile_kind(kind, wanted[kind], digests[kind], some, may_replace, no_room)
    return actions


def _reconcile_scheduler(wanted: int, digest: str, all_members: list[Member]) -> list[Start | Stop]:
    # Two schedulers would divide the executors among them, so the next one starts when the last one has stopped.
    staying = _staying(all_members)
    if any(one.digest != digest for one in staying):
        return [Stop(one.name, _CHANGED) for one in staying if one.digest != digest]
    if len(staying) > wanted:
        return [Stop(one.name, "there may be one only") for one in staying[wanted:]]
    return [] if all_members or not wanted else [Start("scheduler", "scheduler-0", "there is none")]


def _reconcile_kind(
    kind: Kind, wanted: int, digest: str, all_members: list[Member], may_replace: bool, no_room: bool
) -> list[Start | Stop]:
    names = _free_names(kind, all_members)
    staying = _staying(all_members)
    old, new = ([one for one in staying if (one.digest == digest) is same] for same in (False, True))
    surplus = len(staying) - wanted
    if surplus < 0:
        return [Start(kind, next(names), f"{len(staying)} of {wanted} are there") for _ in range(-surplus)]
    if not old:
        why = f"there are {len(staying)} and {wanted} are wanted"
        return [Stop(one.name, why) for one in _leavable(staying)[:surplus]]
    if len(staying) < len(all_members):
        return []  # one at a time
    if not surplus:
        why = f"it replaces {_leavable(old)[0].name}"
        return [Start(kind, next(names), why)] if may_replace else []
    return _stop_one(old, new, no_room)


def _stop_one(old: list[Member], new: list[Member], no_room: bool) -> list[Start | Stop]:
    # An old process that does not serve stops at once; others when all new ones are ready, or find no room.
    first = _leavable(old)[0].name
    if no_room or any(map(_finds_no_room, new)):
        return [Stop(first, f"{_CHANGED}, and there is no room for one more")]
    return [Stop(first, _CHANGED)] if _all_ready(new) or not _all_ready(old) else []


def _staying(members: Sequence[Member]) -> list[Member]:
    return [one for one in members if one.state not in ("stopping", "stopped")]


def _all_ready(members: Sequence[Member]) -> bool:
    return all(one.state == "ready" for one in members)


def _finds_no_room(member: Member) -> bool:
    return member.state == "pending" and member.waited > PATIENCE


def _leavable(members: Sequence[Member]) -> list[Member]:
    """Return members in the order in which they should stop: not serving first, then by load, then highest number."""
    return sorted(members, key=lambda one: (one.state == "ready", one.load, -_number(one.name)))


def _free_names(kind: Kind, members: Sequence[Member]) -> Iterator[str]:
    taken = {one.name for one in members}
    return (name for name in map(f"{kind}-{{}}".format, count()) if name not in taken)


def _number(name: str) -> int:
    return int(name.rsplit("-", 1)[1])


_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0
_USUAL_DEATHS = 2
"""One node that leaves may cause so many deaths in a row."""


class StartPauses:
    """Pauses before starts, by kind of process, each twice as long as the one before.

    An actor dies before its first answer if its node lacks Pagewise or has another version, or if the node dies.
    """

    def __init__(self) -> None:
        self._deaths: dict[Kind, int] = {}
        self._until: dict[Kind, float] = {}

    def died(self, kind: Kind, now: float) -> float:
        """Count a death before the first answer; return the seconds until the next start of this kind."""
        deaths = self._deaths[kind] = self._deaths.get(kind, 0) + 1
        pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(deaths - 1, 10))
        self._until[kind] = now + pause
        return pause

    def answered(self, kind: Kind) -> None:
        """A new process of this kind has answered: its pauses begin anew."""
        self._deaths.pop(kind, None)
        self._until.pop(kind, None)

    def may_start(self, kind: Kind, now: float) -> bool:
        """Return whether a process of this kind may start now."""
        return now >= self._until.get(kind, now)

    def failing(self) -> list[Kind]:
        """Return the kinds with too many deaths in a row."""
        return [kind for kind, deaths in self._deaths.items() if deaths > _USUAL_DEATHS]
