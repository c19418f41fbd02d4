"""A further rank of an executor (``pagewise_executor.ranks``): its node starts it, and it ends with rank 0."""

import contextlib
import logging
import os
import queue
import shutil
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import load_keys
from pagewise_shared.logs import configure_logging
from pagewise_shared.protocol import (
    CancelCopies,
    DropStored,
    LoadAdapter,
    LookUp,
    Message,
    SetStoredBudgets,
    StepPlan,
    Welcome,
    encode,
)
from pagewise_shared.service_process import CANNOT_START, tune_allocator

from pagewise_executor.main import FINAL, build_runner, endpoint_to_protect, free_unused
from pagewise_executor.process_end import end_process, end_with_threads
from pagewise_executor.ranks.agreement import computes
from pagewise_executor.ranks.messages import (
    Failed,
    ListBlocks,
    Listed,
    Offered,
    RankSpec,
    Ready,
    ResetDone,
    Stop,
    ToRank,
    decode_config,
    decode_spec,
    decode_to_rank,
)
from pagewise_executor.runner import BesideSteps, Counted, PendingStep, Runner

# Not __name__, which is "__main__" in the process that runs this module.
log = logging.getLogger("pagewise_executor.follower")

_COUNT_SECONDS = 1.0


class _LeaderConnection:
    """The frames between this rank and rank 0. Messages that wait for steps are put into ``inbox``."""

    def __init__(self, connection: Connection, folder: str) -> None:
        self._folder = folder
        self.inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
        self.runner: Runner | None = None
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        with self._lock, contextlib.suppress(OSError):  # rank 0 has ended, and so does this process
            self._connection.send_bytes(encode(message))

    def fail(self, reason: str, code: int) -> None:
        """Send rank 0 the reason of this rank's failure, and end this process."""
        self.send(Failed(reason[:500], False))
        end_process(reason, code)

    def receive(self) -> None:
        """Receive until rank 0 ends, and end this process then, even if its other threads are in a call that waits."""
        try:
            while True:
                message = decode_to_rank.decode(self._connection.recv_bytes())
                if isinstance(message, BesideSteps) and self.runner is not None:
                    self.runner.handle(message)
                else:
                    self.inbox.put(message)
        except (EOFError, OSError):
            if self._folder:
                shutil.rmtree(self._folder, ignore_errors=True)  # rank 0 may have been killed
            os._exit(1)


def main(argv: list[str]) -> int:
    """Run this rank until rank 0 ends or stops it; returns the process's exit code. ``argv``: the socket's number."""
    connection = Connection(int(argv[1]))
    spec = decode_spec(connection.recv_bytes())
    config = decode_config(connection.recv_bytes())
    configure_logging(config.log_level, f"executor rank {spec.rank}", config.log_format)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides
    tune_allocator(computes=True, free_unused=free_unused)
    leader = _LeaderConnection(connection, spec.folder)
    end_with_threads(leader.fail)
    threading.Thread(target=leader.receive, name="rank 0", daemon=True).start()
    return run(leader, config, spec)


def run(leader: _LeaderConnection, config: ExecutorConfig, spec: RankSpec) -> int:
    """Follow rank 0 to the end; returns the process's exit code. Errors are sent to rank 0."""
    try:
        _follow(leader, config, spec)
    except Exception as error:
        # A rank that has served can do so again: a step has failed, and not the configuration.
        final = isinstance(error, FINAL) and leader.runner is None
        if not final:
            log.exception("rank %d failed", spec.rank)
        leader.send(Failed(str(error)[:500] or type(error).__name__, final))
        return CANNOT_START if final else 1
    return 0


def _follow(leader: _LeaderConnection, config: ExecutorConfig, spec: RankSpec) -> None:
    keys = load_keys(config.keys, config.key_name, endpoint_to_protect(config), config.plaintext)
    runner = build_runner(config, keys, spec)
    runner.report_to(leader.send)
    leader.runner = runner
    leader.send(Ready(runner.info.block_endpoint, runner.info.device, computes(runner.info)))
    pending: PendingStep | None = None
    num_steps = 0
    counted, counted_at = Counted(), time.monotonic()
    while True:
        message = None
        with contextlib.suppress(queue.Empty):
            message = leader.inbox.get(timeout=_COUNT_SECONDS)
        if (now := time.monotonic()) - counted_at >= _COUNT_SECONDS:
            if (found := runner.counted) != counted:
                leader.send(found)
            counted, counted_at = found, now
        if message is None:
            continue
        if pending is not None and not (isinstance(message, StepPlan) and not message.drafts):
            # A plan with drafts reads the tokens of the step before, whose result rank 0 had when it got the plan.
            pending.result()
            pending = None
        match message:
            case StepPlan():
                issued = runner.execute(message)
                num_steps += 1
                if pending is not None:
                    pending.result()
                pending = issued
            case Welcome():
                runner.reset(message)
                leader.send(ResetDone(message.epoch, num_steps))
                num_steps = 0
            case ListBlocks():
                leader.send(Listed(runner.inventory()))
            case Offered():
                runner.agree(message.inventory)
            case CancelCopies() | LookUp() | DropStored() | SetStoredBudgets() | LoadAdapter():
                runner.handle(message)
            case Stop():
                runner.close()
                return


if __name__ == "__main__":
    sys.exit(main(sys.argv))
