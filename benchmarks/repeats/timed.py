"""``pagewise-gateway`` that writes for how much CPU time it has searched, in seconds, to the file ``$SEARCH_TIME``."""

import os
import sys
from pathlib import Path
from time import thread_time

from pagewise_gateway.main import main
from pagewise_gateway.repeats import RepeatWatch

VARIABLE = "SEARCH_TIME"


def timed(file: int) -> None:
    turn, total = RepeatWatch._turn, 0.0

    def timed_turn(watch: RepeatWatch) -> None:
        nonlocal total
        began = thread_time()
        turn(watch)
        total += thread_time() - began
        os.pwrite(file, f"{total:.9f}\n".encode(), 0)

    RepeatWatch._turn = timed_turn  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    timed(os.open(Path(os.environ[VARIABLE]), os.O_WRONLY | os.O_CREAT, 0o600))
    sys.exit(main())
