"""Simulated time for real threads: one of them runs at a time, and time passes only where a thread spends or waits.

Threads of one process share an interpreter lock: while one of them spends time with it, the others of its process wait.
Other objects with a clock (a device) get the present time. A run is the same each time.
"""

import concurrent.futures
import queue
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any, Protocol

_RESULT = concurrent.futures.Future.result
LET_GO, HANDOVER = 5e-6, 50e-6
"""Seconds after which a thread that computes lets go of the interpreter lock, as every call of CUDA does, and seconds
until it has it back if another thread has taken it meanwhile, which has to be woken. They explain an H200's time to
recover from both ends within an eighth, for a thread that calls CUDA for every block that it loads."""


class Clockwork(Protocol):
    """Objects that advance beside the threads."""

    def next_time(self) -> float:
        """When something happens next; infinite: nothing will."""
        ...

    def advance(self, until: float) -> None:
        """Let everything happen up to this time."""
        ...


class Process:
    """The threads that share an interpreter lock. ``holder``: the one that spends time with it."""

    def __init__(self) -> None:
        self.holder: _Thread | None = None


class _Thread:
    def __init__(self, process: Process) -> None:
        self.process = process
        self.ready: Callable[[], bool] | None = None
        self.until = 0.0
        self.baton = threading.Semaphore(0)
        self.turn = 0
        self.held = 0.0


class StuckError(Exception):
    """All threads wait for something that will never come."""


class Machine:
    """The threads and their time. The thread that makes it belongs to ``main``.

    ``now``: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.main = Process()
        self.clockwork: Clockwork | None = None
        self._own = threading.local()
        self._threads = [self._register(self.main)]
        self._first = self._threads[0]
        self._turns = 0
        self._stuck = self._ended = False

    def _register(self, process: Process) -> _Thread:
        self._own.thread = thread = _Thread(process)
        return thread

    # ---- calls of threads ----------------------------------------------------------------------------

    def spend(self, seconds: float) -> None:
        """Compute for so long, with the interpreter lock."""
        thread = self._own.thread
        while seconds > 0:
            if thread.held >= LET_GO and self._is_wanted(thread):
                thread.held = 0.0
                self._block(None, self.now)
                self._hold(thread, HANDOVER)
            part = min(seconds, LET_GO if self._is_wanted(thread) else 10 * LET_GO)
            thread.held += part
            seconds -= part
            self._hold(thread, part)

    def _is_wanted(self, thread: "_Thread") -> bool:
        """Whether another thread of the process could run."""
        return any(
            other.process is thread.process and self._can_run(other) for other in self._threads if other is not thread
        )

    def _hold(self, thread: "_Thread", seconds: float) -> None:
        thread.process.holder = thread
        self._block(None, self.now + seconds)
        thread.process.holder = None

    def wait(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait without the interpreter lock until ``ready`` returns true; False: that took too long."""
        self._own.thread.held = 0.0
        if not ready():
            self._block(ready, inf if timeout is None else self.now + timeout)
        return ready()

    def sleep(self, seconds: float) -> None:
        """Wait for so long."""
        self._block(None, self.now + max(0.0, seconds))

    def close(self) -> None:
        """End the threads: waiting ones exit."""
        self._ended = True
        for thread in self._threads:
            thread.baton.release()

    def _block(self, ready: Callable[[], bool] | None, until: float) -> None:
        own = self._own.thread
        own.ready, own.until = ready, until
        following = self._choose()
        if following is not own:
            following.baton.release()
            own.baton.acquire()
        own.ready, own.until = None, inf
        if self._ended:
            raise SystemExit
        if self._stuck:
            raise StuckError("all threads wait for something that will never come")

    def _choose(self) -> _Thread:
        """Let time pass until a thread can go on; of several, the one that has waited the longest."""
        while True:
            able = [thread for thread in self._threads if self._can_run(thread)]
            if able:
                chosen = min(able, key=lambda thread: thread.turn)
                self._turns += 1
                chosen.turn = self._turns
                return chosen
            # Threads whose time has come wait for the interpreter lock.
            times = [thread.until for thread in self._threads if thread.until > self.now]
            following = min([*times, self.clockwork.next_time() if self.clockwork else inf])
            if following == inf:
                self._stuck = True
                return self._first
            self.now = max(self.now, following)
            if self.clockwork is not None:
                self.clockwork.advance(self.now)

    def _can_run(self, thread: _Thread) -> bool:
        if thread.process.holder not in (None, thread):
            return False
        return thread.until <= self.now or (thread.ready is not None and thread.ready())

    # ---- replacements of the standard library --------------------------------------------------------

    def thread_class(self, process: Process) -> Any:
        """Replaces ``threading.Thread``; its threads belong to ``process``."""
        machine = self

        class Thread:
            def __init__(self, target: Callable[..., object], args: tuple[Any, ...] = (), **_: object) -> None:
                self._thread = _Thread(process)
                self._ended = False

                def run() -> None:
                    machine._own.thread = self._thread
                    self._thread.baton.acquire()
                    try:
                        if not machine._ended:
                            target(*args)
                    except SystemExit:
                        pass
                    finally:
                        self._ended = True
                        machine._threads.remove(self._thread)
                        if not machine._ended:
                            machine._choose().baton.release()

                self._real = threading.Thread(target=run, daemon=True)

            def start(self) -> None:
                machine._threads.append(self._thread)
                self._real.start()

            def is_alive(self) -> bool:
                return not self._ended

            def join(self) -> None:
                machine.wait(lambda: self._ended)

        return Thread

    def make_lock(self) -> "Lock":
        """Replaces ``threading.Lock``."""
        return Lock(self)

    def make_event(self) -> "Flag":
        """Replaces ``threading.Event``."""
        return Flag(self)

    def make_queue(self) -> "Queue":
        """Replaces ``queue.SimpleQueue``."""
        return Queue(self)

    def result(self, future: "concurrent.futures.Future[Any]", timeout: float | None = None) -> Any:
        """Replaces ``concurrent.futures.Future.result``."""
        self.wait(future.done, timeout)
        if (error := future.exception(0)) is not None:
            raise error
        return _RESULT(future, 0)


class Lock:
    """Replaces ``threading.Lock``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._taken = False

    def acquire(self) -> None:
        self._machine.wait(lambda: not self._taken)
        self._taken = True

    def release(self) -> None:
        assert self._taken
        self._taken = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


class Flag:
    """Replaces ``threading.Event``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self) -> None:
        self._machine.wait(lambda: self._is_set)


class Queue:
    """Replaces ``queue.SimpleQueue``."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._items: deque[Any] = deque()

    def put(self, item: Any) -> None:
        self._items.append(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if not self._machine.wait(lambda: bool(self._items), timeout if block else 0.0):
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items
