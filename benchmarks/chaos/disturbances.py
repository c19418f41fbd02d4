"""Disturbances of processes while they serve: killed, frozen, drained, cut off from the network."""

import asyncio
import random
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic
from typing import Literal

from benchmarks.chaos.network import Namespace
from benchmarks.processes import Cluster, Process

REJOIN_SECONDS = 30.0
"""Most seconds until an executor is back after it was frozen or cut off: it may have to finish a step first."""

LEAVE_SECONDS = 60.0
"""Most seconds that an executor may take to end: if no other has room for its work, it waits out its
--drain-timeout."""

GATEWAY_OPTIONS = ("--shutdown-timeout=120",)
"""Options of gateways: on a signal to leave, they let their streams end, however long these are disturbed."""

GATEWAY_LEAVE_SECONDS = 130.0
"""Most seconds that a gateway may take to end with these options."""

_MOST_LONGER = 60.0
"""Seconds for which disturbances may go on at most because not all kinds have had their turn."""

Target = Literal["executor", "gateway", "scheduler"]


@dataclass
class Disturbance:
    """Something that was done to a process.

    ``request_ids``: the requests that ran on it then, if it is an executor. ``back``: when it was as before, None as
    long as it is not. ``rejoined``: seconds that took from when it was let go on.
    """

    kind: str
    target: Target
    victim: str
    time: float
    request_ids: set[str] = field(default_factory=set)
    back: float | None = None
    rejoined: float | None = None

    def overlaps(self, begin: float, end: float) -> bool:
        """Whether it lasted at some moment between the two."""
        return self.time <= end and (self.back is None or self.back >= begin)


@dataclass
class Monkey:
    """Disturbs one executor after the other, and every so often the scheduler and a gateway. Replaces processes that
    have ended.

    The first gateway is frozen at times, but never killed: its streams may not fail, and its memory shows leaks.

    ``pause``: seconds between two disturbances of executors; each waits until at least two are ready. ``every``: the
    least and the most seconds between two of the scheduler, and between two of gateways. ``freeze``: seconds that a
    process is frozen or cut off: longer than others wait for it. ``blocks``: pool sizes of the executors, one for each.
    ``spared``: an executor that, like the first gateway, is frozen at times and never ended.
    """

    cluster: Cluster
    pause: float
    freeze: float
    blocks: tuple[int, ...]
    every: tuple[float, float] = (20.0, 40.0)
    network: Namespace | None = None
    seed: int = 0
    spared: str = ""
    done: list[Disturbance] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    executors: dict[str, Process] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _first: list[str] = field(default_factory=lambda: ["kill", "drain", "hang"])
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    def start(self) -> None:
        """Start the executors, the last of them in the network namespace."""
        for number in range(len(self.blocks)):
            self._start_executor(number)

    async def run(self, until: float) -> None:
        """Disturb until the time is over, then undo freezes and cuts, and wait for replacements that were begun."""
        await asyncio.gather(
            self._disturb_executors(until), self._disturb_gateways(until), self._disturb_scheduler(until)
        )
        await asyncio.gather(*self._tasks)

    def goes_on(self, until: float) -> bool:
        """Whether streams begin and executors are disturbed: until the time is over, but one of each kind at least,
        which takes longer on a machine with other work."""
        return (now := monotonic()) < until or (bool(self._first) and now < until + _MOST_LONGER)

    def killed(self, gateway: str, begin: float, end: float) -> bool:
        """Whether this gateway was dead at some moment of this time, so that its streams may have failed."""
        return self._happened("kill gateway", gateway, begin, end)

    def leaving(self, gateway: str, begin: float, end: float) -> bool:
        """Whether this gateway took no new requests at some moment of this time, because it had a signal to leave."""
        return self._happened("drain gateway", gateway, begin, end)

    async def wait_for(self, gateway: str) -> None:
        """Wait until a gateway that was killed, or had a signal to leave, has a successor."""
        while self.killed(gateway, now := monotonic(), now) or self.leaving(gateway, now, now):
            await asyncio.sleep(0.1)

    def _happened(self, kind: str, victim: str, begin: float, end: float) -> bool:
        return any(one.kind == kind and one.victim == victim and one.overlaps(begin, end) for one in self.done)

    async def _disturb_executors(self, until: float) -> None:
        rng, deck = random.Random(self.seed), self._first
        while self.goes_on(until):
            if not deck:
                deck = ["kill", "hang", "kill", "drain", "kill"]
                deck += [] if self.network is None else ["cut off", *(["lossy network"] if self.network.lossy else [])]
                rng.shuffle(deck)
            ready = await asyncio.to_thread(self.cluster.members)
            able = sorted(name for name in ready if name in self.executors and name not in self._busy)
            if len(able) >= 2:
                kind = deck.pop()
                remote = max(self.executors)
                if kind != "hang":
                    able = [name for name in able if name != self.spared]  # one at least, of two
                name = remote if kind in ("cut off", "lossy network") else rng.choice(able)
                if name in able:
                    await self._disturb_executor(kind, name)
                    await asyncio.sleep(self.pause)
            else:
                await asyncio.sleep(0.2)

    async def _disturb_executor(self, kind: str, name: str) -> None:
        members = await asyncio.to_thread(self.cluster.members)
        running = {request["request_id"] for request in members[name]["requests"]} if name in members else set()
        event = Disturbance(kind, "executor", name, monotonic(), running)
        self.done.append(event)
        process = self.executors[name]
        self._busy.add(name)
        if kind == "kill":
            process.signal(signal.SIGKILL)
            self._later(self._replace(event, process, -signal.SIGKILL))
        elif kind == "drain":
            process.signal(signal.SIGTERM)
            self._later(self._replace(event, process, 0))
        elif kind == "hang":
            process.signal(signal.SIGSTOP)
            self._later(self._let_go_on(event))
        else:
            assert self.network is not None
            self.network.drop(1.0 if kind == "cut off" else 0.2)
            self._later(self._let_go_on(event))

    async def _disturb_scheduler(self, until: float) -> None:
        rng, deck = random.Random(self.seed + 1), ["kill scheduler"]
        while await self._waited(rng, until):
            kind = deck.pop()
            deck = deck or rng.sample(["kill scheduler", "kill scheduler", "hang scheduler"], 3)
            event = self._begin(kind, "scheduler", "scheduler")
            process = self.cluster.scheduler
            if kind == "hang scheduler":
                await self._freeze(process)
            else:
                process.signal(signal.SIGKILL)
                await self._ended(event, process, -signal.SIGKILL)
                await asyncio.to_thread(self.cluster.start_scheduler)
            event.back = monotonic()

    async def _disturb_gateways(self, until: float) -> None:
        first, *others = self.cluster.urls
        rng, deck = random.Random(self.seed + 2), ["hang gateway", "kill gateway"]
        while others and await self._waited(rng, until):
            kind = deck.pop()
            deck = deck or rng.sample(["kill gateway", "kill gateway", "drain gateway", "hang gateway"], 4)
            name = rng.choice([first, *others] if kind == "hang gateway" else others)
            event = self._begin(kind, "gateway", name)
            process = self.cluster.gateways[name]
            if kind == "hang gateway":
                await self._freeze(process)
            else:
                number = signal.SIGKILL if kind == "kill gateway" else signal.SIGTERM
                process.signal(number)
                code = -signal.SIGKILL if number == signal.SIGKILL else 0
                await self._ended(event, process, code, GATEWAY_LEAVE_SECONDS)
                await asyncio.to_thread(self.cluster.start_gateway, name)
            event.back = monotonic()

    async def _waited(self, rng: random.Random, until: float) -> bool:
        """Wait for the next time; whether it is one before ``until``."""
        seconds = rng.uniform(*self.every)
        if monotonic() + seconds >= until:
            return False
        await asyncio.sleep(seconds)
        return True

    def _begin(self, kind: str, target: Target, victim: str) -> Disturbance:
        event = Disturbance(kind, target, victim, monotonic())
        self.done.append(event)
        return event

    async def _freeze(self, process: Process) -> None:
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(self.freeze)
        process.signal(signal.SIGCONT)

    def _later(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _replace(self, event: Disturbance, process: Process, expected: int) -> None:
        """Start another executor under its name, and see it end as it should."""
        self._start_executor(int(event.victim.rsplit("-", 1)[1]))
        self._busy.discard(event.victim)
        await self._ended(event, process, expected)
        event.back = monotonic()

    async def _ended(self, event: Disturbance, process: Process, expected: int, seconds: float = LEAVE_SECONDS) -> None:
        try:
            code = await asyncio.to_thread(process.wait, seconds)
        except AssertionError as error:
            self.failures.append(str(error))
            return
        if code != expected:
            self.failures.append(f"{event.kind} {event.victim}: exit code {code}, not {expected}\n{process.tail()}")

    async def _let_go_on(self, event: Disturbance) -> None:
        """After a while, let an executor go on; it has to be back soon."""
        await asyncio.sleep(self.freeze)
        if event.kind == "hang":
            self.executors[event.victim].signal(signal.SIGCONT)
        else:
            assert self.network is not None
            self.network.heal()
        began = monotonic()
        if event.kind != "lossy network":  # through which it may well stay a member
            await asyncio.sleep(1.0)
        while event.victim not in await asyncio.to_thread(self.cluster.members):
            if monotonic() - began > REJOIN_SECONDS:
                tail = self.executors[event.victim].tail()
                self.failures.append(f"{event.victim} is not back {REJOIN_SECONDS:g} s after {event.kind}:\n{tail}")
                return
            await asyncio.sleep(0.1)
        event.back = monotonic()
        event.rejoined = event.back - began
        self._busy.discard(event.victim)

    def _start_executor(self, number: int) -> None:
        name, last = f"executor-{number}", number == len(self.blocks) - 1
        prefix = self.network.prefix if self.network is not None and last else ()
        options = (f"--num-blocks={self.blocks[number]}",)
        self.executors[name] = self.cluster.start_executor(name, *options, prefix=prefix)
