"""Explanations name the true cause of a wait and of a lost prefix, one test for each cause."""

from collections import deque
from itertools import count, pairwise
from typing import Any

import pytest
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.core.features.registry import FeatureOptions
from pagewise_scheduler.core.memory.eviction_history import LostBlocks, LostRun
from pagewise_scheduler.core.request_report import request_report, seen_by
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.requests.timeline import Reset
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import (
    HOST,
    Adapter,
    AdapterCapacity,
    AdapterLoaded,
    CompileGrammar,
    GrammarCompiled,
    LoadAdapter,
    StepPlan,
    StepResult,
)
from pagewise_shared.reports import Event, RequestReport
from pagewise_shared.sampling import SamplingParams

from tests.core_requests import make_request
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.driving import executor_for, run
from tests.scheduler.core.fleets import fleet

STEP = 0.1
GREEDY = SamplingParams(temperature=0.0)


class Player:
    """One executor whose steps take ``STEP`` seconds each, two of them in flight."""

    def __init__(self, **options: object) -> None:
        given = {
            "num_blocks": 64,
            "block_size": 4,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 32,
            "features": FeatureOptions(AdapterCapacity(2, 8), max_grammars=4),
            "eviction": "cost",
        }
        self.scheduler = Scheduler(**(given | options))  # type: ignore[arg-type]
        self.executor = executor_for(self.scheduler)
        self.results: deque[StepResult] = deque()
        self.now = 100.0
        self.numbers = count()
        self.loads: list[LoadAdapter] = []
        self.questions: list[CompileGrammar] = []
        self.started: dict[Request, float] = {}

    def send(self, prompt: list[int] | int, max_tokens: int = 2, **fields: object) -> Request:
        number = next(self.numbers)
        tokens = prompt if isinstance(prompt, list) else [1000 * number + i for i in range(prompt)]
        given: dict[str, Any] = {"sampling": GREEDY, "arrival_time": self.now, "key": "k"} | fields
        request = make_request(f"r{number}", tokens, max_tokens, **given)
        request.placed("e", self.now)
        self.scheduler.add(request)
        return request

    def send_messages(self) -> None:
        for message in self.scheduler.features.messages(self.now):
            if isinstance(message, LoadAdapter):
                self.loads.append(message)
            else:
                assert isinstance(message, CompileGrammar)
                self.questions.append(message)

    def step(self) -> None:
        self.send_messages()
        while self.scheduler.num_in_flight < 2 and (plan := self.scheduler.schedule(self.now)) is not None:
            assert isinstance(plan, StepPlan)
            self.results.append(self.executor.execute(plan))
        self.now += STEP
        for message in self.executor.finish_copies():
            self.scheduler.copied(message)
        if self.results:
            output = self.scheduler.update(self.results.popleft())
            for sequence in output.begun:
                if sequence.request.first_token_time != sequence.request.first_token_time:
                    sequence.request.first_token_time = self.now
                    sequence.request.timeline.answered(self.now)

    def finish(self, *requests: Request) -> None:
        for _ in range(500):
            if all(request.finished for request in requests):
                break
            self.step()
        else:
            raise AssertionError("not done")
        for request in requests:
            request.timeline.ended(self.now)

    def explain(self, request: Request) -> RequestReport:
        return request_report(request, self.scheduler, self.now, 100, ended=request.finished)


def text(told: RequestReport) -> str:
    return " ".join(sentences(told))


def losses(told: RequestReport) -> list[Event]:
    """The events in which it lost its blocks."""
    return [one for one in told.events if one.kind in ("preempted", "started over")]


def recoveries(told: RequestReport) -> list[Event]:
    """The events in which it got its KV."""
    return [one for one in told.events if one.kind in ("started", "resumed")]


# ---- where the time went ---------------------------------------------------------------------------------


def test_a_queue_for_rows() -> None:
    player = Player(max_num_seqs=2)
    running = [player.send(4, 12) for _ in range(2)]
    player.step()
    waits = player.send(4)
    player.finish(*running, waits)
    told = player.explain(waits)
    assert max(told.waits, key=lambda cause: told.waits[cause]) == "rows"
    assert told.waits["rows"] > 0.8
    assert told.queue_seconds == pytest.approx(sum(told.waits.values()))
    assert "because other sequences had all rows" in text(told)


def test_a_queue_for_memory() -> None:
    player = Player(num_blocks=16)
    holds = player.send(40, 12)
    player.step()
    waits = player.send(40)
    player.finish(holds, waits)
    told = player.explain(waits)
    assert max(told.waits, key=lambda cause: told.waits[cause]) == "memory"
    assert "too few blocks" in text(told)


def test_others_that_are_next_and_wait() -> None:
    player = Player(max_num_seqs=32)
    prefix = list(range(1, 17))
    # More requests than the scheduler looks at wait for the first one's prefix; later ones could run.
    others = [player.send([*prefix, 100 + number], 1) for number in range(20)]
    waits = player.send(4)
    player.finish(*others, waits)
    told = player.explain(waits)
    assert told.waits == {"turn": pytest.approx(STEP)}
    assert "because others in the queue were next" in text(told)


def test_prefill_of_others_before_it_starts_and_beside_it() -> None:
    player = Player()
    long = player.send(160)
    player.step()
    waits = player.send(8, 8)
    player.finish(long, waits)
    told = player.explain(waits)
    assert max(told.waits, key=lambda cause: told.waits[cause]) == "prefill"
    assert [one.request.request_id for one in told.ahead if one.request] == [long.request_id]
    assert f"because the steps computed the prompts of others: request {long.request_id}" in text(told)
    # One that runs while another one's prompt is computed has longer steps.
    decodes = player.send(8, 8)
    player.step()
    player.step()
    other = player.send(64)
    player.finish(decodes, other)
    told = player.explain(decodes)
    assert told.decode is not None
    assert told.decode.others_tokens == 64
    assert "64 tokens of the prompts of others were computed too" in text(told)


def test_a_prefix_that_another_request_computes() -> None:
    player = Player(max_num_batched_tokens=64)
    prefix = list(range(500, 628))
    first = player.send([*prefix, 1])
    player.step()
    second = player.send([*prefix, 2])
    player.finish(first, second)
    told = player.explain(second)
    assert told.waits["prefix"] > 0.05
    assert told.computes_prefix is not None
    assert told.computes_prefix.request_id == first.request_id
    assert f"while request {first.request_id} computed the prefix that both have in common" in text(told)


def test_a_grammar() -> None:
    player = Player()
    waits = player.send(4, sampling=SamplingParams(temperature=0.0, grammar="g"))
    for _ in range(5):
        player.step()
    player.send_messages()
    (question,) = player.questions
    player.scheduler.features.take(GrammarCompiled(player.scheduler.epoch, question.number), player.now)
    player.finish(waits)
    told = player.explain(waits)
    assert told.waits == {"grammar": pytest.approx(0.5)}
    assert "until the executor had compiled its grammar" in text(told)


@pytest.mark.parametrize(("cause", "said"), [("rows", "had all rows"), ("prefill", "the prompts of others")])
def test_what_it_waits_for_after_a_prefix(cause: str, said: str) -> None:
    player = Player(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=1024)
    prefix = list(range(500, 628))
    first = player.send([*prefix, 1], 1)
    player.step()
    waits = player.send([*prefix, 2])
    player.step()
    others = (
        [player.send(4, 40, priority=-1) for _ in range(3)] if cause == "rows" else [player.send(1600, priority=-1)]
    )
    for _ in range(20):
        player.step()
    live = player.explain(waits)
    player.finish(first, *others, waits)
    told = player.explain(waits)
    assert told.waits["prefix"] < 3.5 * STEP
    assert told.waits[cause] > 20 * STEP
    assert sum(told.waits.values()) == pytest.approx(told.queue_seconds)
    assert sum(live.waits.values()) == pytest.approx(live.total_seconds)
    assert live.waits["prefix"] == told.waits["prefix"] > 0
    assert said in text(told)


def test_a_step_in_flight() -> None:
    player = Player()
    running = player.send(4, 12)
    player.step()
    player.step()
    waits = player.send(4)
    assert player.explain(waits).waits == {}
    player.now += STEP / 2
    assert player.explain(waits).waits == {"step": pytest.approx(STEP / 2)}
    player.step()
    player.finish(running, waits)
    told = player.explain(waits)
    assert told.waits == {"step": pytest.approx(STEP / 2)}
    assert "It waited 50 ms for steps in flight to return." in text(told)


def test_an_adapter_that_is_loaded() -> None:
    player = Player()
    adapter = Adapter("poet", "/p", b"\1" * 32, 1000, 8)
    waits = player.send(4, adapter=adapter, cache_salt=adapter_salt(adapter.content, None))
    for _ in range(4):
        player.step()
    (load,) = player.loads
    loaded = AdapterLoaded(player.scheduler.epoch, load.number)
    assert not player.scheduler.features.take(loaded, player.now)
    player.finish(waits)
    told = player.explain(waits)
    assert told.waits == {"adapter": pytest.approx(0.4)}
    assert "until the executor had loaded its adapter" in text(told)


def test_preemption_and_by_whom() -> None:
    player = Player(num_blocks=12)
    first, second = player.send(16, 24), player.send(16, 24)
    player.finish(first, second)
    told = player.explain(second)
    (preempted, *_) = losses(told)
    assert preempted.by is not None
    assert preempted.by.request_id == first.request_id
    assert preempted.seconds is not None
    assert preempted.seconds > 0
    assert f"it was preempted for request {first.request_id} (decoding sequences need blocks)" in text(told)
    assert told.decode is not None
    assert told.decode.others_tokens == 0, "what was computed again was its own"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("swap", "were loaded from where they lay on the host"),
        ("recompute", "more of them lay on the host, and were computed again"),
        ("both", "were loaded while the others were computed"),
    ],
)
def test_recovery(mode: RecoveryMode, said: str) -> None:
    costs = Costs(step=0, token=1e-3, attention=0, tiers={HOST: CopyCosts(0, 4e-3)})
    player = Player(num_blocks=16, tiers={HOST: 32}, recovery="swap", costs=costs)
    prompt = list(range(1, 34))
    player.finish(player.send(prompt))
    player.finish(player.send(60))  # takes all blocks: cached ones move to the host
    player.scheduler.recoveries.planner.policy.mode = mode
    again = player.send(prompt)
    player.finish(again)
    told = player.explain(again)
    (recovered,) = recoveries(told)
    assert (recovered.source, recovered.method) == ("host", "load" if mode == "swap" else mode)
    assert (recovered.seconds is not None) or mode == "recompute"
    if mode == "both":
        assert 0 < recovered.loaded_tokens < 32
        assert told.cached_tokens["host"] == recovered.loaded_tokens
        more = f"{recovered.found_tokens} more of them lay on the host: {recovered.loaded_tokens} were loaded while"
        assert more in text(told)
    assert recovered.device_tokens + recovered.found_tokens == 32
    assert said in text(told)
    assert "on the host" in text(told)
    assert not told.lost, "what lies in a lower tier is not lost"


def test_chunks_of_a_prefill_are_kept_and_bounded() -> None:
    player = Player(num_blocks=512)
    prompt = player.send(100, 1)
    player.finish(prompt)
    chunks = prompt.timeline.chunks
    assert [one.tokens for one in chunks] == [32, 32, 32, 4]
    assert chunks[0].time == pytest.approx(100.0)
    assert [later.time - one.time for one, later in pairwise(chunks)][1:] == pytest.approx([STEP, STEP])
    told = player.explain(prompt)
    assert [one.tokens for one in told.chunks] == [one.tokens for one in chunks]
    assert [told.arrived + one.at for one in told.chunks] == pytest.approx([one.time for one in chunks])
    long = player.send(1600, 1)
    player.finish(long)
    chunks = long.timeline.chunks
    assert len(chunks) <= 32
    assert sum(one.tokens for one in chunks) == 1600
    assert sorted(one.time for one in chunks) == [one.time for one in chunks]


def test_an_executor_that_lent_blocks_and_is_gone() -> None:
    holder, fetcher = fleet(2)
    prompt = list(range(50))
    holder.scheduler.add(create_request(prompt=prompt, max_tokens=3))
    run(holder.scheduler, holder.executor)
    fetches = create_request(prompt=prompt, max_tokens=3)
    fetcher.scheduler.add(fetches)
    plan = fetcher.scheduler.schedule(1.0)
    assert plan is not None
    result = fetcher.executor.execute(plan)
    fetcher.executor.peers = {}
    assert fetcher.scheduler.recoveries.planner.directory is not None
    del fetcher.scheduler.recoveries.planner.directory.peers["node 0"]
    fetcher.scheduler.peer_lost("node 0")
    fetcher.scheduler.update(result)
    run(fetcher.scheduler, fetcher.executor)
    told = request_report(fetches, fetcher.scheduler, 2.0, 100, ended=True)
    (started_over,) = losses(told)
    assert (started_over.reason, started_over.by) == ("the executor that lent its blocks is gone", None)
    assert "it started over (the executor that lent its blocks is gone)" in text(told)


def test_a_reset_of_what_runs_and_of_what_waits() -> None:
    player = Player(max_num_seqs=1)
    runs, waits = player.send(8, 4), player.send(8, 4)
    player.step()
    player.step()
    reset = Reset(player.now, "e")
    for request in (runs, waits):
        request.timeline.interrupted(reset, player.now)
    player.scheduler.fail(2, shrink_steps=False)
    player.executor = executor_for(player.scheduler)
    player.results.clear()
    player.finish(runs, waits)
    told = player.explain(runs)
    assert [one.kind == "resumed" for one in recoveries(told)] == [False, True]
    assert "it went on with 0 tokens of KV on the device, and the rest was computed again" in text(told)
    assert "the executor e was reset after an error and lost all KV, which had to be computed again" in text(told)
    told = player.explain(waits)
    assert [one.kind == "resumed" for one in recoveries(told)] == [False]
    assert "the executor e was reset after an error, while it waited there; " in text(told)
    assert "again" not in text(told)


def test_a_move_of_what_runs_and_of_what_waits() -> None:
    player, other = Player(max_num_seqs=1), Player()
    runs, waits = player.send(8, 12, n=2), player.send(8, 4)
    for _ in range(3):
        player.step()
    player.scheduler.finish(runs.sequences[0], "stop")  # only another output of it continues
    player.step()
    other.now = player.now
    for request in player.scheduler.release_all():
        request.timeline.left("e", "drain", other.now)
        request.placed("f", other.now)
        other.scheduler.add(request)
    other.finish(runs, waits)
    told = other.explain(runs)
    assert told.decode is not None
    assert told.decode.steps >= 12, "those at both executors"
    assert [one.kind == "resumed" for one in recoveries(told)][-1]
    assert "it went on with 0 tokens" in text(told)
    told = other.explain(waits)
    assert [one.kind == "resumed" for one in recoveries(told)] == [False]
    assert "it moved, because the executor e was stopped: it was placed on f" in text(told)
    assert "again" not in text(told)


# ---- where the prefix was lost ---------------------------------------------------------------------------


def test_eviction_names_who_cached_it_and_for_whom_it_went() -> None:
    player = Player(num_blocks=16)
    prompt = list(range(1, 42))
    cached = player.send(prompt)
    player.finish(cached)
    player.now += 300
    taker = player.send(60)
    player.finish(taker)
    player.now += 60
    again = player.send(prompt)
    player.finish(again)
    told = player.explain(again)
    (lost,) = told.lost
    found = told.cached_tokens["device"]
    assert (lost.position, lost.position + lost.tokens, lost.reason) == (found, 40, "evicted")
    assert lost.cached_by is not None
    assert lost.taker is not None
    assert (lost.cached_by.request_id, lost.taker.request_id) == (cached.request_id, taker.request_id)
    assert lost.cached_at == pytest.approx(100.0)
    assert 400 < lost.time < 410
    said = text(told)
    assert f"were cached by request {cached.request_id} at " in said
    assert f"by the allocation of request {taker.request_id}, because their expected value was the least" in said


@pytest.mark.parametrize("more_blocks", [0, 1, 3, 8, 20])
def test_ghosts_tell_what_more_memory_would_spare(more_blocks: int) -> None:
    def last_cached(player: Player) -> int:
        for prompt, key in ((list(range(1, 42)), "k"), (60, "other"), (list(range(1, 42)), "k")):
            request = player.send(prompt, key=key)
            player.finish(request)
        return request.num_cached_tokens

    player, larger = Player(num_blocks=16), Player(num_blocks=16 + more_blocks)
    history = player.scheduler.kv.eviction_history
    history.num_ghosts = more_blocks
    spared = last_cached(larger) - last_cached(player)
    assert spared == min(4 * more_blocks, 40 - last_cached(Player(num_blocks=16)))
    assert history.spared == ({"k": spared} if spared else {})


def test_what_came_back_from_the_host_with_wrong_content() -> None:
    costs = Costs(step=0, token=1e-3, attention=0, tiers={HOST: CopyCosts(0, 4e-3)})
    player = Player(num_blocks=16, tiers={HOST: 32}, recovery="swap", costs=costs)
    prompt = list(range(1, 34))
    cached = player.send(prompt)
    player.finish(cached)
    player.finish(player.send(60))  # takes all blocks: cached ones move to the host
    player.executor.spoil = set(range(32))
    loads = player.send(prompt)
    while not loads.sequences[0].num_preemptions:
        player.step()
    again = player.send(prompt)
    player.scheduler.abort(loads.request_id)
    player.finish(again)
    assert "it started over (blocks came corrupt, or not at all)" in text(player.explain(loads))
    told = player.explain(again)
    (lost,) = told.lost
    assert (lost.position, lost.tokens, lost.reason, lost.tier) == (0, 32, "corrupt", "host")
    assert lost.cached_by is not None
    assert lost.cached_by.request_id == cached.request_id
    assert "because they came back from the host with wrong content" in text(told)


def test_an_executor_that_was_reset_has_lost_it() -> None:
    player = Player()
    prompt = list(range(1, 42))
    player.finish(player.send(prompt))
    player.scheduler.fail(2)
    player.executor = executor_for(player.scheduler)
    again = player.send(prompt)
    player.finish(again)
    assert [(one.reason, one.tokens) for one in player.explain(again).lost] == [("executor reset", 40)]


def test_missed_by_one_token() -> None:
    player = Player()
    prompt = list(range(1, 60))
    cached = player.send(prompt)
    player.finish(cached)
    other = [*prompt]
    other[21] = 7777
    missed = player.send(other)
    player.finish(missed)
    left = player.explain(missed).left
    assert left is not None
    assert left.cached_by is not None
    assert (left.position, left.cached_by.request_id) == (21, cached.request_id)
    assert left.equal == left.compared - 1
    said = text(player.explain(missed))
    assert (
        f"is the same as the cached one of request {cached.request_id} up to token 21, and differs in 1 token" in said
    )


def test_a_prompt_that_goes_on_differently() -> None:
    player = Player()
    prefix = list(range(1, 41))
    player.finish(player.send([*prefix, *range(100, 140)]))
    other = player.send([*prefix, *range(200, 240)])
    player.finish(other)
    left = player.explain(other).left
    assert left is not None
    assert (left.position, left.equal) == (40, 0)
    nothing = player.send(30)
    player.finish(nothing)
    told = player.explain(nothing)
    assert (told.left, told.lost, told.other_cache) == (None, [], None)


def test_another_salt() -> None:
    player = Player()
    prompt = list(range(1, 42))
    cached = player.send(prompt, cache_salt="key:a")
    player.finish(cached)
    other = player.send(prompt, cache_salt="key:b")
    player.finish(other)
    told = player.explain(other)
    assert told.other_cache is not None
    assert (told.other_cache.tokens, told.other_cache.kind) == (40, "salt")
    assert "cached for another cache salt or API key" in text(told)


def test_another_adapter() -> None:
    player = Player()
    prompt = list(range(1, 42))
    player.finish(player.send(prompt))
    adapter = Adapter("poet", "/p", b"\1" * 32, 1000, 8)
    other = player.send(prompt, adapter=adapter, cache_salt=adapter_salt(adapter.content, None))
    player.step()
    player.scheduler.features.take(AdapterLoaded(player.scheduler.epoch, player.loads[0].number), player.now)
    player.finish(other)
    told = player.explain(other)
    assert told.other_cache is not None
    assert (told.other_cache.tokens, told.other_cache.kind, told.other_cache.adapter) == (40, "adapter", "")
    assert "cached for the model without an adapter" in text(told)


def test_prompt_logprobs_do_without_the_cache() -> None:
    player = Player()
    prompt = list(range(1, 42))
    player.finish(player.send(prompt))
    asks = player.send(prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
    player.step()
    assert player.explain(asks).not_asked
    assert "log-probabilities of the prompt" in text(player.explain(asks))


# ---- who may know ----------------------------------------------------------------------------------------


def test_a_key_is_told_nothing_of_others() -> None:
    player = Player(num_blocks=16)
    prompt = list(range(1, 42))
    player.finish(player.send(prompt, key="a", cache_salt="group:g"))
    player.finish(player.send(60, key="c"))
    again = player.send(prompt, key="b", cache_salt="group:g")
    player.step()
    waits = player.send(8, key="b")
    player.finish(again, waits)
    whole = player.explain(again)
    assert whole.lost
    mine = seen_by(whole, "b", {})
    assert mine.lost == []
    assert '"a"' not in str(mine).replace("'", '"')
    assert seen_by(whole, "a", {}).lost[0].taker is None, "whose allocation it was stays unknown"
    other = player.send(prompt, key="b", cache_salt="key:b")
    player.finish(other)
    whole = player.explain(other)
    assert whole.other_cache is not None
    assert seen_by(whole, "c", {}).other_cache is None
    assert seen_by(whole, "b", {}).other_cache is not None


def test_what_was_lost_is_bounded() -> None:
    lost = LostBlocks(most=100)
    run = LostRun(0.0, "evicted", None, None, 1, "", 0.0, 0, "e")
    for place in range(1, 1000):
        lost.add(place, run)
    assert 50 <= len(lost) <= 100
    assert lost.find(999) is run
    assert lost.find(950) is run
    assert lost.find(1) is None


def test_one_is_no_plural() -> None:
    player = Player()
    alone = player.send(1, 1)
    player.finish(alone)
    said = text(player.explain(alone))
    assert "Nothing of its prompt of 1 token came from the cache" in said
    assert "for its output of 1 token." in said
    assert "1 step was planned" in said


def test_a_prefix_without_its_window() -> None:
    """A prompt leaves the path of another one at a place without a snapshot."""
    player = Player(num_blocks=400, shape=ArenaShape(400, 1, (WindowShape(8, 1),), 64))
    prompt = list(range(1, 202))
    cached = player.send(prompt)
    player.finish(cached)
    early = player.send([*prompt[:41], *range(500, 520)])
    player.finish(early)
    told = player.explain(early)
    assert told.no_window is not None
    assert told.no_window.cached_by is not None
    assert told.no_window.cached_by.request_id == cached.request_id
    assert (told.no_window.position, told.no_window.tokens, told.lost) == (0, 40, [])
    assert told.left is not None
    assert told.left.position == 41
    assert "40 tokens of its prompt, from token 0 on, had been cached" in text(told)
    assert seen_by(told, "another", {}).no_window is None
    later = player.send([*prompt, 7, 7])
    player.finish(later)
    assert player.explain(later).no_window is None


STATES = ArenaShape(100, 1, (WindowShape(2, 7, state=True),), 64)


def test_a_prefix_whose_states_were_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are still there, but the snapshot behind them went for another prompt; it takes one again.

    Prompts keep states one block before their ends: where nothing is behind a snapshot, its blocks go with it.
    """
    monkeypatch.setattr("pagewise_scheduler.core.tiers.snapshot_places._NEAR", 2)
    player = Player(num_blocks=100, shape=STATES)
    prompt = list(range(1, 42))
    cached = player.send(prompt)
    player.finish(cached)
    (group,) = player.scheduler.kv.windows
    taker = None
    while any(one.cached_by is cached.ref for one in group.at):
        player.finish(taker := player.send(30, key="other"))
    again = player.send([*prompt, 7])
    player.finish(again)
    told = player.explain(again)
    assert told.no_window is not None
    (lacks,) = told.no_window.lacking
    lost = lacks.lost
    assert lacks.kind == "state"
    assert lost is not None
    assert lost.reason == "evicted"
    assert lost.cached_by is not None
    assert lost.cached_by.request_id == cached.request_id
    assert lost.taker is not None
    assert taker is not None
    assert lacks.retaken is not None
    assert lacks.retaken > lost.time
    assert (told.no_window.position, told.no_window.due) == (0, 36)
    said = text(told)
    assert "Its prefix was there, its states were not" in said
    assert "So it could begin at token 0." in said
    assert f"The states behind token 36, of request {cached.request_id}, were evicted at" in said
    assert f"by the allocation of request {lost.taker.request_id}, because" in said
    assert "They were taken again at" in said
    assert "window" not in said
    own = seen_by(told, "k", {}).no_window
    assert own is not None
    assert own.lacking[0].lost is not None
    assert own.lacking[0].lost.taker is None, "whose allocation it was stays unknown"
