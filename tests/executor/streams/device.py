"""A device with streams in simulated time, in the place of ``torch.cuda``: copies and kernels take the time that
``Speeds`` gives them, and have their effect when it has passed.

Kernels share the device: large kernels get the part of it that small ones leave. Each direction of the link makes one
copy after the other. Two operations on the same memory at the same time, one of which writes, are a race, which is
recorded.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

import pytest
import torch

from tests.executor.streams.machine import Machine

Place = tuple[int, int]
"""A block of memory: which memory, and which block of it."""

_EPSILON = 1e-12


@dataclass(frozen=True)
class Speeds:
    """Seconds, and bytes per second, of one device and of the host that drives it.

    ``call``: the host's, of a copy or a kernel that is issued through torch. ``launch``: of one of our kernels, with
    its list of blocks. ``view``: of a view of a tensor. ``wake``: until a thread continues that waited for the device.
    ``copy_setup``: of each copy on the device.
    """

    link: float
    memory: float
    call: float = 6e-6
    launch: float = 30e-6
    view: float = 1.5e-6
    wake: float = 20e-6
    copy_setup: float = 1.5e-6


@dataclass(eq=False)
class Operation:
    """An operation of a stream: ``seconds`` of an engine. ``share``: of a kernel that leaves room for others."""

    engine: str
    seconds: float
    effect: Callable[[], None] = lambda: None
    begin: Callable[[], None] = lambda: None
    reads: frozenset[Place] = frozenset()
    writes: frozenset[Place] = frozenset()
    share: float = 1.0
    name: str = ""
    began: float = 0.0
    stream: "Stream | None" = None


class Event:
    """Replaces ``torch.cuda.Event``."""

    device: "Device"

    def __init__(self, enable_timing: bool = False, **_: object) -> None:
        self.time: float | None = None
        self._recorded = False

    def record(self, stream: "Stream | None" = None) -> None:
        self.time, self._recorded = None, True
        (stream or self.device.current()).issue(self)

    def query(self) -> bool:
        self.device.catch_up()
        return self.time is not None or not self._recorded

    def synchronize(self) -> None:
        if not self.query():
            self.device.machine.wait(self.query)
            self.device.machine.sleep(self.device.speeds.wake)

    def elapsed_time(self, end: "Event") -> float:
        assert self.time is not None
        assert end.time is not None
        return (end.time - self.time) * 1e3


class Stream:
    """Replaces ``torch.cuda.Stream``."""

    device: "Device"

    def __init__(self, *_: object, priority: int = 0, **__: object) -> None:
        self.queue: deque[Operation | Event | tuple[Event]] = deque()
        self.running = False
        self.device.streams.append(self)

    def issue(self, what: "Operation | Event | tuple[Event]") -> None:
        self.device.catch_up()
        self.queue.append(what)
        self.device.pump()

    def wait_event(self, event: Event) -> None:
        self.issue((event,))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or self.device.event_class()
        event.record(self)
        return event

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def query(self) -> bool:
        self.device.catch_up()
        return not self.queue and not self.running

    def synchronize(self) -> None:
        if not self.query():
            self.device.machine.wait(self.query)
            self.device.machine.sleep(self.device.speeds.wake)


class Device:
    """Engines "compute", "in" and "out", and the streams that use them."""

    def __init__(self, machine: Machine, speeds: Speeds) -> None:
        self.machine, self.speeds = machine, speeds
        self.streams: list[Stream] = []
        self.races: list[str] = []
        self.busy: dict[str, float] = {"compute": 0.0, "in": 0.0, "out": 0.0}
        self.log: list[tuple[float, float, str, str]] = []
        self._waiting: dict[str, deque[Operation]] = {"in": deque(), "out": deque()}
        self._left: dict[Operation, float] = {}
        self._time = 0.0
        self._own = threading.local()
        self.event_class: Any = type("Event", (Event,), {"device": self})
        self.stream_class: Any = type("Stream", (Stream,), {"device": self})
        self._default = self.stream_class()
        machine.clockwork = self

    # ---- torch.cuda ----------------------------------------------------------------------------------

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        """Stand in for the device that torch knows."""
        for name, fake in (
            ("Event", self.event_class), ("Stream", self.stream_class), ("stream", self.use),
            ("current_stream", self.current), ("set_device", lambda _: None), ("synchronize", self.synchronize),
        ):  # fmt: skip
            patch.setattr(torch.cuda, name, fake)

    def current(self, _: object = None) -> Stream:
        return getattr(self._own, "stream", self._default)

    @contextmanager
    def use(self, stream: Stream | None) -> Iterator[None]:
        before = self.current()
        self._own.stream = stream or before
        try:
            yield
        finally:
            self._own.stream = before

    def synchronize(self, _: object = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    # ---- operations ----------------------------------------------------------------------------------

    def issue(self, operation: Operation) -> None:
        self.current().issue(operation)

    def catch_up(self) -> None:
        self.advance(self.machine.now)

    def pump(self) -> None:
        """Begin all operations that can begin."""
        moved = True
        while moved:
            moved = False
            for stream in self.streams:
                while stream.queue and not stream.running:
                    head = stream.queue[0]
                    if isinstance(head, Event):
                        head.time = self._time
                    elif isinstance(head, tuple):
                        if head[0].time is None and head[0]._recorded:
                            break
                    else:
                        stream.running, head.stream = True, stream
                        if head.engine == "compute":
                            self._begin(head)
                        else:
                            self._waiting[head.engine].append(head)
                    stream.queue.popleft()
                    moved = True
        for engine, waiting in self._waiting.items():
            if waiting and not any(operation.engine == engine for operation in self._left):
                self._begin(waiting.popleft())

    def _begin(self, operation: Operation) -> None:
        for other in self._left:
            clash = (operation.writes & (other.reads | other.writes)) | (operation.reads & other.writes)
            if clash:
                self.races.append(f"{operation.name} and {other.name} touch {sorted(clash)[:3]} at once")
        operation.began = self._time
        operation.begin()
        self._left[operation] = operation.seconds

    def _rates(self) -> dict[Operation, float]:
        small = sum(operation.share for operation in self._left if operation.share < 1.0)
        large = [o for o in self._left if o.engine == "compute" and o.share == 1.0]
        rate = max(0.05, 1.0 - small) / max(1, len(large))
        return {operation: rate if operation in large else 1.0 for operation in self._left}

    def next_time(self) -> float:
        rates = self._rates()
        return min((self._time + left / rates[operation] for operation, left in self._left.items()), default=inf)

    def advance(self, until: float) -> None:
        while self._time < until:
            rates = self._rates()
            step = min(until, self.next_time()) - self._time
            self._time += step
            for operation in list(self._left):
                self.busy[operation.engine] += step
                self._left[operation] -= step * rates[operation]
                if self._left[operation] <= _EPSILON:
                    del self._left[operation]
                    operation.effect()
                    self.log.append((operation.began, self._time, operation.engine, operation.name))
                    assert operation.stream is not None
                    operation.stream.running = False
            self.pump()


@dataclass
class Rows:
    """Replaces bytes of blocks, uint8 [n, bytes]; one row represents uint8 [bytes]. ``cells``: their contents."""

    device: Device
    cells: list[Any]
    bytes: int
    on_host: bool
    at: list[int] = field(default_factory=list)
    whole: bool = True

    def places(self) -> frozenset[Place]:
        return frozenset((id(self.cells), index) for index in self.at)

    def __len__(self) -> int:
        return len(self.at)

    def __iter__(self) -> "Iterator[Rows]":
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: "int | slice") -> "Rows":
        self.device.machine.spend(self.device.speeds.view)
        at = self.at[index] if isinstance(index, slice) else [self.at[index]]
        return Rows(self.device, self.cells, self.bytes, self.on_host, at)

    def copy_(self, source: "Rows", non_blocking: bool = False) -> "Rows":
        assert non_blocking
        assert len(self) == len(source)
        speeds = self.device.speeds
        self.device.machine.spend(speeds.call)
        taken: list[Any] = []
        engine = "in" if source.on_host else "out"
        assert source.on_host != self.on_host
        self.device.issue(
            Operation(
                engine,
                speeds.copy_setup + len(self) * self.bytes / speeds.link,
                effect=lambda: self.put(taken),
                begin=lambda: taken.extend(source.cells[index] for index in source.at),
                reads=source.places(),
                writes=self.places(),
                name=f"copy {engine}",
            )
        )
        return self

    def put(self, taken: list[Any]) -> None:
        for index, content in zip(self.at, taken, strict=True):
            self.cells[index] = content
