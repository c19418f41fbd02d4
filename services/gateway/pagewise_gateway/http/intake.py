"""What is held for a request from when its head was read: its place in its key's limits, memory for body and answer."""

import asyncio

from aiohttp import web
from pagewise_shared.protocol import Submit
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.http.clients import Client
from pagewise_gateway.http.errors import OverloadedError
from pagewise_gateway.http.memory_budget import AnswerMemory, BodyMemory, Reservation
from pagewise_gateway.link import LiveRequest, SchedulerLink
from pagewise_gateway.metrics import Metrics

_PAUSES = (0.0, 0.02, 0.1)
"""Seconds to wait before it is checked again whether another answer has been written. The frame from the scheduler that
lets a request in may be the one that ends another request, whose answer this gateway has not written yet."""


class Answering:
    """Counts the requests of each API key that this gateway is answering, until their answers are written.

    The scheduler counts a request only until its last token. Without this count, the finished answers of a client that
    does not read would pile up here for as long as ``--write-timeout`` allows.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._by_key: dict[str, int] = {}

    async def begin(self, client: Client) -> None:
        """Count one more request of a client, which the scheduler has let in.

        Raises:
            OverloadedError: together with requests whose answers are not read yet, these are more than the key's limit.
        """
        most = client.limits.concurrent
        for pause in _PAUSES:
            if most is None or self._by_key.get(client.name, 0) < most:
                break
            await asyncio.sleep(pause)
        number = self._by_key.get(client.name, 0)
        if most is not None and number >= most:
            self._metrics.requests_refused("key_unread").inc()
            raise OverloadedError(
                f"API key {client.name}: {number} requests are being answered, and some of their answers wait to be "
                f"read; the limit of concurrent requests is {most}"
            )
        self._by_key[client.name] = number + 1

    def end(self, client: Client) -> None:
        """Stop counting a request: its answer was written, or the client is gone."""
        self._by_key[client.name] -= 1
        if not self._by_key[client.name]:
            del self._by_key[client.name]


class Intake:
    """One request whose body is being read, parsed and tokenized, and which is then answered.

    A request counts against the limits of its API key before its body is read. Otherwise a key could have any number of
    bodies read and parsed at a time, and those that are refused would cost it nothing.

    Fields:
        memory: the memory that is taken for its body. answer: the memory that is taken for its answer.
        counted: the request without prompts that stands for it at the scheduler; None: its key has no limits.
    """

    KEY: web.RequestKey["Intake"]

    def __init__(
        self, client: Client, request_id: str, memory: BodyMemory, answers: AnswerMemory, answering: Answering
    ) -> None:
        self.memory = Reservation(memory, client.name)
        self.answer = Reservation(answers, client.name)
        self.counted: LiveRequest | None = None
        self._client, self._request_id = client, request_id
        self._answering, self._begun = answering, False

    async def count(self, link: SchedulerLink) -> None:
        """Count it against the limits of its key, if that has any. The scheduler does so, over all gateways.

        Raises:
            GenerationError: the key is over one of its limits.
            OverloadedError: the key is over that limit with requests whose answers are not read yet.
        """
        client = self._client
        if not client.limited:
            return
        self.counted = link.submit(
            Submit(0, 0, self._request_id, (), SamplingParams(), key=client.name, limits=client.limits)
        )
        await self.counted.next()
        await self._answering.begin(client)
        self._begun = True

    def close(self) -> None:
        """Give everything back: the request was answered. ``counted`` ends, unless the request has taken its place."""
        self.memory.release()
        self.answer.release()
        if self._begun:
            self._begun = False
            self._answering.end(self._client)
        if self.counted is not None:
            self.counted.abort()


Intake.KEY = web.RequestKey("intake", Intake)
