"""Rank 0's side of an executor of several ranks: starts the others, and keeps them in step.

What decides anything is decided by rank 0, or agreed on by all (``agreement``); the others are told by the same frames
in the same order. The frames go through a pair of sockets with each rank, to which ``nodes`` joins those of ranks on
other nodes. When one of them ends, whoever holds the other end knows: rank 0 then ends its process, and the others end
with rank 0. There is no way to go on without a rank, whose part of every block is lost.
"""

import contextlib
import logging
import os
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
from pagewise_shared.protocol import AdapterLoaded, Copied, Found, Inventory, encode
from pagewise_shared.protocol.base import Message
from pagewise_shared.service_process import CANNOT_START

from pagewise_executor.ranks.agreement import Agreement, Answer, common_blocks
from pagewise_executor.ranks.messages import (
    Counted,
    Failed,
    FromRank,
    ListBlocks,
    Listed,
    Ready,
    Seat,
    Settled,
    Stop,
    ToRank,
    decode_from_rank,
    encode_config,
)
from pagewise_executor.ranks.nodes import Nodes
from pagewise_executor.ranks.rank_process import start_rank

log = logging.getLogger(__name__)

_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 300.0
"""How long a rank may take to finish the steps it has been told of, before it is given up."""

AnswerT = TypeVar("AnswerT", bound=Message)
Lost = Callable[[str, int], None]
"""Takes why a rank is lost, and the exit code that follows from it; called on any thread."""


def end_process(reason: str, code: int) -> None:
    """End this process at once: its threads may wait for a rank that does not answer any more."""
    log.critical("this executor ends: %s", reason)
    logging.shutdown()
    os._exit(code)


class Follower:
    """One further rank, and the frames between it and rank 0.

    ``link``: the connection with it. ``process``: its process, if that is on this node.
    """

    def __init__(
        self, rank: int, link: Connection, lost: Lost, process: "subprocess.Popen[bytes] | None" = None
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

    def tell(self, frame: bytes) -> None:
        """Send a frame."""
        with self._lock:
            self._send(frame)

    def answer(self, kind: type[AnswerT], seconds: float | None = _ANSWER_SECONDS) -> AnswerT:
        """Wait for the answer to what this rank was asked.

        Raises:
            RuntimeError: it does not come, or is another one.
        """
        try:
            found = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise RuntimeError(f"rank {self.rank} has not answered for {seconds:g} s") from None
        if not isinstance(found, kind):
            raise RuntimeError(f"rank {self.rank} answered {found!r}, not {kind.__name__}")
        return found

    def stop(self) -> None:
        """Tell it to end."""
        self._closing = True
        self.tell(encode(Stop()))

    def wait(self) -> None:
        """Wait for its end, and kill it if it does not come. One of another node is left to that node."""
        if self.process is None:
            self._receiver.join(_STOP_SECONDS)
            return
        try:
            self.process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._link.close()

    def kill(self) -> None:
        """End it at once. One of another node ends when that node is left."""
        self._closing = True
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _send(self, frame: bytes) -> None:
        with contextlib.suppress(OSError):  # it has ended: the thread that receives says so
            self._link.send_bytes(frame)

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
                elif isinstance(message, Copied | Found | AdapterLoaded):
                    if self.agreement is not None:
                        self.agreement.add(self.rank, message)
                else:
                    self._answers.put(message)
        except (EOFError, OSError):
            if not self._closing:
                self._lost(f"rank {self.rank} has ended", 1)


class Leader:
    """The ranks behind rank 0, one process each, which begin to load at once.

    ``lost``: called when one of them has ended, or does not do what it should. ``nodes``: the other nodes, if there are
    any, which have all joined. ``seat``: of rank 0.
    """

    rank = 0

    def __init__(self, config: ExecutorConfig, lost: Lost = end_process, nodes: Nodes | None = None) -> None:
        self.size = config.tensor_parallel
        self.nodes = nodes
        self._folder = Path(tempfile.mkdtemp(prefix="pagewise-ranks-")) if nodes is None else None
        self._report_loss = lost
        self._agreement: Agreement | None = None
        self._num_steps = 0
        folder, store = str(self._folder or ""), nodes.store if nodes is not None else ""
        on_host, here = (nodes.on_host, nodes.per_node) if nodes is not None else (self.size, self.size)
        self.seat, *others = (Seat(rank, self.size, folder, store, rank, on_host) for rank in range(here))
        self.followers = [self._start(seat, config) for seat in others]
        if nodes is not None:
            links = nodes.admit(self._lost)
            self.followers += [Follower(rank, link, self._lost) for rank, link in links.items()]

    def _start(self, seat: Seat, config: ExecutorConfig) -> Follower:
        """Start a rank on this node."""
        link, process = start_rank()
        with contextlib.suppress(OSError):  # it has ended: its follower says so
            link.send_bytes(encode(seat))
            link.send_bytes(encode_config(config))
        return Follower(seat.rank, link, self._lost, process)

    def tell(self, message: ToRank) -> None:
        """Forward a message to all other ranks; may be called on any thread."""
        frame = encode(message)
        for follower in self.followers:
            follower.tell(frame)

    def begin_step(self, plan: ToRank) -> None:
        """Forward a plan that rank 0 has found to be right."""
        self._num_steps += 1
        self.tell(plan)

    def ready(self) -> list[Ready]:
        """Wait until all other ranks are ready; return what they say of themselves."""
        return [follower.answer(Ready, None) for follower in self.followers]

    def settle(self, epoch: int) -> None:
        """Wait until the other ranks have been reset for ``epoch``, behind as many steps as rank 0.

        Without that, a rank that is still in a step, or has failed in one, would take part in the sums of later ones.
        """
        if self._agreement is not None:
            self._agreement.reset(epoch)
        expected, self._num_steps = Settled(epoch, self._num_steps), 0
        for follower in self.followers:
            try:
                found = follower.answer(Settled)
            except RuntimeError as error:
                self.give_up(str(error))
                raise
            if found != expected:
                self.give_up(f"rank {follower.rank} is at {found}, rank 0 at {expected}")

    def agree(self, report: Callable[[Answer], None]) -> Agreement:
        """Return what joins the reports of all ranks; rank 0 adds its own."""
        self._agreement = Agreement(self.size, report)
        for follower in self.followers:
            follower.agreement = self._agreement
        return self._agreement

    def common_blocks(self, own: Callable[[], Inventory | None]) -> Inventory | None:
        """Return the inventory of what all ranks hold; ``own``: returns that of rank 0."""
        self.tell(ListBlocks())
        return common_blocks([own(), *(follower.answer(Listed).inventory for follower in self.followers)])

    def _lost(self, reason: str, code: int) -> None:
        self._remove_folder()
        self._report_loss(reason, code)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def give_up(self, reason: str) -> None:
        """End the executor: its ranks are not in step any more."""
        self._lost(reason, 1)

    def stop(self) -> None:
        """Tell all other ranks to end."""
        for follower in self.followers:
            follower.stop()

    def wait(self) -> None:
        """Wait for the end of all other ranks."""
        for follower in self.followers:
            follower.wait()
        self._leave()

    def kill(self) -> None:
        """End all other ranks at once."""
        for follower in self.followers:
            follower.kill()
        self._leave()

    def _leave(self) -> None:
        """Leave the place where the ranks have met, and the other nodes."""
        self._remove_folder()
        if self.nodes is not None:
            self.nodes.close()
