"""The registry of executors: they join here, their messages go to their handles, and late executors are lost here."""

import logging
from collections.abc import Callable
from time import monotonic as clock
from typing import cast

from pagewise_shared.block_hash import ONE_ROPE
from pagewise_shared.config import (
    DEFAULT_BATCHED_TOKENS,
    DEFAULT_NUM_SEQS,
    SchedulerConfig,
    prompt_lookup,
)
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ProtocolError
from pagewise_shared.logs import printable
from pagewise_shared.protocol import (
    AdapterLoaded,
    Copied,
    Drain,
    Found,
    GrammarCompiled,
    Heartbeat,
    Hello,
    Leaving,
    Message,
    Rejoin,
    StepResult,
    StoredDropped,
    StoredGone,
    tier_name,
)

from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.memory.eviction_history import LostBlocks
from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.requests.virtual_tokens import VirtualTokens
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Eviction
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.block_watchers import BlockWatchers
from pagewise_scheduler.server.cache_reset import CacheResets
from pagewise_scheduler.server.client_request import ClientRequest
from pagewise_scheduler.server.executor_checks import (
    check_copies,
    check_loaded,
    checked_inventory,
    checked_tokens,
    costs_of,
    hello_error,
    incompatibility,
    shape_of,
    sizes_of,
)
from pagewise_scheduler.server.executor_handle import MAX_STEPS_IN_FLIGHT, ExecutorHandle, ExecutorLostError, Life
from pagewise_scheduler.server.router import Router
from pagewise_scheduler.server.router_socket import RouterSocket
from pagewise_scheduler.server.sessions import ImpossibleError, Loss, Session, Sessions, spoken_version

log = logging.getLogger(__name__)

_GIB = 2**30
_LOAD_STEPS = 2
"""The time-out of loading an adapter, in step time-outs."""
_MOST_COUNTED = 1000
"""The maximum that a counter of a heartbeat may grow by: an executor could claim any number of events."""


class _Guard:
    """Passes an exception inside to ``failed``. A class, because a generator costs three times as much in every
    step."""

    __slots__ = ("_executor", "_failed")

    def __init__(self, executor: ExecutorHandle, failed: Callable[[ExecutorHandle, Exception], None]) -> None:
        self._executor, self._failed = executor, failed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._failed(self._executor, error)
        return True


class ExecutorRegistry(Sessions[ExecutorHandle]):
    """Admits executors, creates their handles, and ends sessions whose steps or copies do not return.

    ``agenda``: executors to plan for. ``on_joined``: called after an executor has joined. ``on_leaving``: called with
    an executor that asks to be drained, and the seconds that it grants.
    """

    hello_type = Hello
    name_field = "executor_id"
    least_timeout = 1.5  # six heartbeats: its requests can go on elsewhere at once

    def __init__(
        self,
        socket: RouterSocket,
        keys: Keys | None,
        metrics: Metrics,
        config: SchedulerConfig,
        next_epoch: Callable[[], int],
    ) -> None:
        super().__init__(socket, keys, metrics, config.executor_timeout, next_epoch)
        self.agenda: dict[ExecutorHandle, None] = {}
        self.on_joined: Callable[[], None] = lambda: None
        self.on_leaving: Callable[[ExecutorHandle, float], None] = lambda executor, seconds: None
        self.router: Router
        self._config = config
        self._speculative = prompt_lookup(config.speculative_config)
        self._virtual_tokens = VirtualTokens()
        # All executors share these. A request may be placed on another executor than before, so lost blocks are shared.
        self._eviction: Eviction = UseHistory() if config.eviction == "cost" else config.eviction
        self._lost_blocks = LostBlocks()
        self._fingerprint: str | None = None
        # Requests that lost their executor and have no token since, with their output tokens at that time.
        self._interrupted: dict[ClientRequest, int] = {}
        self._interrupted_since = 0.0
        self._session_of: dict[ExecutorHandle, Session[ExecutorHandle]] = {}
        self.directory = PrefixDirectory()
        self.watchers = BlockWatchers(config, metrics)
        self.resets = CacheResets(self.guarded)

    @property
    def executors(self) -> list[ExecutorHandle]:
        """All executors that have joined, including draining ones."""
        return list(self._session_of)

    def guarded(self, executor: ExecutorHandle) -> "_Guard":
        """Return a context in which an exception ends the executor's session, and its requests move on; nothing is
        raised."""
        return _Guard(executor, self._failed)

    def _failed(self, executor: ExecutorHandle, error: Exception) -> None:
        if isinstance(error, ExecutorLostError):
            self._end(executor, str(error), Loss.MISBEHAVED)
        else:
            log.error("the scheduler of %s failed", executor.executor_id, exc_info=error)
            self._end(executor, "its scheduler failed", Loss.FAILED)

    def plan(self) -> None:
        """Plan for every executor on the agenda, including executors that this adds to it."""
        while self.agenda:
            executor, _ = self.agenda.popitem()
            with self.guarded(executor):
                executor.plan_ahead()

    def dismiss(self, executor: ExecutorHandle) -> None:
        """Let a drained executor stop."""
        if (session := self._session_of.get(executor)) is not None:
            self.socket.send(session.identity, Drain(session.epoch))

    def tick(self, now: float, stood_still: float) -> None:
        """Cancel late copies; end sessions of executors that are silent, or whose steps or copies do not return."""
        super().tick(now, stood_still)
        self._report_resumed(now)
        most = self._config.step_timeout
        for session in self:
            executor = session.peer
            if (began := executor.oldest_step_time) is not None and now - began > most:
                self.lose(session, f"a step has not returned for {now - began:.1f} s", Loss.STALLED)
            elif (due := executor.scheduler.recoveries.transfers.oldest_due) is not None and now > due:
                if now - due > most:
                    late = f"a copy to or from one of its lower tiers or a peer is {now - due:.1f} s late"
                    self.lose(session, late, Loss.STALLED)
                else:
                    executor.cancel_late_fetches(now)
            with self.guarded(executor):
                self._give_up_loads(executor, now)
                if executor.scheduler.features.are_due(now):
                    executor.touch()

    def _give_up_loads(self, executor: ExecutorHandle, now: float) -> None:
        """Fail the requests whose adapters are not loaded in time. The executor stays: its adapter's files are the
        problem."""
        most = _LOAD_STEPS * self._config.step_timeout
        if not (failed := executor.scheduler.features.give_up(now, most)):
            return
        name = executor.executor_id
        log.warning("%s: adapters are not loaded within %g s: %d requests fail", name, most, len(failed))
        for request in failed:
            name = request.params.adapter.name if request.params.adapter is not None else ""
            why = f"the executor has not reported any load for more than {most:g} s"
            executor.fail(request, f"the adapter {printable(name)!r} cannot be loaded: {why}")

    # ---- joining -------------------------------------------------------------------------------------

    def _admit(self, identity: bytes, key: str, hello: Message, now: float) -> None:
        hello = cast(Hello, hello)
        for other in self.others(identity):
            # The same process on another connection: the old connection has broken, but its time-out is still running.
            same = (other.name, other.peer.hello.block_endpoint, other.key)
            if hello.block_endpoint and same == (hello.executor_id, hello.block_endpoint, key):
                self.lose(other, "it is back on another connection", Loss.REJOINED)
        others = self.others(identity)
        refusal = (
            hello_error(hello)
            or self.guard.refusal(hello.executor_id, key, [(other.name, other.key) for other in others])
            or incompatibility(hello, [other.peer.hello for other in others], self._fingerprint)
        )
        if refusal is not None:
            self.refuse(identity, hello.executor_id, refusal)
            return
        self._fingerprint = hello.model_fingerprint
        epoch = self._next_epoch()
        executor = ExecutorHandle(
            hello,
            self._scheduler(hello, epoch),
            lambda message: self.send(session, message),
            lambda: self._begin_epoch(session),
            self.agenda,
            self.metrics,
        )
        history = executor.scheduler.kv.eviction_history
        history.executor_id, history.lost = hello.executor_id, self._lost_blocks
        if hello.bytes_per_block and not executor.scheduler.kv.windows:
            history.num_ghosts = _GIB // hello.bytes_per_block
        session = Session(identity, key, hello.executor_id, executor, epoch, now, self.new_detector(now))
        # The order matters: earlier sessions of the executor end first, so that their requests move on and their block
        # endpoint is free; the Welcome precedes any plan; and only then requests are placed here.
        self.enter(session)
        self._session_of[executor] = session
        self.watchers.join(executor)
        self._share(executor, key)
        keeps = hello.inventory is not None and self._expect(executor)
        self.socket.send(identity, executor.welcome(keeps_blocks=keeps, hello=hello.number))
        log.info("executor %s joined: %s", hello.executor_id, _described(hello))
        self.router.joined(executor)
        self.on_joined()

    def _share(self, executor: ExecutorHandle, key: str) -> None:
        """Let other executors fetch blocks from this one, and it from them. ``key``: its public key."""
        hello, scheduler = executor.hello, executor.scheduler
        endpoint = hello.block_endpoint
        if endpoint and endpoint not in self.directory.peers:
            block_format = (hello.block_format, hello.block_size, hello.bytes_per_block)
            # When other executors have read its blocks, there may be room again for sequences that had to wait.
            own = Peer(endpoint, block_format, scheduler, executor.touch, key)
            scheduler.recoveries.planner.join(self.directory, own)

    def _expect(self, executor: ExecutorHandle) -> bool:
        """Restore the inventory of an executor; return False if it is not usable."""
        kv = executor.scheduler.kv
        try:
            kv.expect(checked_inventory(executor.hello))
        except (ValueError, ProtocolError) as error:
            self.metrics.frames_dropped("bad_inventory").inc()
            log.warning("executor %s has an invalid inventory: %s", executor.executor_id, error)
            return False
        held = {tier_name(tier.number): len(tier.recoverable) for tier in kv.tiers.values()}
        log.info("%s holds blocks: %s", executor.executor_id, held)
        return True

    def _begin_epoch(self, session: Session[ExecutorHandle]) -> int:
        session.epoch = self._next_epoch()
        return session.epoch

    def _scheduler(self, hello: Hello, epoch: int) -> Scheduler:
        config = self._config
        longest = hello.max_model_len if config.max_model_len == "auto" else config.max_model_len
        budget = _limit(config.max_num_batched_tokens, hello.max_num_batched_tokens, DEFAULT_BATCHED_TOKENS)
        return Scheduler(
            features=FeatureOptions.of(hello, self._speculative),
            model_fingerprint=hello.model_fingerprint,
            num_blocks=hello.num_blocks,
            block_size=hello.block_size,
            max_num_seqs=_limit(config.max_num_seqs, hello.max_num_seqs, DEFAULT_NUM_SEQS),
            max_num_batched_tokens=budget,
            epoch=epoch,
            tiers=sizes_of(hello),
            costs=costs_of(hello),
            recovery=config.recovery,
            eviction=self._eviction,
            max_model_len=min(hello.max_model_len, longest or hello.max_model_len),
            virtual_tokens=self._virtual_tokens,
            salted=config.storage_salted,
            short_rope_len=hello.short_rope_len or ONE_ROPE,
            shape=shape_of(hello, MAX_STEPS_IN_FLIGHT * budget),
        )

    # ---- messages ------------------------------------------------------------------------------------

    def _apply(self, session: Session[ExecutorHandle], message: Message) -> None:
        executor = session.peer
        try:
            match message:
                case StepResult():
                    tokens = checked_tokens(message, executor.hello)
                    with self.guarded(executor):
                        if (output := executor.take_result(message, tokens)) is not None:
                            self.router.stepped(executor, output)
                case Copied():
                    check_copies(message)
                    with self.guarded(executor):
                        executor.take_copied(message)
                case AdapterLoaded():
                    check_loaded(message)
                    with self.guarded(executor):
                        executor.take_answer(message, message.error)
                case GrammarCompiled():
                    executor.take_answer(message)
                case Found():
                    self.router.look_ups.found(executor, message)
                case StoredDropped():
                    self.resets.dropped(executor, message)
                case StoredGone():
                    self.watchers.stored_gone(executor, message)
                case Heartbeat():
                    self._take_counts(executor, message)
                case Leaving(timeout_ms=milliseconds):
                    self._leave(executor, milliseconds / 1000)
        except ImpossibleError as error:
            self.metrics.frames_dropped("impossible").inc()
            self.lose(session, f"it reported {error}", Loss.MISBEHAVED)

    def _take_counts(self, executor: ExecutorHandle, heartbeat: Heartbeat) -> None:
        """Add the growth of the counters since the last heartbeat to the metrics."""
        executor.num_tasks = heartbeat.tasks
        for name, counter in self.metrics.of_heartbeats.items():
            more = getattr(heartbeat, name) - executor.counted[name]
            if more > 0:
                counter.inc(min(more, _MOST_COUNTED))
                executor.counted[name] += more

    def _leave(self, executor: ExecutorHandle, seconds: float) -> None:
        """Take an executor that wants to stop from the router, and begin to drain it."""
        if executor.life is Life.SERVING:
            log.info("executor %s is leaving: its work moves", executor.executor_id)
            executor.life = Life.DRAINING
            self.router.left(executor)
            self.on_leaving(executor, seconds)

    # ---- losing --------------------------------------------------------------------------------------

    def _end(self, executor: ExecutorHandle, reason: str, loss: Loss) -> None:
        """End an executor's session, and let it join again."""
        if (session := self._session_of.get(executor)) is not None:
            self.lose(session, reason, loss)
            self.socket.send(session.identity, Rejoin())

    def _lost(self, session: Session[ExecutorHandle], reason: str, loss: Loss) -> None:
        executor = session.peer
        del self._session_of[executor]
        level = logging.INFO if loss.expected else logging.WARNING
        log.log(level, "executor %s is gone: %s; its requests move on", session.name, reason)
        # No request may be placed here, and no peer may fetch from here, when the requests are placed again below.
        self.router.left(executor)
        moved = executor.lose(loss)
        self.watchers.leave(executor)
        self.resets.lost(executor)
        for live in moved:
            live.timeline.left(executor.executor_id, loss.value, clock())
        endpoint, peers = executor.scheduler.recoveries.planner.endpoint, self.directory.peers
        if (peer := peers.get(endpoint)) is not None and peer.scheduler is executor.scheduler:
            del peers[endpoint]
            for other in self.executors:
                with self.guarded(other):
                    other.peer_lost(endpoint)
        self.router.place(moved)
        if not self._interrupted:
            self._interrupted_since = clock()
        self._interrupted |= {live: live.num_output_tokens for live in moved}

    def _report_resumed(self, now: float) -> None:
        """Log once that the requests which lost their executor go on, when none of them is left waiting."""
        if any(not live.done and live.num_output_tokens <= tokens for live, tokens in self._interrupted.items()):
            return
        if resumed := sum(live.failure is None for live in self._interrupted):
            requests, seconds = f"{resumed} request{'s' * (resumed != 1)}", now - self._interrupted_since
            log.info("%s resumed within %.1f s of the loss of an executor", requests, seconds)
        self._interrupted.clear()


def _described(hello: Hello) -> str:
    lower = "".join(f", {tier.num_blocks} on the {tier_name(tier.number)}" for tier in hello.tiers)
    kernels = hello.kernels and f" by {hello.kernels}"
    role = f", for {hello.role}" if hello.role != "both" else ""
    device = f"{hello.num_pages} pages for {len(hello.groups)} groups" if hello.groups else f"{hello.num_blocks} blocks"
    return (
        f"{device} of {hello.block_size} tokens{lower}, {hello.device} {hello.dtype}{kernels}{role}"
        f"{spoken_version(hello)}"
    )


def _limit(asked: int | None, offered: int, default: int) -> int:
    """Return a limit of an executor's steps: the scheduler's option, or else the executor's limit, or else ``default``.

    ``offered``: the executor's limit, which an option cannot exceed; 0: it has none.
    """
    asked = asked or offered or default
    return min(asked, offered or asked)
