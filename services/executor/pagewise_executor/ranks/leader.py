"""Rank 0's side of an executor of several ranks: starts the other ranks, and keeps them in step.

Rank 0 makes every decision, except decisions that need reports of all ranks (``agreement``), and sends the same frames
in the same order to all other ranks. It has a socket pair with each of them; for a rank on another node, ``nodes``
forwards the frames. When a rank ends, rank 0 reads an end of file and ends the executor's process, and the remaining
ranks end with it. An executor cannot go on without a rank, because a part of every block is lost with it.
"""

import contextlib
import logging
import queue
import shutil
import subprocess  # nosec B404
import tempfile
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import AdapterLoaded, Copied, Found, Inventory, Message, StoredDropped, StoredGone, encode
from pagewise_shared.service_process import CANNOT_START

from pagewise_executor.process_end import End, end_process
from pagewise_executor.ranks.agreement import Agreement, Answer, common_blocks
from pagewise_executor.ranks.link import END_SECONDS, end_rank, start_rank
from pagewise_executor.ranks.messages import (
    Failed,
    FromRank,
    ListBlocks,
    Listed,
    RankSpec,
    Ready,
    ResetDone,
    Stop,
    ToRank,
    decode_from_rank,
)
from pagewise_executor.ranks.nodes import Nodes
from pagewise_executor.runner import Counted

log = logging.getLogger(__name__)

_ANSWER_SECONDS = 300.0
"""How long a rank may take to finish the steps that it was sent, before the executor is ended."""

AnswerT = TypeVar("AnswerT", bound=Message)


class Follower:
    """One of the other ranks, and the connection with it.

    ``link``: rank 0's end of the socket pair. ``process``: the rank's process; None if it runs on another node.
    """

    def __init__(
        self, rank: int, link: Connection, lost: End, process: "subprocess.Popen[bytes] | None" = None
    ) -> None:
        self.rank, self.process = rank, process
        self.counted = Counted()
        self.agreement: Agreement | None = None
        self._lost = lost
        self._answers: queue.SimpleQueue[FromRank] = queue.SimpleQueue()
        self._closing = False
        self._lock = threading.Lock()
        self._link = link
        self._receiver = threading.Thread(target=self._receive, name=f"rank {rank}", daemon=True)
        self._receiver.start()

    def send(self, frame: bytes) -> None:
        """Send a frame to this rank; may be called on any thread."""
        with self._lock, contextlib.suppress(OSError):  # the rank has ended, which the receiving thread reports
            self._link.send_bytes(frame)

    def answer(self, kind: type[AnswerT], seconds: float | None = _ANSWER_SECONDS) -> AnswerT:
        """Wait for this rank's answer, of type ``kind``, to the last request. ``seconds``: None waits forever.

        Raises:
            RuntimeError: no answer comes in time, or one of another type.
        """
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"rank {self.rank} has not answered for {seconds:g} s") from None
        if not isinstance(found, kind):
            raise RuntimeError(f"rank {self.rank} answered {found!r}, not {kind.__name__}")
        return found

    def stop(self) -> None:
        """Ask this rank to end."""
        self._closing = True
        self.send(encode(Stop()))

    def wait(self) -> None:
        """Wait until this rank has ended, and kill it if it does not end. A rank on another node is killed there."""
        if self.process is not None:
            end_rank(self.process)
        self._receiver.join(END_SECONDS)
        if self.process is not None:
            self._link.close()

    def kill(self) -> None:
        """Kill this rank. A rank on another node ends when the connection with that node is closed."""
        self._closing = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _receive(self) -> None:
        try:
            while True:
                message = decode_from_rank.decode(self._link.recv_bytes())
                if isinstance(message, Failed):
                    self._closing = True
                    self._lost(f"rank {self.rank} failed: {message.reason}", CANNOT_START if message.final else 1)
                    return
                if isinstance(message, Counted):
                    self.counted = message
                elif isinstance(message, Copied | Found | StoredDropped | AdapterLoaded):
                    if self.agreement is not None:
                        self.agreement.add(self.rank, message)
                elif not isinstance(message, StoredGone):  # rank 0 reports the blocks that are gone
                    self._answers.put(message)
        except (EOFError, OSError):
            if not self._closing:
                self._lost(f"rank {self.rank} has ended", 1)


class Leader:
    """All ranks but rank 0. The constructor starts a process for each, and all begin to load the model.

    ``lost``: called when a rank has ended or does not answer as it should. ``nodes``: the other nodes, which have all
    joined; None if all ranks are on this node. ``spec``: describes rank 0.
    """

    rank = 0

    def __init__(self, config: ExecutorConfig, lost: End = end_process, nodes: Nodes | None = None) -> None:
        self.size = config.tensor_parallel
        self.nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="pagewise-ranks-")) if nodes is None else None
        self._report_loss = lost
        self._agreement: Agreement | None = None
        self._num_steps = 0
        folder, store = str(self._folder or ""), nodes.store if nodes is not None else ""
        on_host, here = (nodes.on_host, nodes.per_node) if nodes is not None else (self.size, self.size)
        self.spec, *others = (RankSpec(rank, self.size, folder, store, rank, on_host) for rank in range(here))
        self.followers = []
        for spec in others:
            link, process = start_rank(spec, config)
            self.followers.append(Follower(spec.rank, link, self._lost, process))
        if nodes is not None:
            links = nodes.admit(self._lost)
            self.followers += [Follower(rank, link, self._lost) for rank, link in links.items()]

    def listener(self) -> int | None:
        """Hand over the socket on which rank 0 answers ranks on other nodes; None if there are none."""
        return None if self.nodes is None else self.nodes.listener.detach()

    def send(self, message: ToRank) -> None:
        """Send a message to all other ranks; may be called on any thread."""
        frame = encode(message)
        for follower in self.followers:
            follower.send(frame)

    def begin_step(self, plan: ToRank) -> None:
        """Send a plan, which rank 0 has checked, to all other ranks."""
        self._num_steps += 1
        self.send(plan)

    def ready(self) -> list[Ready]:
        """Wait until all other ranks are ready, and return their ``Ready`` messages in the order of ranks."""
        return [follower.answer(Ready, None) for follower in self.followers]

    def await_reset(self, epoch: int) -> None:
        """Wait until all other ranks have been reset for ``epoch`` after as many steps as rank 0 has run.

        Without this, a rank that is still in a step, or has failed in one, would contribute to the sums of later steps.
        The executor ends if a rank does not answer, or has run another number of steps.
        """
        if self._agreement is not None:
            self._agreement.reset(epoch)
        expected, self._num_steps = ResetDone(epoch, self._num_steps), 0
        for follower in self.followers:
            try:
                found = follower.answer(ResetDone)
            except RuntimeError as error:
                self.give_up(str(error))
                raise
            if found != expected:
                self.give_up(f"rank {follower.rank} is at {found}, rank 0 at {expected}")

    def agree(self, report: Callable[[Answer], None]) -> Agreement:
        """Return the ``Agreement`` that joins the reports of all ranks. Rank 0 adds its own reports to it."""
        self._agreement = Agreement(self.size, report)
        for follower in self.followers:
            follower.agreement = self._agreement
        return self._agreement

    def common_blocks(self, own: Callable[[], Inventory | None], *, renumber: bool) -> Inventory | None:
        """Return the inventory of the blocks that all ranks hold. ``own``: returns the inventory of rank 0.
        ``renumber``: see ``agreement.common_blocks``."""
        self.send(ListBlocks())
        each = [own(), *(follower.answer(Listed).inventory for follower in self.followers)]
        return common_blocks(each, renumber=renumber)

    def _lost(self, reason: str, code: int) -> None:
        """End the executor: a rank has ended, or the ranks are not in step any more."""
        self._remove_folder()
        self._report_loss(reason, code)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def give_up(self, reason: str) -> None:
        """End the executor, because its ranks are not in step any more."""
        self._lost(reason, 1)

    def stop(self) -> None:
        """Tell all other ranks to end."""
        for follower in self.followers:
            follower.stop()

    def wait(self) -> None:
        """Wait until all other ranks have ended."""
        for follower in self.followers:
            follower.wait()
        self._leave()

    def kill(self) -> None:
        """Kill all other ranks."""
        for follower in self.followers:
            follower.kill()
        self._leave()

    def _leave(self) -> None:
        """Remove the folder through which the ranks found each other, and close the connections with other nodes."""
        self._remove_folder()
        if self.nodes is not None:
            self.nodes.close()
