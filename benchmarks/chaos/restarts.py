"""A scheduler is killed under load and started again: the pauses of its clients, and the caches of its executors."""

import asyncio
import signal
import statistics
import time
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import openai

from benchmarks.chaos.workload import Case, Outcome, client_of, stream
from benchmarks.processes import Cluster
from benchmarks.scrape import total


class Return(NamedTuple):
    """How long executors took to be back, in seconds: since the new scheduler answered, and since the old one died."""

    rejoined: float
    away: float


@dataclass
class Restart:
    """The results of one restart. ``pauses``: of each stream, in seconds. ``failures``: outputs that differ.

    Shares of tokens that were cached. ``before``, ``after``: of the prompts of rounds of new questions. ``resumed``: of
    the requests that gateways submitted again to the new scheduler; ``after`` alone could profit from their blocks.
    """

    back: Return
    pauses: list[float]
    before: float
    resumed: float
    after: float
    failures: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """For a result file: times in seconds."""
        return {
            "rejoined": round(self.back.rejoined, 2),
            "away": round(self.back.away, 2),
            "paused_streams": len(self.pauses),
            "pause": {"median": round(statistics.median(self.pauses), 2), "worst": round(max(self.pauses), 2)},
            "hit_rate": {name: round(getattr(self, name), 4) for name in ("before", "resumed", "after")},
            "failures": len(self.failures),
        }


class Rounds:
    """Rounds of concurrent streams, one per client, of new questions about a few long texts that clients share."""

    def __init__(self, client: openai.AsyncOpenAI, clients: int, texts: int, max_tokens: int) -> None:
        self._client, self._clients, self._texts, self._max_tokens = client, clients, texts, max_tokens
        self._round = 0

    def questions(self) -> list[Outcome]:
        """The questions of a new round, not asked yet."""
        self._round += 1
        return [Outcome(self._case(number)) for number in range(self._clients)]

    async def ask(self, outcomes: list[Outcome]) -> None:
        """Ask all of them at once, until each has its whole answer."""
        await asyncio.gather(*(stream(self._client, outcome.case, outcome) for outcome in outcomes))

    async def hit_rate(self) -> float:
        """The share of prompt tokens that is cached in a new round in peace."""
        outcomes = self.questions()
        await self.ask(outcomes)
        return sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)

    def _case(self, number: int) -> Case:
        text = number % self._texts
        lines = f"    def method_{text}(self):\n        return {text}\n" * 24
        prompt = f"class Account{text}:\n{lines}    def question_{self._round}_{number}(self, value):\n"
        extra = {"return_token_ids": True, "ignore_eos": True}
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "extra_body": extra}
        return Case("shared text", body)


async def restarts_under_load(
    cluster: Cluster, count: int, *, clients: int = 16, texts: int = 8, max_tokens: int = 64
) -> tuple[float, list[Restart]]:
    """Restart the scheduler ``count`` times while every client has a stream; the first round's hit rate, and each."""
    async with client_of(cluster.url) as client:
        rounds = Rounds(client, clients, texts, max_tokens)
        return await rounds.hit_rate(), [await _restart_under_load(cluster, rounds) for _ in range(count)]


async def _restart_under_load(cluster: Cluster, rounds: Rounds) -> Restart:
    before = await rounds.hit_rate()
    outcomes = rounds.questions()
    asking = asyncio.create_task(rounds.ask(outcomes))
    while not all(outcome.choices for outcome in outcomes):  # each has tokens
        await asyncio.sleep(0.01)
    killed = monotonic()
    back = await asyncio.to_thread(restart, cluster)
    await asking
    # The new scheduler has counted nothing but the requests that were submitted to it again.
    samples = await asyncio.to_thread(cluster.scrape)
    resumed = total(samples, "cached_tokens_total") / max(1.0, total(samples, "prefix_cache_queries_total"))
    again = [Outcome(outcome.case) for outcome in outcomes]
    await rounds.ask(again)
    failures = [text for one, right in zip(outcomes, again, strict=True) for text in one.differences(right)]
    gaps = [gap for outcome in outcomes if (gap := outcome.longest_gap(killed + 0.1, killed)) is not None]
    return Restart(back, [end - begin for begin, end in gaps], before, resumed, await rounds.hit_rate(), failures)


def restart(cluster: Cluster, down: float = 0.0) -> Return:
    """Kill the scheduler, start it again after ``down`` seconds, and wait for every executor."""
    began = monotonic()
    cluster.scheduler.signal(signal.SIGKILL)
    cluster.scheduler.wait()
    while monotonic() < began + down:
        assert all(process.exit_code is None for process in cluster.executors)
        time.sleep(0.1)
    cluster.start_scheduler()
    rejoined = cluster.wait_ready(len(cluster.executors))
    return Return(rejoined, monotonic() - began)
