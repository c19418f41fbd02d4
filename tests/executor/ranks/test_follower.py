"""A rank behind rank 0: its reports, and its end after failures."""

import errno
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import zmq
from pagewise_executor import follower
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.ranks.messages import Failed, RankSpec, Ready, Stop, decode_from_rank
from pagewise_executor.runner import Counted
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import CancelCopies, Hello, Message, StepPlan
from pagewise_shared.service_process import CANNOT_START

INFO = Hello(1, 0, "", "model", 100, 64, 8, 10, 1024, device="cpu", dtype="float32", kernels="torch")


class Runner:
    """The functions that a follower calls, without a model. ``seconds``: that cancelling copies takes."""

    info = INFO

    def __init__(self, seconds: float = 0.0) -> None:
        self.counted, self._seconds = Counted(), seconds

    def report_to(self, report: Any) -> None:
        pass

    def handle(self, cancelled: CancelCopies) -> None:
        self.counted = Counted(num_refused=self.counted.num_refused + 1)
        time.sleep(self._seconds)

    def execute(self, plan: StepPlan) -> None:
        raise InvalidPlanError("it contradicts what this rank holds")

    def close(self) -> None:
        pass


@pytest.fixture
def ends() -> Iterator[tuple[follower._LeaderConnection, Connection]]:
    """Both ends of the link between a rank and rank 0."""
    own, other = (Connection(end.detach()) for end in socket.socketpair())
    yield follower._LeaderConnection(own, "nowhere"), other
    own.close()
    other.close()


def follow(link: follower._LeaderConnection, runner: Runner | Exception, monkeypatch: pytest.MonkeyPatch) -> int:
    def build(*_: object) -> Runner:
        if isinstance(runner, Exception):
            raise runner
        return runner

    monkeypatch.setattr(follower, "build_runner", build)
    return follower.run(link, ExecutorConfig(), RankSpec(1, 2, "nowhere"))


def said(rank_0: Connection) -> list[Message]:
    return [decode_from_rank.decode(rank_0.recv_bytes()) for _ in iter(lambda: rank_0.poll(0), False)]


def test_it_tells_what_it_has_counted_also_while_it_has_work_all_the_time(
    ends: tuple[follower._LeaderConnection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, rank_0 = ends
    monkeypatch.setattr(follower, "_COUNT_SECONDS", 0.02)
    for _ in range(5):
        link.inbox.put(CancelCopies(1, 1, "peer"))
    link.inbox.put(Stop())
    assert follow(link, Runner(seconds=0.03), monkeypatch) == 0
    ready, *counted = said(rank_0)
    assert isinstance(ready, Ready)
    assert (ready.device, ready.computes["kernels"]) == ("cpu", "torch")
    assert Counted(num_refused=5) in counted


def test_a_step_that_fails_does_not_keep_the_executor_from_starting_again(
    ends: tuple[follower._LeaderConnection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, rank_0 = ends
    link.inbox.put(StepPlan(1, 1))
    assert follow(link, Runner(), monkeypatch) not in (0, CANNOT_START)
    assert said(rank_0)[-1] == Failed("it contradicts what this rank holds", final=False)


@pytest.mark.parametrize("error", [ModelError("no room"), zmq.ZMQError(errno.EADDRINUSE)])
def test_a_model_that_cannot_be_loaded_does_and_so_does_a_port_that_is_taken(
    error: Exception, ends: tuple[follower._LeaderConnection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, rank_0 = ends
    assert follow(link, error, monkeypatch) == CANNOT_START
    assert said(rank_0) == [Failed(str(error), final=True)]


def test_a_rank_that_has_lost_a_thread_tells_rank_0_and_ends(
    ends: tuple[follower._LeaderConnection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    link, rank_0 = ends
    ended = []
    monkeypatch.setattr(follower, "end_process", lambda reason, code: ended.append((reason, code)))
    link.fail("its thread 'store' failed", 1)
    assert said(rank_0) == [Failed("its thread 'store' failed", final=False)]
    assert ended == [("its thread 'store' failed", 1)]
