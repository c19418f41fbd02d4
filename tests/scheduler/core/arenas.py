"""Schedulers of executors with several groups of layers, the check of their arenas, and random requests for them."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.config.options import EvictionName
from pagewise_shared.protocol import DISK, HOST, StepPlan, StepResult

from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import check_states, expected_tokens, num_stored, run

DISK_NAME = "a disk"


def create(
    num_pages: int, pages: int, windows: tuple[WindowShape, ...], *, budget: int = 32, seqs: int = 8,
    block_size: int = 4, eviction: EvictionName = "lru", host_pages: int = 0, disk: bool = False,
    recovery: RecoveryMode = "auto", speculative: SpeculativeConfig | None = None,
) -> Scheduler:  # fmt: skip
    shape = ArenaShape(num_pages, pages, windows, 2 * budget)
    return Scheduler(
        num_blocks=num_pages // pages,
        block_size=block_size,
        max_num_seqs=seqs,
        max_num_batched_tokens=budget,
        shape=shape,
        eviction=eviction,
        tiers={HOST: host_pages} | ({DISK: DISK_NAME} if disk else {}),
        recovery=recovery,
        features=FeatureOptions(speculative=speculative),
    )


def check_arena(scheduler: Scheduler, *, lends: bool = False) -> None:
    """Pages add up, and without requests everything that is held may be evicted, unless it ``lends`` blocks."""
    kv = scheduler.kv
    assert isinstance(kv, GroupedKVCacheManager)
    check_states(kv.pool)
    for request in scheduler.requests:
        for one in request.sequences:
            for index, group in enumerate(kv.windows):
                held = len(one.table.windows[index].blocks)
                assert held <= group.most_blocks, "admission counts no more"
    tiers = [(kv._arena, kv.pool, kv.windows)]
    tiers += [(kv.host.arena, kv.host, kv.host.snapshots)] if kv.host is not None else []  # type: ignore[list-item]
    for arena, full, groups in tiers:
        used = full.num_used * full.pages_per_block  # type: ignore[attr-defined]
        used += sum(group.num_used * group.pages_per_block for group in groups)
        assert 0 <= arena.num_free == arena.num_pages - used
        for group in groups:
            held = [0] * group.num_blocks
            for snapshot in set(group.at.values()):
                for block in snapshot.blocks:
                    held[block] += 1
            users = [group.users(block) for block in range(group.num_blocks)]
            assert held == group._snapshots
            for block in group.recoverable.values():
                assert not held[block]
                held[block] = 1
            assert group.num_cached == sum(1 for number, user in zip(held, users, strict=True) if number and not user)
            free = set(group._free)
            assert len(free) == len(group._free)
            assert all((block in free) == (not held[block] and not users[block]) for block in range(group.num_blocks))
            assert all(node.num_tiers for node in group.at)
        mapped = 0
        for member in arena.members:
            mapped += (member.num_blocks - member.num_unmapped) * member.pages_per_block
            assert 0 <= member.num_unmapped <= member.num_blocks - member.num_used
        assert mapped <= arena.num_pages
    idle = not scheduler.requests and not scheduler.steps_in_flight
    # Loads of requests that were aborted hold their blocks until they are confirmed.
    if idle and not lends and scheduler.recoveries.transfers.oldest_due is None:
        assert kv.num_available == kv.num_total


class Resettable(Protocol):
    """An executor of plans, which begins a new epoch without sequences."""

    def reset(self, epoch: int) -> None: ...


def drive_at_random(
    rng: random.Random, scheduler: Scheduler, executor: Resettable, execute: Callable[[StepPlan], StepResult],
    longest: int, check: Callable[[], None] = lambda: None, copied: Callable[[], None] = lambda: None,
    places: Sequence[int] = (),
) -> tuple[list[Request], deque[StepResult]]:  # fmt: skip
    """Sequences of up to ``longest`` tokens share prefixes and are aborted, and steps fail.

    ``check`` is called after each operation, and ``copied`` now and then: it reports copies that are done. ``places``:
    that prompts declare. Returns the requests that did not fail, and the results of the steps that are in flight.
    """
    base = [rng.randrange(1000) for _ in range(30)]
    requests: list[Request] = []
    in_flight: deque[StepResult] = deque()
    epoch = 1
    for _ in range(rng.choice((20, 80))):
        if rng.random() < 0.5:
            copied()
        match rng.randrange(12):
            case 0 | 1 | 2:
                prompt = [*base[: rng.randrange(25)], *(rng.randrange(1000) for _ in range(rng.randrange(1, 5)))]
                request = create_request(prompt, rng.randrange(1, longest - len(prompt)), n=rng.choice((1, 1, 2)))
                request.places = [place for place in places if place <= len(prompt)]
                requests.append(request)
                if isinstance(executor, CheckingExecutor) and scheduler.kv.hashed:
                    request.stored[DISK_NAME] = num_stored(scheduler, executor, request)
                scheduler.add(request)
            case 3 if requests:
                scheduler.abort(rng.choice(requests).request_id)
            case 4 if in_flight and rng.random() < 0.3:
                epoch += 1
                in_flight.clear()
                failed = scheduler.fail(epoch)
                requests = [request for request in requests if request not in failed]
                executor.reset(epoch)
            case _ if len(in_flight) < 2 and (plan := scheduler.schedule(0.0)) is not None:
                in_flight.append(execute(plan))
            case _ if in_flight:
                scheduler.update(in_flight.popleft())
        check()
    return requests, in_flight


def serve_alone(
    scheduler: Scheduler,
    executor: CheckingExecutor,
    prompt: list[int],
    max_tokens: int = 3,
    places: tuple[int, ...] = (),
) -> Request:
    """Serve a request while there is no other, and check its tokens. ``places``: those that it declares."""
    request = create_request(prompt=prompt, max_tokens=max_tokens)
    request.places = places
    scheduler.add(request)
    run(scheduler, executor)
    assert request.sequences[0].output_token_ids.tolist() == expected_tokens(request)
    check_arena(scheduler)
    return request


def check_tokens(requests: list[Request]) -> None:
    """Every sequence that was not aborted has the tokens that it has alone."""
    for request in requests:
        for sequence in request.sequences:
            if sequence.finish_reason != "abort":
                assert sequence.output_token_ids.tolist() == expected_tokens(request)
