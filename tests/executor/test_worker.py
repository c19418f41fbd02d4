"""The worker's thread: in which order steps are issued and answered."""

import threading
import time
from dataclasses import dataclass, field

import pytest
from pagewise_executor.runner import BesideSteps
from pagewise_executor.worker import Worker
from pagewise_shared.protocol import Copied, Hello, Inventory, StepPlan, StepResult, Welcome


@dataclass
class Step:
    """A step on a device: done when ``done`` is set."""

    plan: StepPlan
    done: threading.Event
    fails: bool = False

    @property
    def ready(self) -> bool:
        return self.done.is_set()

    def result(self) -> StepResult:
        self.done.wait()
        if self.fails:
            raise MemoryError("CUDA out of memory")
        return StepResult(self.plan.epoch, self.plan.step)


@dataclass
class Device:
    """A runner whose steps take a time that a test sets. ``refuses``: steps that cannot be issued."""

    refuses: tuple[int, ...] = ()
    fails: tuple[int, ...] = ()
    issued: list[Step] = field(default_factory=list)
    info = Hello(1, 0, "", "m", 100, 4096, 16, 1000)

    def report_to(self, report: object) -> None:
        pass

    def handle(self, message: BesideSteps) -> None:
        pass

    def inventory(self) -> Inventory | None:
        return None

    def agree(self, inventory: Inventory | None) -> None:
        pass

    def reset(self, welcome: Welcome) -> None:
        self.issued.clear()

    def close(self) -> None:
        pass

    def execute(self, plan: StepPlan) -> Step:
        if plan.step in self.refuses:
            raise MemoryError("CUDA out of memory")
        self.issued.append(Step(plan, threading.Event(), plan.step in self.fails))
        return self.issued[-1]


class Started:
    """A worker over a device that has been let in."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.answers: list[StepResult | Copied] = []
        self.worker = Worker(lambda: device)
        self.worker.start()
        self.worker.answer_to(self.answers.append)
        self.worker.put(Welcome(1, 8, 64))

    def plan(self, step: int) -> None:
        self.worker.put(StepPlan(1, step))

    def wait(self, answers: int = 0, issued: int = 0) -> None:
        deadline = time.monotonic() + 10
        while len(self.answers) < answers or len(self.device.issued) < issued:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def results(self) -> list[tuple[int, bool]]:
        return [(answer.step, answer.error is not None) for answer in self.answers]


def test_the_next_step_is_issued_while_one_is_on_the_device_whenever_its_plan_comes() -> None:
    started = Started(Device())
    started.plan(1)
    started.wait(issued=1)
    time.sleep(0.05)  # nothing is there to do but wait for the step
    started.plan(2)
    started.wait(issued=2)
    assert started.answers == []
    assert not started.worker.idle
    # It asks for the first one's result now, so that comes first whatever is ready.
    started.device.issued[1].done.set()
    started.device.issued[0].done.set()
    started.wait(answers=2)
    assert started.results() == [(1, False), (2, False)]
    started.worker.stop()


def test_a_step_that_is_done_is_answered_without_another_plan() -> None:
    started = Started(Device())
    started.plan(1)
    started.wait(issued=1)
    started.device.issued[0].done.set()
    started.wait(answers=1)
    assert started.results() == [(1, False)]
    started.worker.stop()


@pytest.mark.parametrize("where", ["when it is issued", "on the device"])
def test_a_failed_step_is_answered_after_the_one_before_it(where: str) -> None:
    issuing = where == "when it is issued"
    started = Started(Device(refuses=(2,) if issuing else (), fails=() if issuing else (2,)))
    started.plan(1)
    started.wait(issued=1)
    started.plan(2)
    started.plan(3)
    time.sleep(0.05)
    assert started.answers == []
    for step in started.device.issued:
        step.done.set()
    deadline = time.monotonic() + 10
    while len(started.answers) < 3:
        assert time.monotonic() < deadline
        for step in list(started.device.issued):
            step.done.set()
        time.sleep(0.001)
    assert started.results()[:2] == [(1, False), (2, True)]
    started.worker.put(Welcome(2, 8, 64))
    started.worker.stop()
