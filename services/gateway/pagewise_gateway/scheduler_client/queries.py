"""Questions and orders to the scheduler that are no requests: reports, ends of requests, advice, and adapters."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any, Literal

from msgspec import structs
from pagewise_shared.protocol import (
    AbortRequest,
    Adapter,
    AdapterAnswer,
    Advise,
    Advised,
    ConsoleView,
    Message,
    MetricsSnapshot,
    Query,
    QueryAnswer,
    RegisterAdapter,
    ResetCache,
    UnregisterAdapter,
)

from pagewise_gateway.generation import AdmissionError
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client.adapters import AdapterError
from pagewise_gateway.scheduler_client.connection import SchedulerConnection

QUERY_SECONDS = 10.0
LOAD_SECONDS = 300.0
"""How long loading an adapter on all executors may take."""
RESET_SECONDS = 300.0
"""How long deleting blocks on disks and in stores may take."""
NO_SCHEDULER = "no scheduler answers"


class Queries:
    """Messages that the scheduler answers by their numbers, and the callers that wait for the answers."""

    def __init__(self, connection: SchedulerConnection, metrics: Metrics) -> None:
        self._connection, self._metrics = connection, metrics
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # an answer of the type that each query asks for
        self._numbers = count(1)

    def new_number(self) -> int:
        """Return a number that no other message has."""
        return next(self._numbers)

    async def report(
        self,
        kind: Literal["metrics", "memory", "request", "cache", "console"],
        argument: str = "",
        limit: int = 0,
        key: str = "",
        view: ConsoleView | None = None,
    ) -> bytes:
        """Ask the scheduler for a report: Prometheus' text ("metrics"), or JSON about the memory, the cache or a
        request, or lines of JSON for consoles (``view``).

        ``key``: name of the API key whose requests the report may show; empty: all keys.

        Raises:
            AdmissionError: no scheduler answers.
            LookupError: the scheduler knows no request of this name.
        """
        epoch = self._connection.epoch
        if kind == "metrics" and epoch is not None:
            self._connection.send(MetricsSnapshot(epoch, self._metrics.snapshot()))
        answer: QueryAnswer = await self._answer_to(
            lambda epoch, number: Query(epoch, number, kind, argument, limit, key, view)
        )
        if not answer.found:
            raise LookupError(argument)
        return answer.body

    async def end_request(self, name: str) -> bool:
        """Have the scheduler end a request of any gateway, by our id or its client's. Returns whether there was one.

        Raises:
            AdmissionError: no scheduler answers.
        """
        answer: QueryAnswer = await self._answer_to(lambda epoch, number: AbortRequest(epoch, number, name))
        return answer.found

    async def reset_cache(self, salt: str, *, external: bool) -> bytes:
        """Let all executors release the cached blocks of a cache salt (empty: all blocks). Returns the JSON of a
        ``CacheReset``. ``external``: on disks and in stores too.

        Raises:
            AdmissionError: no scheduler answers, or disks and stores take too long.
        """
        answer: QueryAnswer = await self._answer_to(
            lambda epoch, number: ResetCache(epoch, number, salt, external),
            RESET_SECONDS if external else QUERY_SECONDS,
            "blocks on disks and in stores are still being deleted",
        )
        return answer.body

    async def advise(self, advice: Advise) -> Advised:
        """Give the scheduler a client's advice, and return what came of it. Its epoch and number are ignored.

        Raises:
            AdmissionError: no scheduler answers.
        """
        answer: Advised = await self._answer_to(
            lambda epoch, number: structs.replace(advice, epoch=epoch, number=number)
        )
        return answer

    def tell(self, advice: Advise) -> None:
        """Give the scheduler advice whose answer nobody reads. Without a scheduler, it is dropped."""
        if (epoch := self._connection.epoch) is not None:
            self._connection.send(structs.replace(advice, epoch=epoch, number=self.new_number()))

    async def load_adapter(self, adapter: Adapter, *, replace: bool) -> None:
        """Have all executors load an adapter. ``replace``: it may take the place of one with the same name.

        Raises:
            AdapterError: it cannot be served.
            AdmissionError: no scheduler answers, or there is no executor that could load it.
        """
        await self._change_adapter(lambda epoch, number: RegisterAdapter(epoch, number, adapter, replace))

    async def unload_adapter(self, name: str) -> None:
        """Have all executors unload an adapter.

        Raises:
            AdapterError: there is none of that name.
            AdmissionError: no scheduler answers.
        """
        await self._change_adapter(lambda epoch, number: UnregisterAdapter(epoch, number, name))

    async def _change_adapter(self, make: Callable[[int, int], Message]) -> None:
        answer: AdapterAnswer = await self._answer_to(
            make, LOAD_SECONDS, "the executors have not loaded the adapter in time"
        )
        if answer.kind == "unavailable":
            raise AdmissionError("unavailable", answer.message)
        if answer.kind:
            raise AdapterError(answer.message)

    async def _answer_to(
        self,
        make: Callable[[int, int], Message],
        seconds: float = QUERY_SECONDS,
        late: str = "the scheduler does not answer",
    ) -> Any:
        """Send the message that ``make`` makes of the epoch and a new number, and return the answer with that number.

        Raises:
            AdmissionError: no scheduler answers; ``late`` is its text if there is none after ``seconds``.
        """
        if (epoch := self._connection.epoch) is None:
            raise AdmissionError("unavailable", NO_SCHEDULER)
        number = self.new_number()
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(make(epoch, number))
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise AdmissionError("unavailable", late) from None
        finally:
            del self._waiting[number]

    def answered(self, answer: QueryAnswer | AdapterAnswer | Advised) -> None:
        """Return an answer to its caller, if that still waits."""
        if (waiting := self._waiting.get(answer.number)) is not None and not waiting.done():
            waiting.set_result(answer)

    def fail(self) -> None:
        """Fail all callers: the scheduler is lost."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(AdmissionError("unavailable", NO_SCHEDULER))
