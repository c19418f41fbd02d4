"""Python imports this at the start of every process that the size table traces: see ``run.py``.

Each process writes to a file of its own in the folder ``SIZE_TRACE`` when it enters a product file while the file
``on`` exists there: the time (seconds of the monotonic clock) and the name of the file.
"""

import contextlib
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

_ROOMS = ("/services/", "/shared/", "/kernels/")


def _trace(folder: str, root: str) -> None:
    seen: list[tuple[float, str]] = []
    is_on = False

    def enter(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if is_on and name.startswith(root) and name[len(root) :].startswith(_ROOMS):
            seen.append((time.monotonic(), name[len(root) + 1 :]))

    def watch() -> None:
        nonlocal is_on
        written = 0
        while True:
            is_on = os.path.exists(f"{folder}/on")
            if len(seen) > written and not is_on:
                with contextlib.suppress(OSError), open(f"{folder}/{os.getpid()}", "a") as file:
                    file.writelines(f"{moment} {name}\n" for moment, name in seen[written:])
                written = len(seen)
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    sys.settrace(enter)
    threading.settrace(enter)


if "SIZE_TRACE" in os.environ:
    _trace(os.environ["SIZE_TRACE"], os.environ["SIZE_ROOT"])
