"""The bystander itself: it reports nothing without disturbances, and reports them if they happen."""

import signal
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import GATEWAY
from tests.abuse.bystander import Serve, unharmed
from tests.free_cores import FreeCores


def test_a_bystander_sees_a_gateway_that_stands_still_and_nothing_else(serve: Serve, tmp_path: Path) -> None:
    with serve(tmp_path, "--simulate") as server:
        with unharmed(server):
            time.sleep(1)
        (pid,) = server.pids(GATEWAY)

        def stand_still() -> None:
            with unharmed(server):
                psutil.Process(pid).send_signal(signal.SIGSTOP)
                began, cores = time.monotonic(), FreeCores()
                while (time.monotonic() - began) * cores.share() < 2.5:
                    time.sleep(0.1)
                psutil.Process(pid).send_signal(signal.SIGCONT)
                time.sleep(0.1)

        with pytest.raises(AssertionError, match="s without a token"):
            stand_still()
