"""The fleet: executors that have joined, each with its executor; what they say is checked before the core sees it."""

import logging
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import isnan
from time import monotonic as clock
from typing import cast

import msgspec
from pagewise_shared.block_hash import HASH_BYTES, ONE_ROPE
from pagewise_shared.config import DEFAULT_BATCHED_TOKENS, DEFAULT_NUM_SEQS, SchedulerConfig, parse_speculative
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
    Inventory,
    Leaving,
    Message,
    Rejoin,
    RowFailure,
    StepResult,
    TokenLogprobs,
    named_blocks,
    tier_name,
    unpack_float32s,
    unpack_int32s,
)

from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.memory.eviction_history import LostBlocks
from pagewise_scheduler.core.memory.use_history import UseHistory
from pagewise_scheduler.core.requests.virtual_tokens import VirtualTokens
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.cost_model import Eviction
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.admission_error import ImpossibleError
from pagewise_scheduler.server.executor_handle import ExecutorHandle, ExecutorLostError, Life
from pagewise_scheduler.server.offers import costs_of, flaw_of_offer, misfit, sizes_of
from pagewise_scheduler.server.router import Router
from pagewise_scheduler.server.router_socket import RouterSocket
from pagewise_scheduler.server.sessions import Loss, Session, Sessions, spoken_version

log = logging.getLogger(__name__)

_MOST = 2**31 - 1
_MAX_TEXT = 4096
_LOAD_STEPS = 2
"""How many times as long as a step the load of an adapter may take."""
_MOST_COUNTED = 1000
"""Refused connections and other events that are counted for one heartbeat: an executor may claim any number of them."""


class _Guard:
    """Hands what fails inside to ``failed``. A class, because a generator costs three times as much in every step."""

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
    """Admits executors, gives each an executor, and gives up those that fall silent or whose steps do not return.

    ``agenda``: executors that have something new to plan. ``on_joined``: called when one has joined.
    ``on_leaving``: told of executors that want to leave, and how many seconds that may take.
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
        """``keys``: the allow-lists, None: plain text."""
        super().__init__(socket, keys, metrics, config.executor_timeout, next_epoch)
        self.agenda: dict[ExecutorHandle, None] = {}
        self.on_joined: Callable[[], None] = lambda: None
        self.on_leaving: Callable[[ExecutorHandle, float], None] = lambda executor, seconds: None
        self.router: Router
        self._config = config
        self._speculative = parse_speculative(config.speculative_config) if config.speculative_config else None
        self._virtual_tokens = VirtualTokens()
        # All executors learn together.
        self._eviction: Eviction = UseHistory() if config.eviction == "cost" else config.eviction
        self._lost_blocks = LostBlocks()  # of all executors: a request may be placed on another one than before
        self._fingerprint: str | None = None
        self._session_of: dict[ExecutorHandle, Session[ExecutorHandle]] = {}
        self.directory = PrefixDirectory()
        self._heartbeat_counters = {
            "refused": metrics.connections_refused("unknown_key_blocks"),
            "storage_errors": metrics.storage_errors,
            "grammar_waits": metrics.grammar_waits,
        }

    @property
    def executors(self) -> list[ExecutorHandle]:
        """Of all executors that are in, whether they take requests or are about to leave."""
        return list(self._session_of)

    def guarded(self, executor: ExecutorHandle) -> "_Guard":
        """Whatever fails inside costs the executor, whose requests move on, and nobody else."""
        return _Guard(executor, self._failed)

    def _failed(self, executor: ExecutorHandle, error: Exception) -> None:
        if isinstance(error, ExecutorLostError):
            self._end(executor, str(error), Loss.MISBEHAVED)
        else:
            log.error("the scheduler of %s failed", executor.executor_id, exc_info=error)
            self._end(executor, "its scheduler failed", Loss.FAILED)

    def plan(self) -> None:
        """Plan ahead for every executor that has something new, and for those that get something to do by that."""
        while self.agenda:
            executor, _ = self.agenda.popitem()
            with self.guarded(executor):
                executor.plan_ahead()

    def dismiss(self, executor: ExecutorHandle) -> None:
        """Tell an executor that was drained that it may go."""
        if (session := self._session_of.get(executor)) is not None:
            self.socket.send(session.identity, Drain(session.epoch))

    def watch(self, now: float, stood_still: float) -> None:
        """Give up executors that fell silent, or whose steps or copies do not return."""
        super().watch(now, stood_still)
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

    def _give_up_loads(self, executor: ExecutorHandle, now: float) -> None:
        """Adapters that are not loaded in time cost their requests, and not the executor: what hangs is their files."""
        most = _LOAD_STEPS * self._config.step_timeout
        if not (failed := executor.scheduler.features.give_up(now, most)):
            return
        log.warning(
            "%s: adapters are not loaded within %g s: %d requests fail", executor.executor_id, most, len(failed)
        )
        for request in failed:
            name = request.params.adapter.name if request.params.adapter is not None else ""
            why = f"the executor has not told of any load for more than {most:g} s"
            executor.fail(request, f"the adapter {printable(name)!r} cannot be loaded: {why}")

    # ---- joining -------------------------------------------------------------------------------------

    def _admit(self, identity: bytes, key: str, hello: Message, now: float) -> None:
        hello = cast(Hello, hello)
        for other in self.others(identity):
            # The same process on another connection: the old one has broken, which nobody may have noticed yet.
            same = (other.name, other.peer.hello.block_endpoint, other.key)
            if hello.block_endpoint and same == (hello.executor_id, hello.block_endpoint, key):
                self.lose(other, "it is back on another connection", Loss.REJOINED)
        others = self.others(identity)
        refusal = (
            flaw_of_offer(hello)
            or self.guard.refusal(hello.executor_id, key, [(other.name, other.key) for other in others])
            or misfit(hello, [other.peer.hello for other in others], self._fingerprint)
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
        executor.scheduler.kv.eviction_history.executor_id, executor.scheduler.kv.eviction_history.lost = (
            hello.executor_id,
            self._lost_blocks,
        )
        session = Session(identity, key, hello.executor_id, executor, epoch, now, self.new_detector(now))
        self.enter(session)
        self._session_of[executor] = session
        self._share(executor, key)
        keeps = hello.inventory is not None and self._expect(executor, hello.inventory)
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
            # When others give its blocks back there may be room again for what it could not plan.
            scheduler.recoveries.join(self.directory, Peer(endpoint, block_format, scheduler, executor.touch, key))

    def _expect(self, executor: ExecutorHandle, inventory: Inventory) -> bool:
        """Expect the blocks that an executor holds from before; False: it holds none that could be used."""
        kv = executor.scheduler.kv
        try:
            kv.expect(named_blocks(inventory))
        except (ValueError, ProtocolError) as error:
            self.metrics.frames_dropped("bad_inventory").inc()
            log.warning("executor %s offers blocks that cannot be: %s", executor.executor_id, error)
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
        return Scheduler(
            features=FeatureOptions(hello.adapters, hello.max_grammars, self._speculative),
            model_fingerprint=hello.model_fingerprint,
            num_blocks=hello.num_blocks,
            block_size=hello.block_size,
            max_num_seqs=_limit(config.max_num_seqs, hello.max_num_seqs, DEFAULT_NUM_SEQS),
            max_num_batched_tokens=_limit(
                config.max_num_batched_tokens, hello.max_num_batched_tokens, DEFAULT_BATCHED_TOKENS
            ),
            epoch=epoch,
            tiers=sizes_of(hello),
            costs=costs_of(hello),
            recovery=config.recovery,
            eviction=self._eviction,
            max_model_len=min(hello.max_model_len, longest or hello.max_model_len),
            virtual_tokens=self._virtual_tokens,
            salted=config.storage_salted,
            short_rope_len=hello.short_rope_len or ONE_ROPE,
        )

    # ---- what executors say --------------------------------------------------------------------------

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
                case Heartbeat():
                    self._take_counts(executor, message)
                case Leaving(timeout_ms=milliseconds):
                    self._leave(executor, milliseconds / 1000)
        except ImpossibleError as error:
            self.metrics.frames_dropped("impossible").inc()
            self.lose(session, f"it told of {error}", Loss.MISBEHAVED)

    def _take_counts(self, executor: ExecutorHandle, heartbeat: Heartbeat) -> None:
        """Add to the metrics what an executor has counted since its last heartbeat."""
        executor.num_tasks = heartbeat.tasks
        for name, counter in self._heartbeat_counters.items():
            more = getattr(heartbeat, name) - executor.counted[name]
            if more > 0:
                counter.inc(min(more, _MOST_COUNTED))
                executor.counted[name] += more

    def _leave(self, executor: ExecutorHandle, seconds: float) -> None:
        """Take an executor that wants to leave from the router; it goes on with what it has."""
        if executor.life is Life.SERVING:
            log.info("executor %s is leaving: its work moves", executor.executor_id)
            executor.life = Life.DRAINING
            self.router.left(executor)
            self.on_leaving(executor, seconds)

    # ---- who is lost ---------------------------------------------------------------------------------

    def _end(self, executor: ExecutorHandle, reason: str, loss: Loss) -> None:
        """An executor cannot go on; its executor may join anew."""
        if (session := self._session_of.get(executor)) is not None:
            self.lose(session, reason, loss)
            self.socket.send(session.identity, Rejoin())

    def _lost(self, session: Session[ExecutorHandle], reason: str, loss: Loss) -> None:
        executor = session.peer
        del self._session_of[executor]
        level = logging.INFO if loss.expected else logging.WARNING
        log.log(level, "executor %s is gone: %s; its requests move on", session.name, reason)
        self.router.left(executor)
        moved = executor.lose(loss)
        for live in moved:
            live.timeline.left(executor.executor_id, loss.value, clock())
        endpoint, peers = executor.scheduler.recoveries.endpoint, self.directory.peers
        if (peer := peers.get(endpoint)) is not None and peer.scheduler is executor.scheduler:
            del peers[endpoint]
            for other in self.executors:
                with self.guarded(other):
                    other.peer_lost(endpoint)
        self.router.place(moved)


def _described(hello: Hello) -> str:
    """An executor, for the line that says that it joined."""
    lower = "".join(f", {tier.num_blocks} on the {tier_name(tier.number)}" for tier in hello.tiers)
    kernels = hello.kernels and f" by {hello.kernels}"
    role = f", for {hello.role}" if hello.role != "both" else ""
    return (
        f"{hello.num_blocks} blocks of {hello.block_size} tokens{lower}, {hello.device} {hello.dtype}{kernels}{role}"
        f"{spoken_version(hello)}"
    )


def _limit(asked: int | None, offered: int, default: int) -> int:
    """Return a limit of an executor's steps: what the options ask for, as far as it has ``offered`` room for that.

    ``offered`` is 0 if it has room for any. ``default``: of executors and schedulers that both leave it to the other.
    """
    asked = asked or offered or default
    return min(asked, offered or asked)


def checked_tokens(result: StepResult, hello: Hello) -> list[int]:
    """The tokens of a result of the executor that said ``hello``. The core checks whether they fit the step.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if len(result.tokens) % 4:
        raise ImpossibleError(f"{len(result.tokens)} bytes of tokens")
    tokens = array("I", result.tokens).tolist()  # unsigned: one that is negative is too large
    if tokens and max(tokens) >= hello.vocab_size:
        raise ImpossibleError(f"a token outside its vocabulary of {hello.vocab_size}")
    if not 0 <= result.elapsed_us <= _MOST:
        raise ImpossibleError(f"a step of {result.elapsed_us} µs")
    if result.failures:
        _check_failures(result.failures, len(tokens))
    if result.logprobs or result.prompt_logprobs:
        _check_logprobs(result, len(tokens), hello)
    return tokens


def _check_failures(failures: Sequence[RowFailure], num_tokens: int) -> None:
    indices = [failure.index for failure in failures]
    if not _rise(indices, 0, num_tokens) or any(len(one.message) > _MAX_TEXT for one in failures):
        raise ImpossibleError("failures of no token, or with a message that is too long")


def _check_logprobs(result: StepResult, num_tokens: int, hello: Hello) -> None:
    indices = [entry.index for entry in result.logprobs]
    if not _rise(indices, 0, num_tokens) or not _sound(result.logprobs, hello):
        raise ImpossibleError("log-probabilities of no token, or that are none")
    for prompt in result.prompt_logprobs:
        indices = [entry.index for entry in prompt.entries]
        if not _rise(indices, 1, hello.max_model_len) or not _sound(prompt.entries, hello):
            raise ImpossibleError("log-probabilities of no token of a prompt, or that are none")


def check_copies(copied: Copied) -> None:
    """Look at a report of copies.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if len(copied.bad) % 4:
        raise ImpossibleError(f"{len(copied.bad)} bytes of blocks")
    if not 0 <= copied.elapsed_us <= _MOST:
        raise ImpossibleError(f"copies of {copied.elapsed_us} µs")


def check_loaded(loaded: AdapterLoaded) -> None:
    """Look at a report of an adapter.

    Raises:
        ImpossibleError: something in it cannot be.
    """
    if not 0 <= loaded.elapsed_us <= _MOST:
        raise ImpossibleError(f"an adapter that took {loaded.elapsed_us} µs")
    if any(len(content) != HASH_BYTES for content in loaded.evicted):
        raise ImpossibleError("the hash of an adapter that is none")


def _rise(indices: list[int], first: int, end: int) -> bool:
    """Whether they lie in [first, end) and each is greater than the one before: so there are never more than fit."""
    return not indices or (indices[0] >= first and indices[-1] < end and all(a < b for a, b in pairwise(indices)))


def _sound(entries: Sequence[TokenLogprobs], hello: Hello) -> bool:
    """Whether tokens, ranks and log-probabilities lie where they can. Those of all alternatives are looked at together:
    a step may have tens of thousands."""
    if not entries:
        return True
    _, tokens, logprobs, ranks, top_ids, top_logprobs = map(
        list, zip(*map(msgspec.structs.astuple, entries), strict=True)
    )
    sizes = list(map(len, top_ids))
    if sizes != list(map(len, top_logprobs)) or any(size % 4 for size in sizes):
        return False
    tokens += unpack_int32s(b"".join(top_ids))
    logprobs += unpack_float32s(b"".join(top_logprobs))
    vocabulary = hello.vocab_size
    return (
        0 <= min(tokens) <= max(tokens) < vocabulary
        and max(sizes) <= 4 * vocabulary
        and 1 <= min(ranks) <= max(ranks) <= vocabulary
        # Rounding may exceed 0 by a little. ``max`` may pass over a NaN, a sum does not.
        and max(logprobs) < 1
        and not isnan(sum(logprobs))
    )
