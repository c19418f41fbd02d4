"""Plays the scheduler for a runner: the real scheduler core in front of the runner, no sockets between."""

import queue
from collections import deque
from collections.abc import Sequence
from time import monotonic

import msgspec
from pagewise_executor.runner import PendingStep, Runner
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.core.tiers.arena import ArenaShape
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.server.executor_checks import shape_of
from pagewise_shared.block_hash import ONE_ROPE
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import (
    AdapterLoaded,
    CompileGrammar,
    Copied,
    GrammarCompiled,
    Hello,
    StepPlan,
    Welcome,
    decode_from_scheduler,
    encode,
)

from tests.core_requests import make_request
from tests.sampling import sampling_params


def run_requests(
    runner: Runner,
    requests: list[Request],
    *,
    num_blocks: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 64,
    arrive_every: int = 0,
    recovery: RecoveryMode = "auto",
    directory: PrefixDirectory | None = None,
    speculative: SpeculativeConfig | None = None,
    eviction: EvictionName = "lru",
    proposes: bool = True,
) -> tuple[Scheduler, list[StepOutput]]:
    """Run requests to their end, two steps in flight; ``arrive_every`` steps another one comes in (0: all at once).

    ``directory``: of the executors that lend blocks, to which this one is added. ``proposes``: use its draft model.
    """
    shape = arena_of(runner.info, max_num_batched_tokens, num_blocks)
    scheduler = Scheduler(
        features=FeatureOptions(
            runner.info.adapters,
            runner.info.max_grammars,
            speculative,
            runner.info.max_proposed if proposes else 0,
            runner.info.max_proposing,
            runner.info.drafts_with_grammars,
        ),
        num_blocks=num_blocks or runner.info.num_blocks,
        shape=shape,
        block_size=runner.info.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        tiers={tier.number: tier.num_blocks or tier.identity for tier in runner.info.tiers},
        recovery=recovery,
        eviction=eviction,
        short_rope_len=runner.info.short_rope_len or ONE_ROPE,
    )
    if directory is not None:
        lend(scheduler, runner, directory)
    runner.reset(Welcome(1, max_num_seqs, max_num_batched_tokens))
    return scheduler, drive(runner, scheduler, requests, arrive_every)


def arena_of(info: Hello, max_num_batched_tokens: int, num_blocks: int | None = None) -> ArenaShape | None:
    """The arena of an executor with several groups of layers, or as much of it as ``num_blocks`` blocks of all layers
    take."""
    if num_blocks is not None:
        pages = num_blocks * sum(group.pages_per_block for group in info.groups)
        info = msgspec.structs.replace(info, num_pages=min(pages, info.num_pages))
    return shape_of(info, 2 * max_num_batched_tokens)


def assert_nothing_is_held(scheduler: Scheduler, num_blocks: int) -> None:
    """Without requests, all memory is available: ``num_blocks`` blocks, or the pages of an arena."""
    shape: ArenaShape | None = getattr(scheduler.kv, "shape", None)
    assert scheduler.kv.num_available == (num_blocks if shape is None else shape.num_pages)


def drive(runner: Runner, scheduler: Scheduler, requests: list[Request], arrive_every: int = 0) -> list[StepOutput]:
    """Run requests to their end on a runner that was reset for this scheduler."""
    reported: queue.SimpleQueue[Copied | AdapterLoaded | GrammarCompiled] = queue.SimpleQueue()
    runner.report_to(reported.put)  # type: ignore[arg-type] # storage is not asked
    coming, compiling = deque(requests), 0
    outputs: list[StepOutput] = []
    results: deque[PendingStep] = deque()
    steps = 0
    while True:
        while coming and (not arrive_every or steps % arrive_every == 0 or not scheduler.requests):
            scheduler.add(coming.popleft())
            if arrive_every:
                break
        while not reported.empty():
            compiling -= _take(scheduler, reported.get())
        compiling += _send_messages(runner, scheduler)
        while scheduler.num_in_flight < 2 and (plan := scheduler.schedule(monotonic())) is not None:
            received = decode_from_scheduler(encode(plan))
            assert isinstance(received, StepPlan)
            results.append(runner.execute(received))
        compiling += _send_messages(runner, scheduler)
        if results:
            outputs.append(scheduler.update(results.popleft().result()))
        elif compiling or scheduler.recoveries.transfers.num_loading or scheduler.features.kept().sequences:
            compiling -= _take(scheduler, reported.get(timeout=30))
        elif not coming:
            return outputs
        steps += 1


def run_moved(stays: Sequence[tuple[Runner, int]], requests: list[Request]) -> None:
    """Run requests for a number of steps on each of these runners in turn, one step at a time, and to their end on the
    first one."""
    coming = list(requests)
    for runner, count in stays:
        scheduler = Scheduler(num_blocks=400, block_size=8, max_num_seqs=16, max_num_batched_tokens=64)
        runner.reset(Welcome(1, 16, 64))
        for one in coming:
            scheduler.add(one)
        for _ in range(count):
            plan = scheduler.schedule(monotonic())
            assert plan is not None
            received = decode_from_scheduler(encode(plan))
            assert isinstance(received, StepPlan)
            scheduler.update(runner.execute(received).result())
        scheduler.release_all()
        coming = [one for one in coming if not one.finished]
        assert coming
    runner, _ = stays[0]
    runner.reset(Welcome(1, 16, 64))
    scheduler = Scheduler(num_blocks=400, block_size=8, max_num_seqs=16, max_num_batched_tokens=64)
    drive(runner, scheduler, coming)


def outputs_of(requests: list[Request]) -> list[list[int]]:
    """The tokens of all outputs, in order."""
    return [sequence.output_token_ids.tolist() for one in requests for sequence in one.sequences]


def _send_messages(runner: Runner, scheduler: Scheduler) -> int:
    """Send the runner the requests of features; return how many grammars it is to compile."""
    compiling = 0
    for message in scheduler.features.messages(monotonic()):
        runner.handle(message)
        compiling += isinstance(message, CompileGrammar)
    return compiling


def _take(scheduler: Scheduler, message: Copied | AdapterLoaded | GrammarCompiled) -> bool:
    """Pass a message of the runner to the scheduler; return whether it was a compiled grammar."""
    if isinstance(message, Copied):
        scheduler.copied(message)
        return False
    failed = scheduler.features.take(message, monotonic())
    assert not failed, message
    return isinstance(message, GrammarCompiled)


def lend(scheduler: Scheduler, runner: Runner, directory: PrefixDirectory) -> None:
    """Let this executor lend its blocks to the others in ``directory``, and fetch theirs."""
    endpoint = runner.info.block_endpoint
    assert endpoint
    scheduler.recoveries.planner.join(directory, Peer(endpoint, runner.info.block_format, scheduler, lambda: None))


def request(tokens: list[int], max_tokens: int, name: str = "r", n: int = 1, **sampling: object) -> Request:
    params = sampling_params(**({"temperature": 0.0} | sampling))
    return make_request(name, tokens, max_tokens, params, n=n)
