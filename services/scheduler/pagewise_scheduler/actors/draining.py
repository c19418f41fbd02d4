"""How an executor leaves in good order: its running work moves, and what it has cached is copied to others."""

import asyncio
import logging
from array import array
from collections.abc import Callable, Sequence
from uuid import uuid4

from pagewise_shared.sampling import SamplingParams

from pagewise_scheduler.actors.engine import Abort, Engine, HandOver
from pagewise_scheduler.actors.live_request import LiveRequest, clock
from pagewise_scheduler.core.memory.hottest_prefixes import HotPrefix, hottest_prefixes
from pagewise_scheduler.core.requests.request import SequenceStatus
from pagewise_scheduler.generation import GenerationRequest
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.05
_MOST_CHAINS = 256
_SHARE_OF_FREE = 0.5
"""Of the free blocks of those who stay, what they take from one that leaves."""
_SHARE_FOR_ROOM = 0.5
"""Of its patience, what an executor that leaves goes on working where the others have no room for its work."""
_LEAST_PRIORITY = 2**31 - 1


class Draining:
    """Lets executors go. ``others``: engines that stay, in any order. ``tokenizer``: for requests that copy caches."""

    def __init__(self, tokenizer: Tokenizer, others: Callable[[Engine], Sequence[Engine]], metrics: Metrics) -> None:
        self._tokenizer = tokenizer
        self._others = others
        self._metrics = metrics
        self._quiet = Metrics("internal")  # what copies caches is nobody's request

    async def drain(self, engine: Engine, patience: float) -> None:
        """Let an engine's work and cache go to others; over after ``patience`` seconds at most.

        The engine has been taken from the router. Afterwards its executor may leave.
        """
        deadline = clock() + patience
        # What nobody has room for would only wait elsewhere: it goes on here meanwhile, and part of it finishes.
        await _until(clock() + _SHARE_FOR_ROOM * patience, lambda: engine.ended or self._others_have_room(engine))
        engine.tell(HandOver())
        await _until(deadline, lambda: engine.moved is not None or engine.ended)
        moved = engine.moved or []
        copies = [] if engine.ended else self._copy_cache(engine)

        def is_done() -> bool:
            settled = all(_has_started(live, engine) for live in moved) and all(live.done for live in copies)
            return settled and not engine.scheduler.kv.pool.num_lent

        await _until(deadline, lambda: engine.ended or not self._others(engine) or is_done())
        for live in copies:
            if not live.done:  # wherever it is by now
                live.abandoned = True
                if isinstance(live.engine, Engine):
                    live.engine.tell(Abort(live))
        if not engine.ended and clock() < deadline:
            self._metrics.executors_drained.inc()
        copied = sum(live.done for live in copies)
        log.info("%s has left %d requests and %d cached prefixes to others", engine.name, len(moved), copied)

    def _others_have_room(self, engine: Engine) -> bool:
        """Whether those who stay have rows and blocks for what runs here and waits there; or there are none of them."""
        others = [other.scheduler for other in self._others(engine)]
        rows = sum(one.limits.max_num_seqs - one.num_running - one.num_waiting for one in others)
        blocks = sum(one.kv.num_available * one.kv.block_size for one in others)
        own = engine.scheduler
        return not others or (rows >= own.num_running and blocks >= own.kv.pool.num_in_use * own.kv.block_size)

    def _copy_cache(self, engine: Engine) -> list[LiveRequest]:
        """Let others compute, at the lowest priority, what is most valuable of the cache: they fetch it from there."""
        room = {
            other: int(_SHARE_OF_FREE * other.scheduler.kv.pool.num_free)
            for other in self._others(engine)
            if other.scheduler.recoveries.endpoint and engine.scheduler.recoveries.endpoint
        }
        copies: list[LiveRequest] = []
        for prefix in hottest_prefixes(engine.scheduler.kv.pool, _MOST_CHAINS) if room else ():
            target = max(room, key=lambda other: room[other])
            if room[target] < prefix.num_blocks + 1 or not target.scheduler.fits(len(prefix.tokens) // 4 + 1, 0):
                continue
            room[target] -= prefix.num_blocks
            live = self._errand(prefix)
            copies.append(live)
            live.engine = target
            target.assign(live)
        return copies

    def _errand(self, prefix: HotPrefix) -> LiveRequest:
        # One token more than is cached: the last one of a prompt is always computed.
        tokens = array("i", prefix.tokens)
        tokens.append(0)
        generation = GenerationRequest(
            request_id=f"copy-{uuid4().hex}",
            prompt_token_ids=tokens,
            max_tokens=0,
            sampling=SamplingParams(temperature=0.0),
            priority=_LEAST_PRIORITY,
            cache_salt=prefix.cache_salt,
            arrival_time=clock(),
        )
        return LiveRequest(generation, self._tokenizer, self._quiet, lambda live: None)


async def _until(deadline: float, holds: Callable[[], bool]) -> None:
    """Look until something holds, or the time is over: rarely, and at what other actors do."""
    while not holds() and clock() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_LOOK_SECONDS)


def _has_started(live: LiveRequest, left: Engine) -> bool:
    """Whether another executor has taken it on, so that it has fetched or is fetching what it needs."""
    if live.done:
        return True
    taken = isinstance(live.engine, Engine) and live.engine is not left and live.engine.serves(live)
    return taken and all(sequence.status is not SequenceStatus.WAITING for sequence in live.request.sequences)
