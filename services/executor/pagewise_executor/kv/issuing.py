"""Orders the threads that issue work to the device: one thread at a time, and steps before copies."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Issuing:
    """Lets one thread issue at a time.

    Every call of CUDA releases the interpreter lock for a few microseconds. If two threads make such calls at the
    same time, they take the lock from each other in each of them, and each time a thread has to be woken: both become
    many times slower. So a thread that copies waits while a step is issued, and a step waits for one piece of a copy at
    most.
    """

    def __init__(self, *, exclusive: bool = True) -> None:
        """``exclusive``: False where nothing is issued to a device, so that threads copy at the same time."""
        self._exclusive = exclusive
        self._lock = threading.Lock()
        self._no_step = threading.Event()
        self._no_step.set()
        self._stepping: int | None = None  # the thread that issues a step

    @contextmanager
    def step(self) -> Iterator[None]:
        """Issue a step within this context."""
        self._begin_step()
        try:
            yield
        finally:
            self._end_step()

    @contextmanager
    def copies(self) -> Iterator[None]:
        """Issue a piece of a copy within this context, which takes about 0.1 ms and waits for nothing. The thread that
        issues a step may issue copies, too."""
        if not self._exclusive or self._stepping == threading.get_ident():
            yield
            return
        self._no_step.wait()
        with self._lock:
            yield

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait within this context for work that other threads may have to issue first."""
        if self._stepping != threading.get_ident():
            yield
            return
        self._end_step()
        try:
            yield
        finally:
            self._begin_step()

    def _begin_step(self) -> None:
        self._no_step.clear()
        self._lock.acquire()
        self._stepping = threading.get_ident()

    def _end_step(self) -> None:
        self._stepping = None
        self._lock.release()
        self._no_step.set()
