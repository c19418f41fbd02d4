"""The worker thread, which alone uses the model and the device."""

import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from pagewise_shared.logs import about
from pagewise_shared.protocol import (
    AdapterLoaded,
    Copied,
    Found,
    GrammarCompiled,
    Hello,
    Inventory,
    StepError,
    StepPlan,
    StepResult,
    StoredDropped,
    StoredGone,
    Welcome,
)

from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_executor.runner import BesideSteps, Counted, FinishedStep, PendingStep, Runner

log = logging.getLogger(__name__)

_LOOK_SECONDS = 2e-4
"""Seconds between two checks whether the device has finished a step, while no other plan has arrived."""

Answer = Callable[[StepResult | Copied | Found | StoredDropped | StoredGone | AdapterLoaded | GrammarCompiled], None]
_Question = concurrent.futures.Future[Inventory | None]


class _Issued(NamedTuple):
    plan: StepPlan
    step: PendingStep


class Worker:
    """The thread that builds the runner and owns it. It handles Welcomes and plans in order.

    After a step has failed, it answers every plan with the same error until the next Welcome. ``failed``: gets the
    exception if the thread ends by one, after which this process cannot compute.

    The model is loaded on this thread too, because torch keeps a pool of CPU threads for each thread that computes. A
    second pool would make more threads wait for work than there are cores, and slow down every operation.
    """

    def __init__(self, build: Callable[[], Runner]) -> None:
        self._build = build
        self._built: concurrent.futures.Future[Hello] = concurrent.futures.Future()
        self._runner: Runner
        self._answer: Answer
        self._inbox: queue.SimpleQueue[Welcome | StepPlan | _Question | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._epoch, self._step = 0, 0
        self._error: StepError | None = None
        self._waiting = True
        self.dropped = 0
        self.failed: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def idle(self) -> bool:
        """Whether the thread has nothing to do: no step runs, and no plan waits."""
        return self._waiting and self._inbox.empty()

    @property
    def counted(self) -> Counted:
        """The totals of the runner's counters."""
        return self._runner.counted

    def start(self) -> Hello:
        """Start the thread and wait for its runner.

        Raises:
            Exception: the exception of building the runner.
        """
        self._thread.start()
        return self._built.result()

    def answer_to(self, answer: Answer) -> None:
        """Pass all results to ``answer``, which is called on any thread. Must be called before the first ``put``."""
        self._answer = answer
        self._runner.report_to(answer)

    def put(self, message: Welcome | StepPlan) -> None:
        """Queue a message for the thread."""
        self._inbox.put(message)

    def handle(self, message: BesideSteps) -> None:
        """Handle a message that waits for no step; on any thread."""
        self._runner.handle(message)

    def inventory(self) -> "concurrent.futures.Future[Inventory | None]":
        """Ask the runner for its inventory. No step may be under way."""
        question: _Question = concurrent.futures.Future()
        self._inbox.put(question)
        return question

    def stop(self) -> None:
        """Let the thread finish all queued work, and wait for its end."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._runner = self._build()
        except BaseException as error:
            self._built.set_exception(error)
            return
        self._built.set_result(self._runner.info)
        try:
            self._work()
            self._runner.close()
        except BaseException as error:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # the service has ended and cancelled it
                self.failed.set_exception(error)

    def _work(self) -> None:
        pending: _Issued | None = None
        while True:
            if pending is not None and pending.step.ready:
                self._finish(pending)
                pending = None
            # While a step runs on the device, the next plan may come at any moment. It is issued before the wait for
            # the running step, so that the device always has work.
            self._waiting = pending is None
            try:
                message = self._inbox.get(timeout=None if pending is None else _LOOK_SECONDS)
            except queue.Empty:
                continue
            self._waiting = False
            if message is None:
                break
            if isinstance(message, concurrent.futures.Future):
                self._finish(pending)
                pending = None
                # After a failed step the content of the blocks is unknown.
                message.set_result(self._runner.inventory() if self._error is None else None)
            elif isinstance(message, Welcome):
                self._finish(pending)
                pending = None
                self._runner.reset(message)
                self._epoch, self._step, self._error = message.epoch, 0, None
            else:
                issued = self._issue(message)
                self._finish(pending)
                pending = issued
        self._finish(pending)

    def _issue(self, plan: StepPlan) -> "_Issued | None":
        """Issue a step. If that fails, the error is reported after the result of the step before, which may succeed."""
        if plan.epoch != self._epoch or plan.step != self._step + 1:
            self.dropped += 1
            text = "dropped the plan of epoch %d, step %d: this executor is at epoch %d, step %d"
            log.warning(text, plan.epoch, plan.step, self._epoch, self._step)
            return None
        self._step = plan.step
        if self._error is None:
            try:
                return _Issued(plan, self._runner.execute(plan))
            except Exception as error:
                self._fail(plan, error)
        return _Issued(plan, FinishedStep(StepResult(plan.epoch, plan.step, error=self._error)))

    def _finish(self, pending: "_Issued | None") -> None:
        if pending is None:
            return
        plan = pending.plan
        try:
            result = pending.step.result()
        except Exception as error:
            self._fail(plan, error)
            result = StepResult(plan.epoch, plan.step, error=self._error)
        self._answer(result)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        # The scheduler's line about this step names its requests.
        where = about(epoch=plan.epoch, step=plan.step)
        log.exception("step %d of epoch %d failed", plan.step, plan.epoch, extra=where)
        kind = "internal"
        if isinstance(error, InvalidPlanError):
            kind = "invalid_plan"
        elif isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__:
            kind = "out_of_memory"
        self._error = StepError(kind, str(error)[:500])
