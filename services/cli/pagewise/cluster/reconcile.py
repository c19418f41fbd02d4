"""What has to be started and stopped, so that what runs becomes what should run. Pure: no Ray, no clock."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, NamedTuple

Kind = Literal["scheduler", "gateway", "executor"]
KINDS: tuple[Kind, ...] = ("scheduler", "executor", "gateway")
"""The kinds of process, in the order in which they are started."""

State = Literal["pending", "starting", "ready", "stopping", "stopped"]
"""Of a member. pending: Ray has not placed it yet; starting: it runs and does not serve yet."""

PATIENCE = 30.0
"""Seconds that a replacement may wait for room before what it replaces makes room for it."""
_CHANGED = "its options or its version have changed"


@dataclass(slots=True, frozen=True)
class Member:
    """One process of the cluster as the controller sees it.

    ``digest`` tells with which options and which version it was started, ``waited`` for how many seconds Ray has had no
    room for it, and ``load`` how many sequences run and wait there.
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
    """Let a process go in good order: an executor is drained, a gateway lets its streams end."""

    name: str
    reason: str


def reconcile(wanted: Mapping[Kind, int], digests: Mapping[Kind, str], members: Sequence[Member]) -> list[Start | Stop]:
    """Return what to do now. To be called again whenever something has changed.

    ``wanted``: how many processes of each kind there should be; ``digests``: with which options. What was started with
    others is replaced one at a time: first a new one is started and ready, then an old one goes. Where Ray has no room
    for one more, an old one goes first. The scheduler, of which there can be one only, always goes first. No others are
    replaced until the next one is ready: they could take its room, and would not become ready without it. So a
    replacement that has begun gives way: if Ray has no room for the scheduler, the old process goes first.
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
    """Two schedulers would share out the executors, so the next one starts when the last one has gone."""
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
    """Let an old one go once all new ones are ready or find no room; one that does not serve goes at once."""
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
    """Return members in the order in which they should go: those that do not serve yet, then those with the least to
    do; of equals the one with the highest number."""
    return sorted(members, key=lambda one: (one.state == "ready", one.load, -_number(one.name)))


def _free_names(kind: Kind, members: Sequence[Member]) -> Iterator[str]:
    taken = {one.name for one in members}
    return (name for name in map(f"{kind}-{{}}".format, count()) if name not in taken)


def _number(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
