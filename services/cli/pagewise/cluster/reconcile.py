"""What has to be started and stopped, so that what runs becomes what should run. Pure: no Ray, no clock."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal["scheduler", "gateway", "executor"]
KINDS: tuple[Kind, ...] = ("scheduler", "executor", "gateway")
"""The kinds of process, in the order in which they are started."""

State = Literal["pending", "starting", "ready", "stopping", "stopped"]
"""Of a member. pending: Ray has not placed it yet; starting: it runs and does not serve yet."""

PATIENCE = 30.0
"""Seconds that a replacement may wait for room before what it replaces makes room for it."""


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
        actions += _reconcile_kind(kind, wanted[kind], digests[kind], some, may_replace, no_room)
    return actions


def _reconcile_kind(
    kind: Kind, wanted: int, digest: str, all_members: list[Member], may_replace: bool, no_room: bool
) -> list[Start | Stop]:
    staying = [one for one in all_members if one.state not in ("stopping", "stopped")]
    leaving = len(all_members) - len(staying)
    old = [one for one in staying if one.digest != digest]
    names = {one.name for one in all_members}
    if kind == "scheduler":
        # Two schedulers would share out the executors, so the next one starts when the last one has gone.
        if old and staying:
            return [Stop(one.name, "its options or its version have changed") for one in old]
        if len(staying) > wanted:
            return [Stop(one.name, "there may be one only") for one in staying[wanted:]]
        return [] if all_members or not wanted else [Start(kind, _free_name(kind, names), "there is none")]
    if len(staying) < wanted:
        starts: list[Start | Stop] = []
        for _ in range(wanted - len(staying)):
            name = _free_name(kind, names)
            names.add(name)
            starts.append(Start(kind, name, f"{len(staying)} of {wanted} are there"))
        return starts
    if len(staying) > wanted and not old:
        return [
            Stop(one.name, f"there are {len(staying)} and {wanted} are wanted")
            for one in _leavable(staying)[: len(staying) - wanted]
        ]
    if not old or leaving:
        return []  # one at a time
    if len(staying) == wanted:
        if not may_replace:
            return []
        return [Start(kind, _free_name(kind, names), f"it replaces {_leavable(old)[0].name}")]
    new = [one for one in staying if one.digest == digest]
    settled = all(one.state == "ready" for one in new)
    no_room = no_room or any(_finds_no_room(one) for one in new)
    if settled or no_room or any(one.state != "ready" for one in old):
        why = "its options or its version have changed"
        return [Stop(_leavable(old)[0].name, f"{why}, and there is no room for one more" if no_room else why)]
    return []


def _finds_no_room(member: Member) -> bool:
    return member.state == "pending" and member.waited > PATIENCE


def _leavable(members: Sequence[Member]) -> list[Member]:
    """Return members in the order in which they should go: those that do not serve yet, then those with the least to
    do; of equals the one with the highest number."""
    return sorted(members, key=lambda one: (one.state == "ready", one.load, -_number(one.name)))


def _free_name(kind: Kind, names: set[str]) -> str:
    number = next(number for number in range(len(names) + 1) if f"{kind}-{number}" not in names)
    return f"{kind}-{number}"


def _number(name: str) -> int:
    return int(name.rsplit("-", 1)[1])
