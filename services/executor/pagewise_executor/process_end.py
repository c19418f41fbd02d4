"""Ends the process of an executor that cannot go on, because it has lost a rank or one of its threads."""

import logging
import os
import threading
import traceback
from collections.abc import Callable

log = logging.getLogger(__name__)

End = Callable[[str, int], None]
"""Ends this process, for a reason and with an exit code; called on any thread."""


def end_process(reason: str, code: int) -> None:
    """End this process at once. An orderly end is not possible, because threads may wait for a lost rank or thread."""
    try:
        log.critical("this executor ends: %s", reason)
        logging.shutdown()
    finally:
        os._exit(code)


def end_with_threads(end: End = end_process) -> None:
    """From now on this process ends with exit code 1 as soon as one of Pagewise's threads ends by an exception.

    Steps and other threads wait for the copies, adapters or messages of such a thread, and would wait for ever. A
    thread counts as Pagewise's if the exception has passed through a module of ours.
    """

    def failed(failure: threading.ExceptHookArgs) -> None:
        modules = (frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(failure.exc_traceback))
        error, thread = failure.exc_value, failure.thread
        if error is None or thread is None or not any(module.startswith("pagewise_") for module in modules):
            threading.__excepthook__(failure)
            return
        log.error("the thread %r failed", thread.name, exc_info=error)
        text = f"{error}".partition("\n")[0]
        end(f"its thread {thread.name!r} failed: {type(error).__name__}{text and ': '}{text}", 1)

    threading.excepthook = failed
