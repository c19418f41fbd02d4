"""Signals, exit codes and memory of the gateway, scheduler and executor processes."""

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import zmq

from pagewise_shared.config import misspelt_variables
from pagewise_shared.errors import PagewiseError

log = logging.getLogger(__name__)

CANNOT_START = 2
"""Exit code of a service that would fail again after a restart; ``pagewise serve`` then stops."""

_REASON = "this service cannot run: "

_COLLECT_AFTER = 100_000
"""Allocations between two garbage collections. Every step and every token creates objects, none of them in cycles; with
Python's default of 700 the collector would spend its time on the objects of thousands of requests."""

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1  # of prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE_BUFFER = 256 * 1024
"""Bytes from which a buffer gets its own mapping."""
_TRIM_SECONDS = 30.0


def exit_code_of(
    run: Callable[[], None], final: tuple[type[Exception], ...] = (PagewiseError, OSError, zmq.ZMQError)
) -> int:
    """Run a service until it ends, log the error that ended it, and return the exit code of its process.

    The code is 0 if the service was stopped, ``CANNOT_START`` after errors of the ``final`` types, which a restart
    would not fix, and 1 after any other error.

    A signal during the start, before the service handles it itself, ends the process from here: with 0 for SIGTERM,
    because no work has to end first, and with 130 for Ctrl-C. Without a handler, process 1 of a container would ignore
    SIGTERM.
    """
    try:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # ``pagewise serve`` has held it back so far
        run()
    except (KeyboardInterrupt, SystemExit) as stopped:
        # Threads may still load a model, and their C++ code aborts the process if the interpreter ends before them.
        os._exit(0 if isinstance(stopped, SystemExit) else 128 + signal.SIGINT)
    except Exception as error:
        errors = _members(error)
        if not all(isinstance(each, final) for each in errors):
            log.exception("this service failed")
            return 1
        for each in errors:
            log.error("%s%s", _REASON, each)
        return CANNOT_START
    return 0


def reason_in(line: str) -> str:
    """Return the reason in a log line of a service that cannot run; "" for other lines."""
    text = line
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            text = next((each for each in json.loads(line).values() if isinstance(each, str) and _REASON in each), "")
    return text.partition(_REASON)[2]


def _members(error: Exception) -> list[Exception]:
    """Return the errors in an exception group, however deeply it is nested, or the error itself if it is no group."""
    if isinstance(error, ExceptionGroup):
        return [member for inner in error.exceptions for member in _members(inner)]
    return [error]


def die_with_parent() -> None:
    """For ``preexec_fn``: have the kernel kill this process when the thread that has started it ends (Linux)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def warn_of_variables() -> None:
    """Log a warning for each environment variable that resembles an option and is none."""
    for warning in misspelt_variables(os.environ):
        log.warning("%s", warning)


def run_event_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine on uvloop if it is installed, and on asyncio's own event loop otherwise."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def num_tasks() -> int:
    """Return the number of unfinished tasks of the running event loop; 0 if none is running."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class StopSignal:
    """Waits for SIGTERM and SIGINT. Create it in a running event loop.

    Fields:
        number: the first signal; None before it.
        again: set by the second signal, after which the process should stop without waiting.
    """

    def __init__(self) -> None:
        self.number: signal.Signals | None = None
        self.again = asyncio.Event()
        self._first = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._came, number)

    async def wait(self) -> None:
        """Wait for the first signal."""
        await self._first.wait()

    def _came(self, number: signal.Signals) -> None:
        if self.number is None:
            self.number = number
            self._first.set()
        else:
            self.again.set()


def tune_garbage_collector() -> None:
    """Exclude the present objects from garbage collections, and make collections rare."""
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)


def tune_allocator(*, computes: bool = False, free_unused: Callable[[], None] | None = None) -> None:
    """Let glibc return freed memory to the operating system; other C libraries are left alone.

    glibc gives a large buffer its own mapping, but after one is freed it takes later buffers up to that size from the
    heap, where small, longer-lived ones keep their memory from being returned: a service that once had a flood of large
    requests would stay large. A fixed threshold ends this adaptation. ``computes``: keep the adaptation in an executor,
    whose every step needs large buffers and would wait for the kernel to map them.

    Free pages between used buffers are returned every half a minute. ``free_unused``: called before that, to free
    caches of the process.
    """
    if not hasattr(_LIBC, "gnu_get_libc_version"):
        return
    if not computes:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            _LIBC.mallopt(parameter, _LARGE_BUFFER)
    threading.Thread(target=_trim_forever, args=(free_unused,), name="trim", daemon=True).start()


def return_freed_memory() -> None:
    """Let glibc return its free pages to the operating system now; other C libraries are left alone."""
    if (trim := getattr(_LIBC, "malloc_trim", None)) is not None:
        trim(0)  # without Python's lock


def _trim_forever(free_unused: Callable[[], None] | None) -> None:
    while True:
        time.sleep(_TRIM_SECONDS)
        if free_unused is not None:
            free_unused()
        return_freed_memory()


def raise_file_limit() -> int:
    """Raise this process's limit of open files to the hard limit, and return it (it may be RLIM_INFINITY)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
