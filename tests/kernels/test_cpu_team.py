"""The threads of the CPU operations: any number of callers, and none that spins when there is nothing to do."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from pagewise_kernels.cpu.operations import PackedWeight

from tests.cpu_kernels import need_cpu_kernels

_WITHIN_A_FORK = """
import os, torch
from pagewise_kernels.cpu.operations import PackedWeight
torch.set_num_threads(2)
weight, x = PackedWeight(torch.randn(640, 1024)), torch.randn(16, 1024)
here = weight.linear(x)
if not os.fork():
    os._exit(not torch.equal(weight.linear(x), here))
assert not os.waitstatus_to_exitcode(os.wait()[1])
"""


@pytest.fixture
def three_threads() -> Iterator[None]:
    need_cpu_kernels()
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_operations_of_several_callers_at_once_compute_each_item_once() -> None:
    torch.manual_seed(0)
    weight = PackedWeight(torch.randn(1040, 512))
    inputs = [torch.randn(rows, 512) for rows in (1, 2, 7, 16)]
    torch.set_num_threads(1)
    expected = [weight.linear(x) for x in inputs]
    wrong: list[int] = []

    def call(number: int) -> None:
        torch.set_num_threads(2 + number)
        for time_ in range(200):
            i = (number + time_) % len(inputs)
            if not torch.equal(weight.linear(inputs[i]), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(number,)) for number in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@pytest.mark.usefixtures("three_threads")
def test_threads_without_work_sleep() -> None:
    weight, x = PackedWeight(torch.randn(1040, 512)), torch.randn(16, 512)

    def idle_share() -> float:
        weight.linear(x)
        began, cpu = time.perf_counter(), time.process_time()
        time.sleep(0.2)
        return (time.process_time() - cpu) / (time.perf_counter() - began)

    # Threads of other tests may compute in this process: one quiet moment is enough.
    assert any(idle_share() < 0.2 for _ in range(5))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there are no forks")
def test_a_forked_process_computes_with_threads_of_its_own() -> None:
    need_cpu_kernels()
    subprocess.run([sys.executable, "-c", _WITHIN_A_FORK], check=True, timeout=60)
