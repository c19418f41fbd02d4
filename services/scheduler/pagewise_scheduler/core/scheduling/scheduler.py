"""Continuous batching over one executor's KV memory: which sequences run in the next step, and with which blocks."""

from collections import deque
from collections.abc import Mapping, Sequence
from weakref import proxy

from pagewise_shared.block_hash import ONE_ROPE
from pagewise_shared.protocol import Copied, StepPlan, StepResult
from pagewise_shared.protocol.limits import longest_sequence
from pagewise_shared.segments import Segment

from pagewise_scheduler.core.features.registry import FeatureOptions, Features
from pagewise_scheduler.core.memory.eviction import PREEMPTED
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.requests.request import FinishReason, Preempted, Request, RequestSequence, SequenceStatus
from pagewise_scheduler.core.requests.timeline import BLOCKS_CORRUPT, LENDER_GONE
from pagewise_scheduler.core.requests.virtual_tokens import VirtualTokens
from pagewise_scheduler.core.requests.waiting_queue import WaitingQueue
from pagewise_scheduler.core.scheduling.decode_set import DecodeSet
from pagewise_scheduler.core.scheduling.plan_builder import PlanBuilder
from pagewise_scheduler.core.scheduling.prefill_set import PrefillSet
from pagewise_scheduler.core.scheduling.step import (
    Chunks,
    StepInFlight,
    StepLimits,
    StepOutput,
    check_result,
    take_logprobs,
    take_tokens,
)
from pagewise_scheduler.core.tiers.arena import ArenaShape
from pagewise_scheduler.core.tiers.cost_model import CostModel, Costs, Eviction, make_policy
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.recovery import Recoveries
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode, RecoveryPolicy
from pagewise_scheduler.core.tiers.transfers import Loads


class Scheduler:
    """Plans steps for one executor and applies their results.

    ``schedule`` may run ahead of ``update``: step N + 1 is planned before the tokens of step N are known. Decodes come
    first, then prefill chunks, all under one token budget. Blocks are allocated when a step needs them, never ahead.
    The class has no clock and sends nothing: callers pass the time, and send the plans.

    ``last_step``: number of the newest planned step. ``steps_in_flight``: planned steps without a result, the oldest
    first. ``entered``: requests whose sequences wait or run, by their ids.

    ``tiers``: by the number of each tier below the device, its number of blocks, or its identity if its blocks have no
    ids. ``salted``: KV of requests with a cache salt may go to tiers without ids. ``costs``: times of the executor's
    steps and copies, measured when it started. ``recovery``: the way in which KV returns from lower tiers and peers.
    ``virtual_tokens``: service of each API key, shared with other schedulers. ``features``: abilities of the executor
    that features need. ``short_rope_len``: most tokens of a sequence with the short factors of LongRoPE.
    ``shape``: of the device memory of a model with several groups of layers.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        epoch: int = 1,
        tiers: Mapping[int, int | str] | None = None,
        costs: Costs | None = None,
        recovery: RecoveryMode = "auto",
        eviction: Eviction = "lru",
        model_fingerprint: str = "",
        virtual_tokens: VirtualTokens | None = None,
        max_model_len: int = 2**31,
        salted: bool = True,
        features: FeatureOptions = FeatureOptions(),  # noqa: B008 - it is frozen
        short_rope_len: int = ONE_ROPE,
        shape: ArenaShape | None = None,
    ) -> None:
        self.epoch, self.max_model_len = epoch, min(max_model_len, longest_sequence(block_size))
        sizes = {number: size for number, size in (tiers or {}).items() if size}
        self.costs = model = CostModel(costs or Costs(), block_size, max_num_batched_tokens, sizes)
        policy = RecoveryPolicy(model, recovery)
        lower = {number: (size, model.tiers[number]) for number, size in sizes.items()}
        memory = block_size, lower, make_policy(eviction, model, num_blocks), policy, model_fingerprint
        self.kv = (
            KVCacheManager(num_blocks, *memory, salted=salted)
            if shape is None
            else GroupedKVCacheManager(shape, *memory, salted=salted)
        )
        self.recoveries = Recoveries(self.kv, model, policy)
        self.limits, self.waiting = StepLimits(max_num_seqs, max_num_batched_tokens), WaitingQueue(virtual_tokens)
        self.num_preemptions, self.last_step = 0, 0
        self.plan, self.short_rope_len = PlanBuilder(), short_rope_len
        self.decoding, self.free_rows = DecodeSet(block_size), list(range(max_num_seqs - 1, -1, -1))
        # A proxy: with a cycle, the memory of a lost executor would wait for the garbage collector.
        self.features = Features(proxy(self), features)
        self.prefilling = PrefillSet(self)
        self.activity = self.prefilling.activity
        self.entered: dict[str, Request] = {}
        self._kept: dict[str, Request] = {}  # by features, until they may enter
        self.steps_in_flight: deque[StepInFlight] = deque()

    # ---- requests ------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and run."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def prefix_hits(self) -> tuple[int, int]:
        """Tokens that were looked up in the cache when sequences started, and how many of them were on the device."""
        return self.prefilling.num_queries, self.prefilling.num_hits

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for admission or are kept by features, preempted ones included."""
        return len(self.waiting) + self.features.kept().sequences

    @property
    def num_in_flight(self) -> int:
        """Steps planned whose results have not come back."""
        return len(self.steps_in_flight)

    @property
    def oldest_step(self) -> int | None:
        """The number of the oldest step in flight; None: there is none."""
        return self.steps_in_flight[0].step if self.steps_in_flight else None

    @property
    def newest_in_flight(self) -> int | None:
        """The number of the newest step in flight; None: there is none."""
        return self.last_step if self.steps_in_flight else None

    @property
    def has_unsent_demotions(self) -> bool:
        """Whether blocks are to be copied to lower tiers, and no plan has the copies yet."""
        return self.plan.copies.demotes

    @property
    def running(self) -> list[RequestSequence]:
        """Sequences that hold blocks and run."""
        return [*self.prefilling, *self.decoding.order()]

    @property
    def requests(self) -> list[Request]:
        """Requests of clients that have not finished; the requests that features keep come last."""
        return [*self.entered.values(), *self._kept.values()]

    def fits(self, num_prompt_tokens: int, max_tokens: int, segments: Sequence[Segment] = ()) -> bool:
        """Whether a sequence of that size could run if it had the pool to itself (its last token needs no slot)."""
        slots, longest = max(num_prompt_tokens, num_prompt_tokens + max_tokens - 1), num_prompt_tokens + max_tokens
        if segments:
            slots += self.features.segments.num_slots(segments)
            longest = max(longest, self.features.segments.longest_original(segments))
        return slots <= self.kv.capacity_tokens and longest <= self.max_model_len

    def add(self, request: Request) -> None:
        """Queue a request. If it already has sequences with tokens (from another executor), it continues from them.

        Raises:
            ValueError: it could never fit, its id is in use, or the executor lacks one of its features.
        """
        if not self.fits(len(request.prompt_token_ids), request.max_tokens, request.segments):
            raise ValueError(f"{request.request_id} needs more than the {self.kv.capacity_tokens} tokens of the pool")
        if request.request_id in self.entered or request.request_id in self._kept:
            raise ValueError(f"request {request.request_id} is here already")
        request.short_rope_len, request.features = self.short_rope_len, self.features.of(request)
        request.create_sequences()
        if all(feature.enter(request) for feature in request.features):
            self.enter(request)
            return
        self._kept[request.request_id] = request
        for sequence in request.sequences:
            if not sequence.finished:  # it may have run elsewhere, or before a reset
                sequence.status, sequence.prefilled, sequence.last_step = SequenceStatus.WAITING, False, 0

    def enter(self, request: Request) -> None:
        """Put the sequences of a request into the waiting queue; features call it for requests that they have kept."""
        self._kept.pop(request.request_id, None)
        self.waiting.arrive(request)
        self.entered[request.request_id] = request
        for sequence in request.sequences:
            if not sequence.finished:
                self.kv.restore(sequence.cache_salt, sequence.token_bytes)
                sequence.table = self.kv.new_table(sequence.cache_salt, request.ref)
                sequence.last_step = 0
                sequence.path.clear()
                self.waiting.push(sequence)
                request.timeline.queued(self.activity, request.placed_at)
        for feature in request.features:
            feature.entered(request)

    def take_back(self, request: Request) -> None:
        """Undo ``enter`` for a request of which nothing has begun: a feature keeps it again."""
        self.waiting.withdraw(request)
        for feature in request.features:
            feature.taken_back(request)
        self._kept[request.request_id] = self.entered.pop(request.request_id)

    def abort(self, request_id: str) -> list[RequestSequence]:
        """End a request's sequences and free their blocks; returns the sequences that had not finished."""
        if (request := self.entered.get(request_id) or self._kept.get(request_id)) is None:
            return []
        ended = [sequence for sequence in request.sequences if not sequence.finished]
        features, request.num_pending = request.features, 0
        for sequence in ended:
            self.finish(sequence, "abort")
        for feature in features:
            ended = feature.aborted(request, ended)
        return ended

    def finish(self, sequence: RequestSequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence. Its tokens in flight are dropped when they come back."""
        if sequence.finished:
            return
        for feature in sequence.request.features:
            feature.ended(sequence, reason)
        if sequence.status is not SequenceStatus.WAITING:
            self.vacate(sequence)
        elif sequence.request.request_id not in self._kept:
            self.waiting.take(sequence, SequenceStatus.FINISHED)
        sequence.end(reason, stop_reason)
        if sequence.request.finished:
            self.forget(sequence.request)

    def forget(self, request: Request) -> None:
        """Remove a request that has ended or migrates; harmless the second time."""
        if self.entered.pop(request.request_id, None) is not None:
            self.waiting.forget_pending(request)
        self._kept.pop(request.request_id, None)
        for feature in request.features:
            feature.leave(request, self.last_step)
        request.features = ()

    def release_all(self) -> list[Request]:
        """Remove and return every unfinished request; the executor is gone or reset. They continue elsewhere, or here,
        from their tokens."""
        requests = self.requests
        for request in (*requests, *(own for feature in self.features.in_use for own in feature.requests)):
            for sequence in request.sequences:
                if sequence.status is not SequenceStatus.WAITING and not sequence.finished:
                    self.vacate(sequence)
        for feature in self.features.in_use:
            feature.clear()
        self.prefilling.clear()
        self.waiting.clear()
        self.recoveries.clear()
        self.entered.clear()
        self._kept.clear()
        self.steps_in_flight.clear()
        self.kv.step_returned(self.last_step)
        self.plan.clear()
        for request in requests:
            request.features = ()
        return requests

    # ---- planning ------------------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to run, or nothing before a step in flight returns.

        ``now``: seconds, noted on requests that run for the first time.
        """
        self.kv.eviction_history.now = self.recoveries.transfers.now = now
        step = self.last_step + 1
        if not self._begin_step(step):
            return None
        decoding, loads, features = self.decoding.order(), Loads(), self.features.in_use
        budget = self.limits.max_num_batched_tokens - len(decoding)
        for feature in features:
            budget -= feature.add_to_plan(step, budget, loads)
        chunks = self.prefilling.chunks(budget, len(decoding), self.steps_in_flight, now)
        self.recoveries.request_loads(step, loads)
        if decoding or chunks or loads or any(feature.wants_step() for feature in features):
            return self._commit(step, decoding, chunks, loads)
        return self._unblock(now)

    def _begin_step(self, step: int) -> bool:
        """Take sequences off their rows that have nothing left to compute, and give decodes their next blocks; False:
        wait for a step in flight."""
        if not all(feature.may_plan() for feature in self.features.in_use):
            return False
        for sequence in self.decoding.length_due(step):
            self.decoding.remove(sequence)
            self._drain(sequence)
        for feature in self.features.in_use:
            feature.begin_step(step)
        due = self.decoding.blocks_due(step)
        return not due or self._give_blocks(due, step)

    def _drain(self, sequence: RequestSequence) -> None:
        # The last token that the sequence may have is in flight. Its row is free for another sequence at once, because
        # the executor makes the next plan's changes only after that step. Its blocks stay until the token comes back:
        # the step still writes into them, and they are cached then.
        self._leave_row(sequence)
        sequence.status = SequenceStatus.DRAINING

    def _give_blocks(self, due: list[RequestSequence], step: int) -> bool:
        """Give each decode that crosses a block boundary its next block; False: wait for a step in flight."""
        # Full blocks are cached first: where another sequence has cached equal blocks, this frees some.
        for sequence in due:
            if sequence.prefilled:
                self.cache_full_blocks(sequence, sequence.num_tokens - 1)
        # Preempt until there is a block for each. Blocks of steps in flight (``num_retiring``) become available
        # without preemption when these steps come back.
        each = self.kv.num_for_next
        while (needed := each * len(due_now := self.decoding.blocks_due(step))) > self.kv.num_available:
            if needed > self.kv.num_available + self.kv.num_retiring and not self._make_room():
                self.preempt(self._victim(), "decoding sequences need blocks", *due_now)
            elif self.steps_in_flight:
                return False
        due = self.decoding.take_blocks_due(step)
        self.plan.copy(self.kv.grow_by_one([sequence.table for sequence in due]))
        for sequence in due:
            blocks = sequence.table.blocks
            self.plan.set_block(sequence.row, len(blocks) - 1, blocks[-1])
        for sequence in due if self.kv.windows else ():
            num_slots = sequence.table.num_slots
            self.prefilling.grow_windows(sequence, num_slots - self.kv.block_size, num_slots)
        return True

    def _make_room(self) -> bool:
        return any(feature.make_room() for feature in self.features.in_use)

    def cache_full_blocks(self, sequence: RequestSequence, num_computed: int) -> None:
        """Enter the full blocks of a running sequence into the prefix cache. Where it has equal blocks already, the
        sequence uses these, and its own are freed."""
        if not sequence.table.blocks:
            return  # a hypothesis that has released them while it waits for the others
        replaced = self.kv.cache_full_blocks(sequence.table, num_computed, sequence.tokens_between)
        if replaced:
            if sequence.row >= 0:
                for index, _, block in replaced:
                    self.plan.set_block(sequence.row, index, block)
            self.kv.drop([own for _, own, _ in replaced], self.newest_in_flight)

    def _unblock(self, now: float) -> StepPlan | None:
        """Plan again after making room, if nothing could be planned because sequences wait for each other's blocks."""
        if self.steps_in_flight or self.recoveries.transfers.num_loading:
            return None  # these free blocks when they come back
        if any(feature.unblock() for feature in self.features.in_use):
            return self.schedule(now)
        # Several prefills, each with a part of its blocks, may block each other. One alone always fits (see ``fits``).
        if len(self.prefilling) < 2:
            return None
        self.preempt(self._victim(), "prefills hold each other up", *self.prefilling)
        return self.schedule(now)

    def _victim(self) -> RequestSequence:
        """The running sequence to preempt: a feature's choice, or the sequence that costs the least."""
        running = self.running
        chosen = (feature.victim(running) for feature in self.features.in_use)
        return next(filter(None, chosen), None) or self.recoveries.planner.choose_victim(running)

    def _commit(self, step: int, decoding: list[RequestSequence], chunks: Chunks, loads: Loads) -> StepPlan:
        """Note the step as in flight and build its plan."""
        self.decoding.charge()
        completed: list[RequestSequence] = []
        leaving: list[RequestSequence] = []
        for sequence, size in chunks:
            self.plan.chunks.append((sequence.row, size))
            sequence.last_step = step
            if sequence.num_scheduled_tokens == sequence.num_tokens:
                completed.append(sequence)
                self.prefilling.remove(sequence)
                if all(feature.decodes(sequence) for feature in sequence.request.features):
                    self.decoding.add(sequence, first_step=step + 1)
                else:
                    leaving.append(sequence)
        self.last_step = step
        for feature in self.features.in_use:
            feature.planned(step)
        # A sequence that has nothing to run in the next step samples its last token in this one.
        ending = self.decoding.length_due(step + 1)
        drafts, proposals = self.plan.drafts, self.plan.proposals
        self.steps_in_flight.append(StepInFlight(step, decoding, chunks, completed, ending, drafts, proposals))
        copies = [load.copies(key) for key, load in loads.items()]
        plan = self.plan.build(self.epoch, step, copies, self.kv.take_unmapped())
        if plan.copies:
            self.recoveries.transfers.requested(step, plan.copies, loads)
        for sequence in leaving:
            sequence.decode_base = sequence.num_tokens
            self._drain(sequence)
        return plan

    # ---- results -------------------------------------------------------------------------------------

    def update(self, result: StepResult, tokens: Sequence[int] | None = None) -> StepOutput:
        """Take in the result of the oldest step in flight. ``tokens``: of ``result``, if they are unpacked already.

        Raises:
            StepMismatchError: it is another step's, or of the wrong shape; nothing was changed.
        """
        oldest = self.steps_in_flight[0] if self.steps_in_flight else None
        step, tokens = check_result(oldest, result, tokens)
        self.steps_in_flight.popleft()
        self.kv.step_returned(step.step)
        self.limits.step_succeeded()
        step.took(result.elapsed_us * 1e-6, self.costs)
        output = StepOutput(step.begun, step.computed, num_tokens=step.num_tokens)
        for sequence, num_computed in step.computed:
            # A sequence that was preempted or has ended meanwhile has cached its blocks then.
            if sequence.came_back(num_computed):
                self.cache_full_blocks(sequence, num_computed)
        taken = take_logprobs(step, result, output)
        for feature in self.features.in_use:
            tokens = feature.verify(step, tokens)
        take_tokens(step, tokens, taken, output, self.finish)
        self._requeue_outgrown(step)
        return output

    def copied(self, message: Copied) -> None:
        """Copies between tiers have been made; an unknown message is ignored."""
        for sequence in self.recoveries.copied(message):
            self.preempt(sequence, BLOCKS_CORRUPT)

    def peer_lost(self, peer: str) -> None:
        """The executor with the block endpoint ``peer`` is gone: sequences that wait for its blocks start over."""
        for feature in self.features.in_use:
            feature.peer_lost(peer)
        for sequence in self.recoveries.lose(peer):
            self.preempt(sequence, LENDER_GONE)

    def fail(self, epoch: int, *, shrink_steps: bool = True) -> list[Request]:
        """The oldest step in flight failed: start over under a new epoch with smaller steps, and recompute everything.

        ``shrink_steps``: False if another operation failed, copies for instance; then steps stay as large as they are.
        Returns the requests that failed for good: their step had one sequence, had and proposed no draft, and cannot be
        made smaller.
        """
        failed: list[Request] = []
        if shrink_steps and self.steps_in_flight and self.steps_in_flight[0].num_tokens:
            step = self.steps_in_flight[0]
            failed = step.failing_requests(self.kv.block_size)
            step.give_up_drafts()
            self.limits.step_failed(step.num_seqs, step.num_tokens - step.num_draft_tokens)
        requests = self.release_all()
        self.kv.forget()
        self.plan.copies.clear()
        self.epoch, self.last_step = epoch, 0
        for request in requests:
            if request in failed:
                request.fail()
            else:
                self.add(request)
        return [request for request in failed if request in requests]

    # ---- rows and blocks -----------------------------------------------------------------------------

    def _leave_row(self, sequence: RequestSequence) -> None:
        self.plan.leave(sequence.row)
        self.free_rows.append(sequence.row)
        sequence.row, sequence.last_step = -1, self.last_step

    def vacate(self, sequence: RequestSequence, *, ends: bool = True) -> None:
        """Take a sequence off its row and free its blocks; full blocks stay in the prefix cache.

        ``ends``: False if the sequence waits or runs again later, here or elsewhere.
        """
        if sequence.row >= 0:  # a draining sequence has left its row already
            members = self.decoding if sequence.status is SequenceStatus.DECODE else self.prefilling
            members.remove(sequence)
        self.recoveries.abandon(sequence)
        for feature in sequence.request.features:
            feature.release(sequence, self.newest_in_flight)
        self.cache_full_blocks(sequence, sequence.num_with_kv)
        if sequence.row >= 0:
            self._leave_row(sequence)
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = 0
        for feature in sequence.request.features if ends else ():
            feature.frees(sequence)
        # Blocks that a step in flight reads or writes must not be given to another sequence before it comes back.
        touched = self.oldest_step is not None and sequence.last_step >= self.oldest_step
        self.kv.free(sequence.table, self.last_step if touched else None, sequence.ending if ends else PREEMPTED)

    def preempt(self, sequence: RequestSequence, reason: str, *others: RequestSequence) -> None:
        """Free a running sequence's blocks for ``others``; it waits, and is recomputed from its tokens."""
        by = next((one.request.ref for one in others if one is not sequence), None)
        self._requeue(sequence, reason, by)
        sequence.num_preemptions += 1
        sequence.num_tokens_preempted = len(sequence.output_token_ids)
        self.num_preemptions += 1

    def _requeue(self, sequence: RequestSequence, reason: str, by: RequestRef | None = None) -> None:
        # It keeps its tokens. Tokens in flight still come: admission does not start it before they have.
        blocks = sequence.table.blocks
        sequence.note(Preempted(self.kv.eviction_history.now, reason, len(blocks), self.kv.pool.num_freed(blocks), by))
        self.vacate(sequence, ends=False)
        self.waiting.push(sequence)

    def _requeue_outgrown(self, step: StepInFlight) -> None:
        """Requeue the sequences that ``step`` has brought beyond ``short_rope_len`` and that have not finished.

        Up to that length LongRoPE rotates keys by its short factors, and beyond it all keys by its long factors. So
        none of the KV of these sequences is of use any more, and they are computed anew under another cache salt.
        """
        for sequence in step.ending:
            migrates = sequence.status is SequenceStatus.DRAINING and not sequence.table.blocks
            if sequence.finished or migrates:
                continue
            if sequence.status is not SequenceStatus.WAITING:  # it waits if it was preempted meanwhile
                self._requeue(sequence, "it has outgrown the short factors of LongRoPE")
            sequence.path = []
            self.kv.restore(sequence.cache_salt, sequence.token_bytes)
