"""Random walks through conversations: turns, forks, edits of earlier turns, cancellations, several outputs, and moves.

The real scheduler core runs real executors with too little memory. Every token of every output is checked afterwards
against one uncached pass of transformers over the prompt and the output.
"""

import queue
import random
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic

import msgspec
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import PendingStep
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.scheduling.step import StepOutput
from pagewise_scheduler.core.tiers.grouped import GroupedKVCacheManager
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_scheduler.server.executor_checks import checked_inventory, shape_of
from pagewise_shared.protocol import Copied, Found, LookUp, StepPlan, Welcome, decode_from_scheduler, encode
from pagewise_shared.thinking import ThinkingBudget

from tests.core_requests import make_request
from tests.executor.random_texts import MOST_PROMPT, Texts
from tests.executor.references import Answer, check_answers
from tests.executor.runners import build_runner, peers_at
from tests.sampling import sampling_params

MOST_OUTPUT, END = 30, 5
MOST_SEQS, BUDGET = 12, 64


class Member:
    """An executor of the fleet, with its scheduler.

    ``room``: the number of longest sequences for which its device has pages. ``looked_up``: requests of which a tier
    without ids is asked how much it has, by the number of the question. ``counts``: of all its schedulers.
    """

    def __init__(
        self, path: Path, directory: PrefixDirectory, rng: random.Random, room: float, **options: object
    ) -> None:
        self.runner: ModelRunner = build_runner(path, exchange=peers_at(), threads=1, **options)
        self.directory, self._rng = directory, rng
        shape = shape_of(self.runner.info, 2 * BUDGET)
        assert shape is not None, "the model has several groups of layers"
        longest = GroupedKVCacheManager(shape, self.runner.info.block_size).room_for(MOST_PROMPT + 20 + MOST_OUTPUT)
        self._shape = replace(shape, num_pages=int(room * longest))
        assert self._shape.num_pages <= self.runner.info.num_pages
        self.reported: queue.SimpleQueue[Copied | Found] = queue.SimpleQueue()
        self.runner.report_to(self.reported.put)  # type: ignore[arg-type]
        self.results: deque[PendingStep] = deque()
        self.looked_up: dict[int, Request] = {}
        self._epoch = self._num_questions = 0
        self.counts: dict[str, int] = {}
        self.begin(keeps_blocks=False)

    def begin(self, *, keeps_blocks: bool) -> None:
        """Join a new scheduler. ``keeps_blocks``: with the blocks that are there."""
        self._epoch += 1
        info = self.runner.info
        if keeps_blocks:
            info = msgspec.structs.replace(info, inventory=self.runner.inventory())
        self.scheduler = Scheduler(
            epoch=self._epoch,
            num_blocks=info.num_blocks,
            shape=self._shape,
            block_size=info.block_size,
            max_num_seqs=MOST_SEQS,
            max_num_batched_tokens=BUDGET,
            tiers={tier.number: tier.num_blocks or tier.identity for tier in info.tiers},
            recovery=self._rng.choice(("auto", "swap", "swap", "both")),
            model_fingerprint=info.model_fingerprint,
        )
        if keeps_blocks:
            self.scheduler.kv.expect(checked_inventory(info))
        peer = Peer(info.block_endpoint, info.block_format, self.scheduler, lambda: None)
        self.scheduler.recoveries.planner.join(self.directory, peer)
        self.runner.reset(Welcome(self._epoch, MOST_SEQS, BUDGET, keeps_blocks=keeps_blocks))

    def lose(self) -> list[Request]:
        """End the scheduler; its requests go on elsewhere."""
        self._drop_results()
        self.count()
        asked, self.looked_up = [*self.looked_up.values()], {}
        moved = self.scheduler.release_all()
        self.scheduler.kv.close()
        del self.directory.peers[self.scheduler.recoveries.planner.endpoint]
        return moved + asked

    def fail(self) -> None:
        """A step fails: the executor is reset, and everything is computed again."""
        self._drop_results()
        self._epoch += 1
        self.scheduler.fail(self._epoch, shrink_steps=False)
        self.runner.reset(Welcome(self._epoch, MOST_SEQS, BUDGET))

    def _drop_results(self) -> None:
        for result in self.results:
            result.result()
        self.results.clear()

    def count(self) -> None:
        """Add the counts of the scheduler to the earlier counts."""
        scheduler = self.scheduler
        counts = scheduler.kv.pool.counters.by_name() | {
            "preempted": scheduler.num_preemptions,
            "queries": scheduler.prefix_hits[0],
            "hits": scheduler.prefix_hits[1],
        }
        self.counts = {name: self.counts.get(name, 0) + count for name, count in counts.items()}

    def add(self, request: Request) -> None:
        """Add a request, as soon as the tier without ids has answered how many of its blocks it has."""
        if not self.scheduler.kv.hashed:
            self.scheduler.add(request)
            return
        (tier,) = self.scheduler.kv.hashed
        self._num_questions += 1
        self.looked_up[self._num_questions] = request
        root = self.scheduler.kv.pool.tree.root_hash(request.params.cache_salt)
        tokens = request.prompt_token_ids.tobytes()
        self.runner.handle(LookUp(self._epoch, self._num_questions, tier, root, tokens))

    def step(self) -> StepOutput | None:
        """Plan up to two steps ahead, and take the result of the oldest one in flight."""
        while not self.reported.empty():
            self._take(self.reported.get())
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.schedule(monotonic())) is not None:
            received = decode_from_scheduler(encode(plan))
            assert isinstance(received, StepPlan)
            self.results.append(self.runner.execute(received))
        if self.results:
            return self.scheduler.update(self.results.popleft().result())
        if self.looked_up or self.scheduler.recoveries.transfers.num_loading:
            self._take(self.reported.get(timeout=30))
        return None

    def _take(self, message: Copied | Found) -> None:
        if isinstance(message, Copied):
            assert message.error is None, message
            if message.epoch == self._epoch:
                self.scheduler.copied(message)
        elif (request := self.looked_up.pop(message.number, None)) is not None:
            (tier,) = self.scheduler.kv.hashed.values()
            request.stored[tier.identity] = message.num_blocks
            self.scheduler.add(request)


@dataclass(eq=False)
class Asked:
    """A request. ``lengths``: the number of tokens at which its gateway finds a stop string in each output.
    ``logprobs``: tokens and their log-probabilities, as they came."""

    request: Request
    member: Member
    lengths: list[int]
    logprobs: dict[RequestSequence, list[tuple[int, float]]] = field(default_factory=dict)


class Walk:
    """A fleet, the conversations that it remembers, and the answers that it has given.

    ``events``: how often, per request, executors lose their scheduler, all they hold, or a step.
    """

    def __init__(self, path: Path, seed: int, members: list[Member], events: float = 0.02) -> None:
        self._path, self._rng, self.members, self._events = path, random.Random(seed), members, events
        self._texts = Texts(self._rng)
        self._live: list[Asked] = []
        self.done: list[Asked] = []
        self.num_aborted = 0

    def _ask(self, number: int) -> None:
        rng, greedy = self._rng, self._rng.random() < 0.6
        sampling = sampling_params(
            temperature=0.0 if greedy else 1.0,
            seed=number,
            logprobs=0,
            stop_token_ids=tuple(self._texts.random(rng.choice((0, 0, 5)))),
            # Greedy tokens are compared with those of a pass that forces none.
            thinking=None if greedy or number % 2 else ThinkingBudget(number % 23, END, (END,), (END + 1,)),
        )
        n = rng.choice((1, 1, 1, 2, 4))
        made = make_request(
            f"r{number}",
            self._texts.prompt(),
            rng.randrange(1, rng.choice((8, MOST_OUTPUT))),
            sampling,
            n=n,
            priority=rng.choice((0, 0, 0, 1)),
            cache_salt=rng.choice((None, None, None, None, "a")),
        )
        made.arrival_time = monotonic()
        member = rng.choice(self.members)
        lengths = [rng.choice((MOST_OUTPUT, rng.randrange(1, 15))) for _ in range(n)]
        self._live.append(Asked(made, member, lengths))
        member.add(made)

    def run(self, num_requests: int, most_live: int = 14) -> None:
        """Ask, and see all requests to their end."""
        rng, asked, idle = self._rng, 0, 0
        while asked < num_requests or self._live:
            while asked < num_requests and len(self._live) < most_live and (not self._live or rng.random() < 0.5):
                asked += 1
                self._ask(asked)
                if rng.random() < self._events:
                    self._disturb()
            if self._live and rng.random() < 0.01:
                self._abort(rng.choice(self._live))
            idle += 1
            for member in self.members:
                if (output := member.step()) is not None:
                    idle = 0
                    self._take(output)
            assert idle < 1000, "nothing goes on"
        for member in self.members:
            self._settle(member)

    def _take(self, output: StepOutput) -> None:
        for asked in self._live:
            for sequence in asked.request.sequences:
                if (entry := output.logprobs.get(sequence)) is not None:
                    asked.logprobs.setdefault(sequence, []).append((entry.token_id, entry.logprob))
                if not sequence.finished and len(sequence.output_token_ids) >= asked.lengths[sequence.index]:
                    asked.member.scheduler.finish(sequence, "stop")
        # A request that waits for an answer about storage has no sequences yet.
        for asked in [one for one in self._live if one.request.sequences and one.request.finished]:
            self._end(asked)

    def _end(self, asked: Asked) -> None:
        self._live.remove(asked)
        self.done.append(asked)
        told = self._rng.choice(asked.request.sequences)
        self._texts.tell([*asked.request.prompt_token_ids, *told.output_token_ids])

    def _abort(self, asked: Asked) -> None:
        if asked.request in asked.member.looked_up.values():
            return
        asked.member.scheduler.abort(asked.request.request_id)
        self.num_aborted += 1
        if asked.request.sequences:
            self._end(asked)

    def _disturb(self) -> None:
        """Let an executor lose its scheduler, its memory too, or a step, or preempt a sequence."""
        member = self._rng.choice(self.members)
        kind = self._rng.choice(("fails", "restarts", "forgets", "preempts"))
        if kind == "fails":
            member.fail()
            return
        if kind == "preempts":
            if running := member.scheduler.running:
                member.scheduler.preempt(self._rng.choice(running), "the walk takes its blocks")
            return
        moved = member.lose()
        for other in self.members:
            if other is not member:
                other.scheduler.peer_lost(member.runner.info.block_endpoint)
        member.begin(keeps_blocks=kind == "restarts")
        for asked in [one for one in self._live if one.request in moved]:
            asked.member = self._rng.choice(self.members)
            asked.member.add(asked.request)

    def _settle(self, member: Member) -> None:
        """Without requests, all memory is available."""
        kv, until = member.scheduler.kv, monotonic() + 30
        while kv.num_available != kv.num_total or member.scheduler.num_in_flight:
            assert monotonic() < until
            member.step()
        member.count()

    # ---- expectations --------------------------------------------------------------------------------

    def check(self) -> tuple[int, float]:
        """Compare every token with an uncached pass; returns the number of tokens, and by how much the log-probability
        of one differs at most."""
        answers = []
        for asked in self.done:
            for sequence in asked.request.sequences:
                self._check_end(asked, sequence)
                if sequence.output_token_ids:
                    answers.append(_answer(asked, sequence))
        return sum(len(answer.tokens) for answer in answers), check_answers(self._path, answers)

    @staticmethod
    def _check_end(asked: Asked, sequence: RequestSequence) -> None:
        tokens, sampling = sequence.output_token_ids, asked.request.params.sampling
        stops = sampling.stop_token_ids
        assert not any(token in stops for token in tokens[:-1])
        if (thinking := sampling.thinking) is not None and len(tokens) > thinking.num_tokens:
            assert END in tokens[: thinking.num_tokens + 1]
        if sequence.finish_reason == "length":
            assert len(tokens) == asked.request.max_tokens
        elif sequence.finish_reason == "stop":
            assert tokens[-1] in stops or len(tokens) == asked.lengths[sequence.index]
        else:
            assert sequence.finish_reason == "abort"


def _answer(asked: Asked, sequence: RequestSequence) -> Answer:
    request, told = asked.request, asked.logprobs[sequence]
    name, output = f"{request.request_id} [{sequence.index}]", sequence.output_token_ids.tolist()
    assert [token for token, _ in told] == output, name
    logprobs = [logprob for _, logprob in told]
    return Answer(name, tuple(request.prompt_token_ids), output, logprobs, not request.params.sampling.temperature)
