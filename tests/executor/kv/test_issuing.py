"""Steps and copies take turns to issue work to the device, and none waits for the other for ever."""

import threading
import time
from collections.abc import Callable

from pagewise_executor.kv.issuing import Issuing


def begin(run: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def test_a_copy_waits_while_a_step_is_issued() -> None:
    issuing, order = Issuing(), []

    def copy() -> None:
        with issuing.copies():
            order.append("copy")

    with issuing.step():
        thread = begin(copy)
        thread.join(0.1)
        assert thread.is_alive()
        order.append("step")
    thread.join(10)
    assert order == ["step", "copy"]


def test_a_step_waits_for_one_piece_and_goes_before_the_next() -> None:
    issuing, order = Issuing(), []
    first, wanted = threading.Event(), threading.Event()

    def copy() -> None:
        for number in range(2):
            with issuing.copies():
                first.set()
                wanted.wait(10)
                order.append(f"piece {number}")

    def step() -> None:
        with issuing.step():
            order.append("step")

    copies = begin(copy)
    first.wait(10)
    steps = begin(step)
    while issuing._no_step.is_set():  # until it waits
        time.sleep(0.001)
    wanted.set()
    steps.join(10)
    copies.join(10)
    assert order == ["piece 0", "step", "piece 1"]


def test_a_step_may_issue_copies_and_wait_for_those_of_others() -> None:
    issuing, done = Issuing(), threading.Event()

    def copy() -> None:
        with issuing.copies():
            done.set()

    with issuing.step():
        with issuing.copies():
            thread = begin(copy)
        assert not done.wait(0.1)
        with issuing.waiting():
            assert done.wait(10)
    thread.join(10)
