"""Measures the costs of steps and copies on this machine, once when the executor starts, in about a second.

Another process on the same cores makes a run slower, never faster. So of several runs the fastest counts, and if the
results contradict each other, all are measured again, for a limited time.
"""

import logging
import queue
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace
from pagewise_shared.block_hash import BlockName
from pagewise_shared.errors import ModelError
from pagewise_shared.progress import logged_progress
from pagewise_shared.protocol import (
    DEVICE,
    Copied,
    Found,
    Hello,
    MeasuredCosts,
    NewSequence,
    ProposingStepPlan,
    StepPlan,
    StoredDropped,
    StoredGone,
    TierInfo,
    Welcome,
    pack_int32s,
    tier_name,
)
from pagewise_shared.sampling import MAX_LOGPROBS, SamplingParams

from pagewise_executor.block_copies import CopyJob
from pagewise_executor.runner import Runner
from pagewise_executor.step_work import Int32s
from pagewise_executor.tiers.tier import Tier

log = logging.getLogger(__name__)

_REPEATS = 3
_LONGEST_RUN = 0.5
"""Seconds after which no larger size is measured: a slow machine or link is profiled by the smaller ones."""
_MOST_SECONDS = 2.0
"""Seconds of steps, or of copies in one direction, after which no measurement is repeated."""
_SPREAD, _SLACK = 1.25, 50.0
"""The two fastest of several runs agree if they differ by no more than this factor and these microseconds."""
_TOLERANCE = 0.1
"""The share of a measured time by which the fitted costs may miss it."""
_LEAST_TOKEN = 0.02
"""The least share of its tokens in the time of the largest chunk: the rest is the step's."""
_COPY_TIMEOUT = 60
_MOST_COPIED = 256
"""Blocks of the longest list of copies that is measured: as many as a scheduler asks for at once."""
_TOKENS_BESIDE = 512
"""Tokens of the steps that run on a GPU while copies are timed, as they do when sequences recover."""

Timer = Callable[[int, int], float]
"""Times a step that computes ``count`` tokens after ``start`` others: (start, count) to microseconds."""


class Sizes(NamedTuple):
    """Tokens of the two chunks that are timed, and of the context before them."""

    small: int
    large: int
    context: int


CPU_SIZES = Sizes(16, 256, 2048)
GPU_SIZES = Sizes(512, 4096, 8192)
"""Smaller chunks take as long as launching their kernels, or reading the weights: tokens would seem to cost nothing."""


class StepCosts(NamedTuple):
    """Microseconds of a step, of each token, of one token attending to one, and of each token of context."""

    step: float
    token: float
    attention: float = 0.0
    context: float = 0.0


class _Fastest:
    """The fastest of the runs of one measurement, in microseconds."""

    def __init__(self, run: Callable[[], float]) -> None:
        self._run = run
        self._runs: list[float] = []

    def run(self) -> None:
        self._runs.append(self._run())

    @property
    def time(self) -> float:
        return min(self._runs)

    @property
    def steady(self) -> bool:
        fastest, second = sorted(self._runs)[:2]
        return second <= _SPREAD * fastest + _SLACK


def measure_costs(runner: Runner, max_num_batched_tokens: int, sizes: Sizes = CPU_SIZES) -> MeasuredCosts:
    """Time prefill chunks of these sizes.

    The runner must be reset afterwards, for it writes over blocks of the device pool.
    """
    began = time.perf_counter()
    room = min(whole_blocks(runner.info) * runner.info.block_size, runner.info.max_model_len)
    steps = measure_steps(
        lambda start, count: dummy_prefill(runner, start, count), min(room, max_num_batched_tokens), room, sizes
    )
    text = "measured in %.1f s: a step %.0f µs, a token %.1f µs, attention %.4f µs"
    log.info(text, time.perf_counter() - began, steps.step, steps.token, steps.attention)
    return MeasuredCosts(*steps)


def measure_tier(runner: Runner, device: Tier, tier: Tier, info: TierInfo, *, beside: bool = False) -> TierInfo:
    """Return ``info`` of a tier with the times of copies between it and the device.

    It writes over blocks of the device pool, which is new, and over no hashed block of the tier, which may be inherited
    from another process. ``beside``: steps run meanwhile, if the pool has room for them. A tier that loses the blocks
    at once is returned without times. The runner must be reset afterwards.

    Raises:
        ModelError: copies fail, or take forever.
    """
    began = time.perf_counter()
    number = info.number
    scratch, names = tier.scratch(_MOST_COPIED)
    copies = _Copies(runner, device, tier, number, names, _prefill_again(runner) if beside else None)
    try:
        store, stored = copies.measure(DEVICE, number, scratch) if scratch else (None, 0)
        # The blocks that were just stored can be loaded, and blocks that another process has left.
        load, _ = copies.measure(number, DEVICE, [*scratch[:stored], *tier.names()])
    except _LostError:
        log.warning("the costs of copies to and from the %s are not known: blocks do not come back", tier_name(number))
        return info
    # If no block may be written over, a store is assumed to cost as much as a load.
    (load_setup, load_block), (store_setup, store_block) = load, store or load
    measured = replace(
        info, load_setup=load_setup, load_block=load_block, store_setup=store_setup, store_block=store_block
    )
    text = "measured in %.1f s: loading a block from the %s %.1f µs, storing one %.1f µs"
    log.info(text, time.perf_counter() - began, tier_name(number), measured.load_block, measured.store_block)
    return measured


def measure_steps(timer: Timer, largest: int, room: int, sizes: Sizes = CPU_SIZES) -> StepCosts:
    """Fit the costs of steps to chunks of two sizes, each with and without a context before it.

    ``largest``: tokens of the largest chunk, ``room``: of the longest sequence. The costs of a token are positive, and
    the costs of a step not negative, even if measurements are wrong.
    """
    small, large = max(1, min(sizes.small, largest // 2)), min(sizes.large, largest)
    timer(0, small)  # warms up
    one, few = _Fastest(lambda: timer(0, 1)), _Fastest(lambda: timer(0, small))
    _repeat([one, few], "steps")
    if few.time * (large / small) > _LONGEST_RUN * 1e6 or large <= small:
        return StepCosts(*_chunk_line(one.time, few.time, few.time, 1, small))
    many = _Fastest(lambda: timer(0, large))
    context = min(sizes.context, room - large - 1)
    if context < large // 2:  # its part of the time would be lost among the differences of equal runs
        _measure_until(lambda: _doubt_about_chunks(one, few, many, small, large), [one, few, many], "steps")
        return StepCosts(*_chunk_line(one.time, few.time, many.time, small, large))
    far_few, far_many = _Fastest(lambda: timer(context, small)), _Fastest(lambda: timer(context, large))

    def doubt() -> str:
        if far_few.time < (1 - _TOLERANCE) * few.time or far_many.time < (1 - _TOLERANCE) * many.time:
            return f"a chunk takes less time with a context of {context} tokens than without"
        return _doubt_about_chunks(one, few, many, small, large)

    _measure_until(doubt, [one, few, many, far_few, far_many], "steps")
    # Two chunk sizes separate the costs of the context for each token from its costs for each chunk.
    per_few = max(0.0, far_few.time - few.time) / context
    per_many = max(0.0, far_many.time - many.time) / context
    attention = max(0.0, (per_many - per_few) / (large - small))
    # The tokens of a chunk attend to each other, too. If other work has disturbed the measurement of the context, this
    # part may seem larger than the time of the chunk.
    own_few, own_many = (
        min(attention * size * size / 2, chunk.time / 2) for size, chunk in ((small, few), (large, many))
    )
    step, token = _chunk_line(one.time, few.time - own_few, many.time - own_many, small, large)
    return StepCosts(step, token, attention, max(0.0, per_few - attention * small))


def _doubt_about_chunks(one: _Fastest, few: _Fastest, many: _Fastest, small: int, large: int) -> str:
    """Return why the times of chunks without context contradict each other; empty if they do not."""
    if many.time <= few.time:
        return f"{large} tokens take {many.time:.0f} µs and {small} tokens {few.time:.0f} µs"
    if few.time * (1 + _TOLERANCE) < many.time * (small / large):
        return f"a token costs more among {large} than among {small}"
    if one.time * (1 + _TOLERANCE) < few.time / small:
        return f"a token costs more among {small} than alone"
    return ""


def _chunk_line(one: float, few: float, many: float, small: int, large: int) -> tuple[float, float]:
    """Return the costs of a step and of each of its tokens, in microseconds.

    ``one``, ``few``, ``many``: the times of chunks of one token, of ``small`` and of ``large`` ones. A chunk takes at
    least as long as a smaller one, and no longer than its tokens would take in smaller chunks. A time beyond these
    bounds was disturbed, and the bound replaces it: another process on the same cores disturbs ``many`` more easily
    than ``one``, because it takes longer.
    """
    few = min(few, many, one * small)
    many = min(many, few * large / small)
    token = (many - few) / (large - small) if large > small else few / small
    token = max(token, _LEAST_TOKEN * many / large)
    step = few - token * small
    return (step if step > 0 else max(0.0, min(one, few) - token)), token


def _line(few: float, many: float, small: int, large: int) -> tuple[float, float]:
    """Return the constant part of the time, not negative, and the time of each unit of the size, positive.

    ``few`` and ``many``: the times for sizes ``small`` and ``large``.
    """
    unit = (many - few) / (large - small)
    if unit <= 0 or few < unit * small:
        return 0.0, many / large
    return few - unit * small, unit


def _measure_until(doubt: Callable[[], str], measurements: Sequence[_Fastest], name: str) -> None:
    """Repeat the measurements in turn until they agree, or until the time is over; then the log has a warning.

    ``doubt`` returns a contradiction among them; empty: there is none.
    """
    until = time.perf_counter() + _MOST_SECONDS
    while True:
        _repeat(measurements, name)
        reason = doubt()
        if not reason and not all(each.steady for each in measurements):
            reason = "the times of equal runs differ"
        if not reason:
            return
        if time.perf_counter() > until:
            log.warning(
                "the measured costs of %s are not to be trusted (%s): is something else using this machine? They are "
                "corrected while requests run", name, reason,
            )  # fmt: skip
            return


def _repeat(measurements: Sequence[_Fastest], name: str) -> None:
    progress = logged_progress(log, f"measuring {name}", _REPEATS * len(measurements), "runs")
    for _ in range(_REPEATS):
        for each in measurements:
            each.run()
            progress.update()


def profile_run(runner: Runner, num_tokens: int) -> None:
    """Run a step of ``num_tokens`` prefill tokens, in as many sequences as their longest length needs.

    All tokens report log-probabilities, and a draft model takes them, for the most memory. Reset the runner afterwards.
    """
    info, sampling = runner.info, SamplingParams(temperature=0.0, prompt_logprobs=MAX_LOGPROBS)
    sizes = [min(info.max_model_len, num_tokens - start) for start in range(0, num_tokens, info.max_model_len)]
    runner.reset(Welcome(0, len(sizes), num_tokens, keeps_blocks=True))
    joined, first = [], 0
    for row, size in enumerate(sizes):
        blocks = np.arange(first, first + -(-size // info.block_size), dtype=np.int32)
        first += len(blocks)
        joined.append(_new_sequence(info, row, size, 0, blocks, sampling))
    runner.execute(_prefill(info, joined, sizes, drafts=True)).result()


def dummy_prefill(runner: Runner, start: int, count: int, number: int = 1, *, drafts: bool = False) -> float:
    """Return the microseconds of a step of ``count`` tokens after ``start`` others in each of ``number`` sequences.

    ``drafts``: by the draft model, if there is one. K and V of the others are arbitrary. Reset the runner afterwards.
    """
    # Another process may have left blocks on the host.
    runner.reset(Welcome(0, number, number * count, keeps_blocks=True))
    total = start + count
    blocks = np.arange(number * -(-total // runner.info.block_size), dtype=np.int32).reshape(number, -1)
    sampling = SamplingParams(temperature=0.0)
    joined = [_new_sequence(runner.info, row, total, start, blocks[row], sampling) for row in range(number)]
    began = time.perf_counter()
    runner.execute(_prefill(runner.info, joined, [count] * number, drafts=drafts)).result()
    return (time.perf_counter() - began) * 1e6


def _prefill(info: Hello, joined: Sequence[NewSequence], sizes: Sequence[int], *, drafts: bool) -> StepPlan:
    """Return the plan of a step of the last ``sizes`` tokens of these sequences, with a drafted token behind each."""
    asked = [number for row in range(len(sizes)) for number in (row, 1)] if drafts and info.max_proposed else []
    chunks = tuple(enumerate(sizes))
    return ProposingStepPlan(0, 1, joined=tuple(joined), chunks=chunks, proposals=pack_int32s(asked))


def _new_sequence(
    info: Hello, row: int, num_tokens: int, num_computed: int, blocks: Int32s, sampling: SamplingParams
) -> NewSequence:
    """Return a sequence of arbitrary tokens, whose tables have the same ``blocks`` in every group of layers.

    In a group of states it has the block of its row.
    """
    packed = blocks.tobytes()
    own = num_computed, pack_int32s([row])
    windows = tuple(own if group.state else (0, packed) for group in info.groups[1:])
    return NewSequence(row, pack_int32s([1] * num_tokens), num_tokens, num_computed, packed, sampling, windows=windows)


def whole_blocks(info: Hello) -> int:
    """Return the number of blocks of tokens that all layers can hold."""
    if not info.groups:
        return info.num_blocks
    room = info.num_pages - sum(group.pages_per_block for group in info.groups if group.state)
    return room // sum(group.pages_per_block for group in info.groups if not group.state)


def _prefill_again(runner: Runner) -> Callable[[], object] | None:
    """Return a function that runs a step of one chunk in the last blocks of the device; None: they are copied, or their
    pages are."""
    info = runner.info
    count = min(_TOKENS_BESIDE, info.max_model_len, info.max_num_batched_tokens or _TOKENS_BESIDE)
    number = -(-count // info.block_size)
    if info.groups or info.num_blocks < _MOST_COPIED + number:
        return None
    runner.reset(Welcome(0, 1, count, keeps_blocks=True))
    blocks = np.arange(info.num_blocks - number, info.num_blocks, dtype=np.int32).tobytes()
    new = NewSequence(0, pack_int32s([1] * count), count, 0, blocks, SamplingParams(temperature=0.0))
    left: tuple[int, ...] = ()

    def step() -> None:
        nonlocal left
        runner.execute(StepPlan(epoch=0, step=1, left=left, joined=(new,), chunks=((0, count),))).result()
        left = (0,)

    return step


class _LostError(Exception):
    """A tier does not hold blocks that were stored there."""


class _Copies(NamedTuple):
    """The copies between a tier and the first blocks of the device. ``names``: of the tier's blocks, if they have no
    ids. ``step``: is called during copies."""

    runner: Runner
    device: Tier
    tier: Tier
    number: int
    names: Sequence[BlockName]
    step: Callable[[], object] | None

    def measure(self, source: int, target: int, blocks: Sequence[int]) -> tuple[tuple[float, float], int]:
        """Return the microseconds of a list of copies and of each block in it, and the number of copied ``blocks``."""
        first = self._copy(source, target, blocks[:1])
        affordable = int(_LONGEST_RUN * 1e6 / max(1.0, first)) // _REPEATS
        largest = min(_MOST_COPIED, self.runner.info.num_blocks, len(blocks), affordable)
        if largest < 2:
            return (0.0, first), 1
        direction = f"{'store' if source == DEVICE else 'load'}, {tier_name(self.number)}"
        return measure_copies(lambda count: self._copy(source, target, blocks[:count]), largest, direction), largest

    def _copy(self, source: int, target: int, blocks: Sequence[int]) -> float:
        name = tier_name(self.number)
        done: queue.SimpleQueue[Copied | Found | StoredDropped | StoredGone] = queue.SimpleQueue()
        self.tier.report = done.put
        first = 1 if self.runner.info.groups else 0  # nothing may write to the null page
        pairs = np.stack([np.arange(first, first + len(blocks)), blocks], axis=1).astype(np.int32)
        pairs = pairs if source == DEVICE else pairs[:, ::-1]
        self.tier.begin(CopyJob(0, 1, source, target, pairs, names=self.names), self.device)
        until = time.perf_counter() + _COPY_TIMEOUT
        while self.step is not None and done.empty() and time.perf_counter() < until:
            self.step()
        try:
            copied = done.get(timeout=_COPY_TIMEOUT)
        except queue.Empty:
            raise ModelError(
                f"copying a block of {self.runner.info.bytes_per_block} bytes to or from the {name} takes over "
                f"{_COPY_TIMEOUT} s: is a limit such as --host-bandwidth right?"
            ) from None
        assert isinstance(copied, Copied)
        if copied.error is not None:
            raise ModelError(f"copies to or from the {name} fail: {copied.error.message}")
        if len(copied.bad) == pairs[:, 1].nbytes:
            raise _LostError
        return float(copied.elapsed_us)


def measure_copies(copy: Callable[[int], float], largest: int, direction: str) -> tuple[float, float]:
    """Fit the costs of copies to lists of one block and of ``largest`` blocks: of the list, and of each block.

    ``copy``: copies a number of blocks, and returns the microseconds.
    """
    one, many = _Fastest(lambda: copy(1)), _Fastest(lambda: copy(largest))

    def doubt() -> str:
        return "" if many.time > one.time else f"{largest} blocks take no longer than one"

    _measure_until(doubt, [one, many], f"copies ({direction})")
    return _line(one.time, many.time, 1, largest)
