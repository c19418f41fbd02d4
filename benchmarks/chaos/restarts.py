"""A scheduler is killed under load and started again: what its clients and its executors' caches see of it."""

import asyncio
import signal
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, NamedTuple

import httpx
import openai

from tests.chaos.processes import Cluster
from tests.chaos.workload import Case, Outcome, client_of, stream

AGAIN_SECONDS = 0.2
"""How soon a client whose stream broke asks again. What cannot connect then is up to the client library."""


class Return(NamedTuple):
    """How long executors took to be back, in seconds: since the new scheduler answered, and since the old one died."""

    rejoined: float
    away: float


@dataclass
class Restart:
    """What was seen of one restart. ``broken``: streams that ended with the scheduler. ``failures``: wrong outputs.

    Shares of prompt tokens that were cached. ``before``, ``after``: of rounds of new questions. ``retried``: of what
    clients asked again, the first that the new scheduler heard; ``after`` alone could live on what those have computed.
    """

    back: Return
    broken: int
    before: float
    retried: float
    after: float
    failures: list[str] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """For a result file: times in seconds."""
        return {
            "rejoined": round(self.back.rejoined, 2),
            "away": round(self.back.away, 2),
            "broken_streams": self.broken,
            "hit_rate": {name: round(getattr(self, name), 4) for name in ("before", "retried", "after")},
            "failures": len(self.failures),
        }


class Rounds:
    """Rounds of concurrent streams, one per client, of new questions about a few long texts that clients share."""

    def __init__(self, client: openai.AsyncOpenAI, clients: int, texts: int, max_tokens: int) -> None:
        self._client, self._clients, self._texts, self._max_tokens = client, clients, texts, max_tokens
        self._round = 0

    async def run(self) -> float:
        """One round in peace; the share of its prompt tokens that was cached."""
        return hit_rate([attempts[-1] for attempts in await asyncio.gather(*self.start())])

    def start(self, running: list[Outcome] | None = None) -> "list[asyncio.Task[list[Outcome]]]":
        """Start a round; its tasks end with the attempts that each client needed. ``running``: every attempt so far."""
        self._round += 1
        started = [] if running is None else running
        return [asyncio.create_task(self._insist(self._case(number), started)) for number in range(self._clients)]

    def _case(self, number: int) -> Case:
        text = number % self._texts
        lines = f"    def method_{text}(self):\n        return {text}\n" * 24
        prompt = f"class Account{text}:\n{lines}    def question_{self._round}_{number}(self, value):\n"
        extra = {"return_token_ids": True, "ignore_eos": True}
        body = {"prompt": prompt, "max_tokens": self._max_tokens, "temperature": 0, "extra_body": extra}
        return Case("shared text", body)

    async def _insist(self, case: Case, started: list[Outcome]) -> list[Outcome]:
        """Ask until there is a whole answer, as clients do whose stream breaks."""
        attempts: list[Outcome] = []
        while not attempts or not attempts[-1].done:
            attempts.append(Outcome(case))
            started.append(attempts[-1])
            try:
                await stream(self._client, case, attempts[-1])
            except (openai.APIError, httpx.HTTPError):
                await asyncio.sleep(AGAIN_SECONDS)
        return attempts


def hit_rate(outcomes: list[Outcome]) -> float:
    """The share of their prompt tokens that was cached."""
    return sum(one.cached_tokens for one in outcomes) / sum(one.prompt_tokens for one in outcomes)


async def restarts_under_load(
    cluster: Cluster, count: int, *, clients: int = 16, texts: int = 8, max_tokens: int = 64
) -> tuple[float, list[Restart]]:
    """Restart the scheduler ``count`` times while every client has a stream; the first round's hit rate, and each."""
    async with client_of(cluster.url, retries=12) as client:
        rounds = Rounds(client, clients, texts, max_tokens)
        return await rounds.run(), [await _restart_under_load(cluster, rounds, clients) for _ in range(count)]


async def _restart_under_load(cluster: Cluster, rounds: Rounds, clients: int) -> Restart:
    before = await rounds.run()
    running: list[Outcome] = []
    asking = rounds.start(running)
    while len(running) < clients or not all(outcome.choices for outcome in running):  # each has tokens
        await asyncio.sleep(0.01)
    back = await asyncio.to_thread(restart, cluster)
    answers = [attempts for attempts in await asyncio.gather(*asking) if len(attempts) > 1]
    failures = [
        f"{last.request_id} brought {last.choices[0].tokens}, and {outcome.choices[0].tokens} before the restart"
        for *broken, last in answers
        for outcome in broken
        if outcome.choices and last.choices[0].tokens[: len(outcome.choices[0].tokens)] != outcome.choices[0].tokens
    ]
    retried = hit_rate([attempts[-1] for attempts in answers]) if answers else 0.0
    return Restart(back, len(answers), before, retried, await rounds.run(), failures)


def restart(cluster: Cluster, down: float = 0.0) -> Return:
    """Kill the scheduler, start it again after ``down`` seconds, and wait for every executor."""
    began = monotonic()
    cluster.scheduler.signal(signal.SIGKILL)
    cluster.scheduler.wait()
    while monotonic() < began + down:
        assert all(process.exit_code is None for process in cluster.executors)
        asyncio.run(asyncio.sleep(0.1))
    cluster.start_scheduler()
    rejoined = cluster.wait_ready(len(cluster.executors))
    return Return(rejoined, monotonic() - began)
