"""Draining: an executor that stops hands its running requests and its hottest cached prefixes to the other
executors."""

import logging
from array import array
from dataclasses import dataclass, field
from time import monotonic as clock
from uuid import uuid4

from pagewise_shared.block_hash import is_adapter_salt, rope_salt, without_rope
from pagewise_shared.protocol import RequestParams
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.segments import find_segments

from pagewise_scheduler.core.requests.request import SequenceStatus
from pagewise_scheduler.core.tiers.device import HotPrefix, hottest_prefixes
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.client_request import ClientRequest, OutputBuilder
from pagewise_scheduler.server.executor_handle import ExecutorHandle, Life
from pagewise_scheduler.server.executor_registry import ExecutorRegistry
from pagewise_scheduler.server.router import Router

log = logging.getLogger(__name__)

_LONGEST, _SHARE_OF_TIME = 600.0, 0.9
"""The maximum seconds of a drain, and the share of the executor's time-out that it uses."""
_MOST_CHAINS = 256
_SHARE_OF_FREE = 0.5
"""The share of the other executors' free blocks that copies may take."""
_SHARE_FOR_ROOM = 0.5
"""The share of its time that a draining executor works on while the others have no room for its requests."""
_LEAST_PRIORITY = 2**31 - 1


@dataclass(slots=True)
class _Drain:
    """A draining executor. ``moved``: its requests, once they have moved; ``copies``: requests that make others fetch
    its cache."""

    executor: ExecutorHandle
    room_deadline: float
    deadline: float
    moved: list[ClientRequest] = field(default_factory=list)
    copies: list[ClientRequest] = field(default_factory=list)


class Draining:
    """Drains executors step by step: ``advance`` is called after every round while there are ``drains``."""

    def __init__(self, executor_registry: ExecutorRegistry, router: Router, metrics: Metrics) -> None:
        self._executor_registry = executor_registry
        self._router = router
        self._metrics = metrics
        self.drains: list[_Drain] = []

    def begin(self, executor: ExecutorHandle, seconds: float) -> None:
        """Begin to drain an executor that takes no new requests any more, within ``seconds``."""
        now, seconds = clock(), min(seconds, _LONGEST) * _SHARE_OF_TIME
        self.drains.append(_Drain(executor, now + _SHARE_FOR_ROOM * seconds, now + seconds))

    def advance(self) -> None:
        """Advance every drain as far as possible now."""
        now = clock()
        for drain in list(self.drains):
            executor = drain.executor
            with self._executor_registry.guarded(executor):
                # Requests that would only wait elsewhere run on here, and some of them finish.
                if executor.life is Life.DRAINING and self._may_move(drain, now):
                    executor.life = Life.STOPPING
                # The tokens of steps in flight belong to the requests, so these move only after the last step.
                if executor.life is Life.STOPPING and not executor.scheduler.num_in_flight:
                    drain.moved = executor.release_all()
                    for live in drain.moved:
                        live.timeline.left(executor.executor_id, "drain", now)
                    self._router.place(drain.moved)
                    drain.copies = self._copy_cache(executor)
            if self._done(drain, now):
                self.drains.remove(drain)
                self._conclude(drain, now)

    def _others(self, executor: ExecutorHandle) -> list[ExecutorHandle]:
        return [
            other for other in self._executor_registry.executors if other is not executor and other.life is Life.SERVING
        ]

    def _may_move(self, drain: _Drain, now: float) -> bool:
        """Whether the others have room for all requests, or the time for waiting is up.

        Requests that no other executor could serve keep the executor until the deadline: elsewhere they would fail.
        """
        if now >= drain.deadline:
            return True
        others = self._others(drain.executor)
        for request in drain.executor.scheduler.requests if others else ():
            if not any(other.could_serve(request) for other in others):
                return False
        return now >= drain.room_deadline or self._others_have_room(drain.executor)

    def _others_have_room(self, executor: ExecutorHandle) -> bool:
        """Whether the others have rows and blocks for the running requests; also if there are no others."""
        others = [other.scheduler for other in self._others(executor)]
        rows = sum(one.limits.max_num_seqs - one.num_running - one.num_waiting for one in others)
        blocks = sum(one.kv.num_available * one.kv.block_size for one in others)
        own = executor.scheduler
        return not others or (rows >= own.num_running and blocks >= own.kv.num_in_use * own.kv.block_size)

    def _done(self, drain: _Drain, now: float) -> bool:
        """Whether a drain is over: all requests run elsewhere and all copies are made, or no executor stays, or time is
        up."""
        executor = drain.executor
        if executor.life is Life.LOST or now >= drain.deadline:
            return True
        if executor.life is not Life.DRAINED or not self._others(executor):
            return executor.life is Life.DRAINED
        complete = all(_has_started(live) for live in drain.moved) and all(live.done for live in drain.copies)
        return complete and not executor.scheduler.kv.pool.num_remote_pins

    def _conclude(self, drain: _Drain, now: float) -> None:
        executor = drain.executor
        copied = sum(live.done for live in drain.copies)
        for live in drain.copies:
            self._router.abort(live)  # wherever it is by now
        if executor.life is not Life.LOST and now < drain.deadline:
            self._metrics.executors_drained.inc()
        log.info(
            "%s has left %d requests and %d cached prefixes to others", executor.executor_id, len(drain.moved), copied
        )
        self._executor_registry.dismiss(executor)

    def _copy_cache(self, executor: ExecutorHandle) -> list[ClientRequest]:
        """Let others compute the hottest cached prefixes at the lowest priority: they fetch them from this executor."""
        room = {
            other: int(_SHARE_OF_FREE * other.scheduler.kv.pool.num_free)
            for other in self._others(executor)
            if other.scheduler.recoveries.planner.endpoint and executor.scheduler.recoveries.planner.endpoint
        }
        copies: list[ClientRequest] = []
        for prefix in hottest_prefixes(executor.scheduler.kv.pool, _MOST_CHAINS) if room else ():
            target = max(room, key=lambda other: room[other])
            live = _copy_request(prefix)
            num_tokens = len(live.prompt_token_ids)
            if is_adapter_salt(live.params.cache_salt):
                continue  # a block that is not fetched is computed, which takes the adapter, and only its hash is known
            if rope_salt(live.params.cache_salt, num_tokens, target.scheduler.short_rope_len) != prefix.cache_salt:
                continue  # a prompt of this length uses other LongRoPE factors on the target
            fits = target.scheduler.fits(num_tokens, 0, live.segments)
            if room[target] < prefix.num_blocks + 1 or not fits:
                continue
            room[target] -= prefix.num_blocks
            copies.append(live)
            with self._executor_registry.guarded(target):
                target.serve(live)
        return copies


def _copy_request(prefix: HotPrefix) -> ClientRequest:
    """Return a request without outputs that makes an executor hold a prefix."""
    # One more token than the prefix, because the last token of a prompt is always computed.
    tokens = array("i", prefix.tokens)
    segments = find_segments(tokens)
    tokens.append(0)
    now = clock()
    return ClientRequest(
        request_id=f"copy-{uuid4().hex}",
        prompt_token_ids=tokens,
        max_tokens=0,
        params=RequestParams(
            SamplingParams(temperature=0.0), priority=_LEAST_PRIORITY, cache_salt=without_rope(prefix.cache_salt)
        ),
        arrival_time=now,
        segments=segments,
        outputs=OutputBuilder(),
        on_end=lambda live: None,
        arrived=now,
        unfinished=1,
    )


def _has_started(live: ClientRequest) -> bool:
    """Whether another executor runs a moved request, so that it has fetched or is fetching its blocks."""
    if live.done:
        return True
    executor = live.executor
    taken = executor is not None and executor.life is not Life.DRAINED and executor.serves(live)
    return taken and all(sequence.status is not SequenceStatus.WAITING for sequence in live.sequences)
