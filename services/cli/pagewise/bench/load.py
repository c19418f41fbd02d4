"""Puts a planned load on a server."""

import asyncio
import contextlib
import math
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import aiohttp

from pagewise.bench.client import Client
from pagewise.bench.health import Health
from pagewise.bench.metrics import Outcome
from pagewise.bench.servers import Server
from pagewise.bench.texts import Texts
from pagewise.bench.workloads import Turn

_READ_BUFFER = 1 << 20

History = list[dict[str, str]]
"""Messages of a conversation, for a server that takes texts too."""


@contextlib.asynccontextmanager
async def http_session(server: Server, options: Namespace) -> AsyncIterator[aiohttp.ClientSession]:
    """Yield a session with the server's key and any number of connections."""
    headers = {"Content-Type": "application/json"} | dict(header.split("=", 1) for header in options.header or [])
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    timeout = aiohttp.ClientTimeout(total=options.request_timeout)
    connector = aiohttp.TCPConnector(limit=0, ssl=not options.insecure, keepalive_timeout=60)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=headers, read_bufsize=_READ_BUFFER
    ) as session:
        yield session


class Load:
    """One run of a workload on a server.

    ``max_concurrency``: sessions that run at once at most (of single requests, requests); None: no limit.
    ``duration``: seconds after which no request starts any more; those that run then are waited for. None: all start.
    ``on_end`` is called with each outcome.
    """

    def __init__(
        self,
        client: Client,
        texts: Texts,
        *,
        max_concurrency: int | None,
        duration: float | None = None,
        on_end: Callable[[Outcome], None] = lambda _: None,
    ) -> None:
        self._client = client
        self._texts = texts
        self._slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._duration = math.inf if duration is None else duration
        self._on_end = on_end
        self._outcomes: list[Outcome] = []
        self._ends = math.inf

    async def run(self, sessions: Iterable[Turn]) -> tuple[list[Outcome], dict[str, Any]]:
        """Return the outcomes in the order in which requests ended, and how the load generator was meanwhile.

        ``sessions``: by the time at which they begin.
        """
        async with Health() as health, asyncio.TaskGroup() as tasks:
            began = time.perf_counter()
            self._ends = began + self._duration
            for session in sessions:
                due = began + session.delay
                if due >= self._ends:
                    break
                if due > time.perf_counter():
                    await asyncio.sleep(due - time.perf_counter())
                if self._slots is not None:
                    waits = self._slots.locked()
                    await self._slots.acquire()
                    # One that waited for a slot is due when it has got one: that it is late is asked for.
                    due = time.perf_counter() if waits else due
                    if due >= self._ends:
                        break
                tasks.create_task(self._session(session, due))
        return self._outcomes, health.report(self._outcomes)

    async def _session(self, first: Turn, due: float) -> None:
        await self._turn(first, due, [])
        if self._slots is not None:
            self._slots.release()

    async def _turn(self, turn: Turn, due: float, history: History) -> None:
        text = self._texts.text(turn.parts, first=not history)
        messages = [*history, {"role": "user", "content": text}]
        prompt = messages if self._client.server.is_chat else "\n".join(one["content"] for one in messages)
        outcome = await self._client.send(prompt, turn.output_tokens, due)
        # What a later turn continues has answers in it, whose lengths nobody has asked for.
        outcome.asked_prompt_tokens = None if history else turn.prompt_tokens or None
        self._outcomes.append(outcome)
        self._on_end(outcome)
        said = [*messages, {"role": "assistant", "content": outcome.text}]
        if not turn.following:
            return
        async with asyncio.TaskGroup() as tasks:
            for following in turn.following:
                tasks.create_task(self._later(following, outcome, said if following.continues else []))

    async def _later(self, turn: Turn, before: Outcome, history: History) -> None:
        """Run a turn after the pause that follows the turn before it."""
        if before.error and turn.continues:
            self._skip(turn)
            return
        due = before.end + turn.delay
        # A session whose next turn comes too late keeps its slot to the end: another one would be more load.
        await asyncio.sleep(min(due, self._ends) - time.perf_counter())
        if due < self._ends:
            await self._turn(turn, due, history)

    def _skip(self, turn: Turn) -> None:
        """Count what cannot be asked, because the answer that it follows has failed."""
        now = time.perf_counter()
        waiting = [turn]
        while waiting:
            one = waiting.pop()
            failed = Outcome(
                now, now, one.output_tokens, end=now, error="not sent", detail="an earlier turn has failed"
            )
            self._outcomes.append(failed)
            self._on_end(failed)
            waiting.extend(one.following)
