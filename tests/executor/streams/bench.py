"""The real scheduler core and the real worker, with a device in simulated time between: how long KV takes to come
back."""

import concurrent.futures
import queue
import random
import threading
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from pagewise_executor import profile, worker
from pagewise_executor.kv import issuing
from pagewise_executor.profile import GPU_SIZES, measure_costs, measure_tier
from pagewise_executor.tiers import host as host_tier
from pagewise_executor.tiers import host_copies, host_loads
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.recovery_plan import Recovery, RecoveryMode
from pagewise_scheduler.server.executor_checks import copy_costs
from pagewise_shared.protocol import DEVICE, HOST, Copied, StepResult, Welcome, unpack_int32s

from tests.core_requests import make_request
from tests.executor.streams.device import Device, Speeds
from tests.executor.streams.executor import StepTimes, StreamedRunner
from tests.executor.streams.machine import Machine, Process, Queue
from tests.sampling import sampling_params

PLANNING, PER_BLOCK = 100e-6, 3e-6
"""Seconds that the scheduler takes for a plan, and for each block of a prompt that it looks up."""
WIRE = 60e-6
"""Seconds that a message takes."""
BLOCK_SIZE = 16
_LEAST_ROOM = 16_384
"""Tokens of the shortest pool: in a smaller one, the cost of attention could not be measured."""


def put_in_place(patch: pytest.MonkeyPatch, machine: Machine, device: Device, process: Process) -> None:
    """Let the executor's threads run in simulated time, on the simulated device."""
    queues = SimpleNamespace(SimpleQueue=machine.make_queue, Empty=queue.Empty)
    threads = SimpleNamespace(
        Thread=machine.thread_class(process), Lock=machine.make_lock, Event=machine.make_event,
        get_ident=threading.get_ident,
    )  # fmt: skip
    clock = SimpleNamespace(perf_counter=lambda: machine.now, sleep=machine.sleep)
    for module in (host_tier, host_loads, host_copies, issuing, profile, worker):
        for name, fake in (("queue", queues), ("threading", threads), ("time", clock)):
            if hasattr(module, name):
                patch.setattr(module, name, fake)
    patch.setattr(concurrent.futures.Future, "result", lambda future, timeout=None: machine.result(future, timeout))
    device.put_in_place(patch)


class StreamedBench:
    """One executor behind one scheduler, each in a process of its own.

    ``costs``: the executor's costs of steps and copies; None: it measures them when it starts.
    """

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        speeds: Speeds,
        times: StepTimes,
        *,
        tokens: int,
        bytes_per_token: int,
        budget: int,
        costs: Costs | None = None,
    ) -> None:
        self.machine = machine = Machine()
        self.device = Device(machine, speeds)
        put_in_place(patch, machine, self.device, executor := Process())
        self._executor = executor
        longest = max(tokens, _LEAST_ROOM)
        blocks = longest // BLOCK_SIZE + 320  # so that measuring finds room beside the blocks that it copies
        self._messages: Queue = machine.make_queue()
        self._costs = costs

        def build() -> StreamedRunner:
            self.runner = runner = StreamedRunner(
                self.device, times, num_blocks=blocks, block_size=BLOCK_SIZE, num_host_blocks=2 * blocks,
                bytes_per_block=bytes_per_token * BLOCK_SIZE, max_model_len=longest + 64, budget=budget,
            )  # fmt: skip
            if self._costs is None:
                self._costs = _measured(runner, budget)
            runner.wrong.clear()  # measurements read any content
            return runner

        self.worker = worker.Worker(build)  # type: ignore[arg-type]
        self.worker.start()
        self.worker.answer_to(lambda message: self._messages.put((machine.now + WIRE, message)))
        self.worker.put(Welcome(1, 8, budget))
        self.scheduler = Scheduler(
            num_blocks=blocks, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=budget,
            tiers={HOST: 2 * blocks}, costs=self._costs, recovery="both", max_model_len=longest + 64,
        )  # fmt: skip
        self.scheduler.kv.pool.lower[0].max_arriving = 1_000_000
        rng = random.Random(1)
        self.prompt = array("i", [rng.randrange(1024) for _ in range(tokens)])
        self._number = 0
        self.first_token()
        self.recover("swap")  # stores the rest on the host

    def first_token(self) -> float:
        """Seconds from a request with the prompt to its token."""
        scheduler, machine, began = self.scheduler, self.machine, self.machine.now
        self._number += 1
        request = make_request(f"r{self._number}", self.prompt, 1, sampling_params(temperature=0.0), arrival_time=began)
        scheduler.add(request)
        machine.spend(PER_BLOCK * (len(self.prompt) // BLOCK_SIZE))
        while not request.sequences[0].finished:
            while scheduler.num_in_flight < 2:
                plan = scheduler.schedule(machine.now)
                machine.spend(PLANNING)
                if plan is None:
                    break
                machine.spend(WIRE)
                self.worker.put(plan)
            self._take()
        took = machine.now - began
        while scheduler.num_in_flight or any(tier.num_arriving for tier in scheduler.kv.pool.lower):
            self._take()
        return took

    def _take(self) -> None:
        arrives, message = self._messages.get()
        self.machine.sleep(arrives - self.machine.now)
        assert message.error is None, message.error
        if isinstance(message, StepResult):
            self.scheduler.update(message)
        else:
            assert isinstance(message, Copied)
            assert not unpack_int32s(message.bad)
            self.scheduler.copied(message)

    def push_out(self) -> None:
        """Take the whole device from the cache for a moment."""
        pool = self.scheduler.kv.pool
        blocks, copies = pool.reserve(pool.num_blocks)
        self.scheduler.plan.copy(copies)
        pool.release(blocks)

    def recover(self, mode: RecoveryMode) -> tuple[float, Recovery]:
        """Seconds to the first token of the prompt, whose KV is on the host, and the report of its recovery."""
        self.push_out()
        self.scheduler.recoveries.planner.policy.mode = mode
        recoveries: list[Recovery] = []
        self.scheduler.recoveries.emit = recoveries.append
        self.device.log.clear()
        took = self.first_token()
        assert not self.device.races, self.device.races[:3]
        assert not self.runner.wrong, self.runner.wrong[:3]
        return took, recoveries[-1]

    def close(self) -> None:
        """End the threads."""
        self.machine.close()


def _measured(runner: Any, budget: int) -> Costs:
    """The costs in the executor's Hello."""
    steps = measure_costs(runner, budget, GPU_SIZES)
    tier = measure_tier(runner, runner.copier.tiers[DEVICE], runner.host, runner.info.tiers[0], beside=True)
    seconds = {name: getattr(steps, name) * 1e-6 for name in steps.__struct_fields__}
    return Costs(**seconds, tiers=copy_costs((tier,)))


H200 = Speeds(link=55e9, memory=4.2e12)
"""With the link as its specification promises."""
H200_SLOW = Speeds(link=33e9, memory=4.2e12)
"""With the link at which loading alone takes as long as it was measured to take."""
QWEN3 = StepTimes(begin=0.4e-3, issue=1.5e-3, step=0.69e-3, token=3.0e-6, attention=0.53e-9)
"""Qwen3-0.6B in bfloat16 on an H200: recomputing takes as long as it was measured to take."""
QWEN3_BYTES = 114_688
"""Of a token's KV."""
BUDGET = 8192


def qwen3_on_h200(patch: pytest.MonkeyPatch, tokens: int, speeds: Speeds, costs: Costs | None = None) -> StreamedBench:
    """A prompt of so many tokens on the host of such a device."""
    return StreamedBench(patch, speeds, QWEN3, tokens=tokens, bytes_per_token=QWEN3_BYTES, budget=BUDGET, costs=costs)
