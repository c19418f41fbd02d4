"""What is done to executors while they serve: killed, frozen, drained, cut off from the network."""

import asyncio
import random
import signal
from collections.abc import Coroutine
from dataclasses import dataclass, field
from time import monotonic

from tests.chaos.network import Namespace
from tests.chaos.processes import Cluster, Process

REJOIN_SECONDS = 30.0
"""Most that an executor that is let go on may take to be back: it may have to finish what it was at."""

LEAVE_SECONDS = 60.0
"""Most that an executor may take to end: one whose work nobody has room for waits out its --drain-timeout of 30 s."""


@dataclass
class Disturbance:
    """Something that was done to an executor. ``request_ids``: what ran on it then; ``rejoined``: seconds it took."""

    kind: str
    executor: str
    time: float
    request_ids: set[str]
    rejoined: float | None = None


@dataclass
class Monkey:
    """Disturbs one executor after the other, and starts a new one for each that is gone.

    ``pause``: seconds between two disturbances; each waits until at least two executors are ready.
    ``freeze``: seconds an executor hangs or is cut off: longer than the scheduler waits for it. ``blocks``: pool sizes
    of the executors, one for each.
    """

    cluster: Cluster
    pause: float
    freeze: float
    blocks: tuple[int, ...]
    network: Namespace | None = None
    seed: int = 0
    done: list[Disturbance] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    executors: dict[str, Process] = field(default_factory=dict)
    _busy: set[str] = field(default_factory=set)
    _tasks: "list[asyncio.Task[None]]" = field(default_factory=list)

    def start(self) -> None:
        """Start the executors, the last of them in the network namespace."""
        for number in range(len(self.blocks)):
            self._start(number)

    async def run(self, until: float) -> None:
        """Disturb until the clock says so, then undo what can be undone and wait for what was begun."""
        rng, deck = random.Random(self.seed), ["kill", "drain", "hang"]  # where there is time for a few, one of each
        while monotonic() < until:
            if not deck:
                deck = ["kill", "hang", "kill", "drain", "kill"]
                deck += ["cut off", "lossy network"] if self.network is not None else []
                rng.shuffle(deck)
            ready = await asyncio.to_thread(self.cluster.members)
            able = sorted(name for name in ready if name in self.executors and name not in self._busy)
            if len(able) >= 2:
                kind = deck.pop()
                remote = max(self.executors)
                name = remote if kind in ("cut off", "lossy network") else rng.choice(able)
                if name in able:
                    await self._disturb(kind, name)
                    await asyncio.sleep(self.pause)
            else:
                await asyncio.sleep(0.2)
        await asyncio.gather(*self._tasks)

    async def _disturb(self, kind: str, name: str) -> None:
        members = await asyncio.to_thread(self.cluster.members)
        running = {request["request_id"] for request in members[name]["requests"]} if name in members else set()
        event = Disturbance(kind, name, monotonic(), running)
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

    def _later(self, work: Coroutine[None, None, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def _replace(self, event: Disturbance, process: Process, expected: int) -> None:
        """See it end as it should, and start another under its name."""
        self._start(int(event.executor.rsplit("-", 1)[1]))
        self._busy.discard(event.executor)
        try:
            code = await asyncio.to_thread(process.wait, LEAVE_SECONDS)
        except AssertionError as error:
            self.failures.append(str(error))
            return
        if code != expected:
            self.failures.append(f"{event.kind} {event.executor}: exit code {code}, not {expected}\n{process.tail()}")

    async def _let_go_on(self, event: Disturbance) -> None:
        """After a while, let it go on; it has to be back soon."""
        await asyncio.sleep(self.freeze)
        if event.kind == "hang":
            self.executors[event.executor].signal(signal.SIGCONT)
        else:
            assert self.network is not None
            self.network.heal()
        began = monotonic()
        if event.kind != "lossy network":  # through which it may well stay a member
            await asyncio.sleep(1.0)
        while event.executor not in await asyncio.to_thread(self.cluster.members):
            if monotonic() - began > REJOIN_SECONDS:
                tail = self.executors[event.executor].tail()
                self.failures.append(f"{event.executor} is not back {REJOIN_SECONDS:g} s after {event.kind}:\n{tail}")
                return
            await asyncio.sleep(0.1)
        event.rejoined = monotonic() - began
        self._busy.discard(event.executor)

    def _start(self, number: int) -> None:
        name, last = f"executor-{number}", number == len(self.blocks) - 1
        prefix = self.network.prefix if self.network is not None and last else ()
        options = (f"--num-blocks={self.blocks[number]}",)
        self.executors[name] = self.cluster.start_executor(name, *options, prefix=prefix)
