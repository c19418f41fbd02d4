"""What steps and copies cost on this machine, measured once when the executor starts, in about a second."""

import logging
import queue
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import DEVICE, HOST, Copied, MeasuredCosts, NewSequence, StepPlan, Welcome, pack_int32s
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.block_copies import CopyJob, Tier
from pagewise_executor.runner import Runner

log = logging.getLogger(__name__)

_SMALL, _LARGE, _CONTEXT = 16, 256, 2048
_REPEATS = 3
_PATIENCE = 0.5
"""Seconds after which nothing larger is tried: a slow machine or link is profiled by what it has done so far."""
_COPY_TIMEOUT = 60


def measure_costs(runner: Runner, max_num_batched_tokens: int, host: Tier | None) -> MeasuredCosts:
    """Time prefill chunks, and copies between ``host`` and the device. The runner's rows are in disorder afterwards.

    It writes over blocks of the device pool, which is new, and over no named block of the host, which may be inherited.

    Raises:
        ModelError: copies fail, or take forever.
    """
    began = time.perf_counter()
    room = min(runner.info.num_blocks * runner.info.block_size, runner.info.max_model_len)
    steps = _measure_steps(runner, min(room, max_num_batched_tokens), room)
    costs = MeasuredCosts(*steps)
    if host is not None:
        load = _measure_copies(host, HOST, DEVICE, runner, range(host.num_blocks))
        unnamed = host.unnamed()
        # Where every block is worth something a store is taken to cost what a load does.
        store = _measure_copies(host, DEVICE, HOST, runner, unnamed) if unnamed else load
        costs = MeasuredCosts(*steps, *load, *store)
    log.info(
        "measured in %.1f s: a step %.0f µs, a token %.1f µs, attention %.4f µs, loading a block %.1f µs",
        time.perf_counter() - began,
        costs.step,
        costs.token,
        costs.attention,
        costs.load_block,
    )
    return costs


def _measure_steps(runner: Runner, largest: int, room: int) -> tuple[float, float, float, float]:
    """Microseconds of a step, of a token, of one token attending to one, and of each token of context."""
    small = max(1, min(_SMALL, largest // 2))
    prefill(runner, 0, small)  # warms up
    few = _median(lambda: prefill(runner, 0, small))
    large = min(_LARGE, largest)
    if few * (large / small) > _PATIENCE * 1e6 or large <= small:
        return 0.0, few / small, 0.0, 0.0
    many = _median(lambda: prefill(runner, 0, large))
    token = max(0.0, (many - few) / (large - small))
    step = max(0.0, few - token * small)
    context = min(_CONTEXT, room - large - 1)
    if context < large:
        return step, token, 0.0, 0.0
    # Two chunk sizes tell what every token pays for the context from what the chunk pays once.
    far_small = max(0.0, _median(lambda: prefill(runner, context, small)) - few) / context
    far_large = max(0.0, _median(lambda: prefill(runner, context, large)) - many) / context
    attention = max(0.0, (far_large - far_small) / (large - small))
    return step, token, attention, max(0.0, far_small - attention * small)


def largest_step(runner: Runner, num_tokens: int) -> None:
    """Run a step of ``num_tokens`` prefill tokens, in as many sequences as their longest length needs.

    What it computes is of no interest, only what memory it takes. The runner's rows are in disorder afterwards.
    """
    info = runner.info
    sizes = [min(info.max_model_len, num_tokens - start) for start in range(0, num_tokens, info.max_model_len)]
    runner.reset(Welcome(0, len(sizes), num_tokens, keeps_blocks=True))
    joined, first = [], 0
    for row, size in enumerate(sizes):
        blocks = np.arange(first, first + -(-size // info.block_size), dtype=np.int32)
        first += len(blocks)
        sampling = SamplingParams(temperature=0.0)
        joined.append(NewSequence(row, pack_int32s([1] * size), size, 0, blocks.tobytes(), sampling))
    plan = StepPlan(epoch=0, step=1, joined=tuple(joined), chunks=tuple(enumerate(sizes)))
    runner.execute(plan).result()


def _median(measure: Callable[[], float]) -> float:
    return statistics.median(measure() for _ in range(_REPEATS))


def prefill(runner: Runner, start: int, count: int) -> float:
    """Microseconds of a step that computes ``count`` tokens after ``start`` others, whose K and V are whatever lies
    there."""
    runner.reset(Welcome(0, 1, count, keeps_blocks=True))  # a former process may have left blocks on the host
    total = start + count
    blocks = np.arange(-(-total // runner.info.block_size), dtype=np.int32)
    new = NewSequence(
        row=0,
        tokens=pack_int32s([1] * total),
        num_prompt_tokens=total,
        num_computed_tokens=start,
        blocks=blocks.tobytes(),
        sampling=SamplingParams(temperature=0.0),
    )
    began = time.perf_counter()
    runner.execute(StepPlan(epoch=0, step=1, joined=(new,), chunks=((0, count),))).result()
    return (time.perf_counter() - began) * 1e6


def _measure_copies(tier: Tier, source: int, target: int, runner: Runner, blocks: Sequence[int]) -> tuple[float, float]:
    """Microseconds of a list of copies between ``blocks`` of a tier and the first on the device, and of each block in
    it."""
    done: queue.SimpleQueue[Copied] = queue.SimpleQueue()
    tier.report = done.put

    def measure(count: int) -> float:
        pairs = np.stack([np.arange(count), blocks[:count]], axis=1).astype(np.int32)
        tier.begin(CopyJob(0, 1, source, target, pairs if source == DEVICE else pairs[:, ::-1]))
        try:
            copied = done.get(timeout=_COPY_TIMEOUT)
        except queue.Empty:
            raise ModelError(
                f"copying a block of {runner.info.bytes_per_block} bytes to or from the host takes over "
                f"{_COPY_TIMEOUT} s: is --host-bandwidth right?"
            ) from None
        if copied.error is not None:
            raise ModelError(f"copies to or from the host fail: {copied.error.message}")
        return float(copied.elapsed_us)

    first = measure(1)
    affordable = int(_PATIENCE * 1e6 / max(1.0, first)) // _REPEATS
    largest = min(64, runner.info.num_blocks, len(blocks), affordable)
    if largest < 2:
        return 0.0, first
    one = _median(lambda: measure(1))
    block = max(0.0, _median(lambda: measure(largest)) - one) / (largest - 1)
    return max(0.0, one - block), block
