"""The adapters that this gateway knows of: the scheduler tells them, and is asked to serve others."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from itertools import count

from pagewise_shared.logs import printable
from pagewise_shared.protocol import Adapter, AdapterAnswer, AdapterState, Message, RegisterAdapter, UnregisterAdapter

from pagewise_gateway.generation import AdmissionError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 300.0
"""How long loading an adapter on all executors may take."""
_NO_SCHEDULER = "no scheduler answers"


class AdapterError(Exception):
    """The scheduler does not do what was asked about an adapter; ``unknown``: because it has none of that name."""

    def __init__(self, message: str, *, unknown: bool = False) -> None:
        super().__init__(message)
        self.unknown = unknown


class AdapterTable:
    """The adapters by name, as the scheduler told them last.

    ``modules``: those that this gateway was started with. The scheduler is asked for them until it has answered;
    afterwards they are like any others, and may be unloaded. ``timeout``: see ``settle``.
    """

    def __init__(self, modules: Iterable[Adapter] = ()) -> None:
        self.version = 0
        self._adapters: dict[str, Adapter] = {}
        self._wanted = {adapter.name: adapter for adapter in modules}
        self._questions: dict[int, asyncio.Future[AdapterAnswer]] = {}
        self._modules: dict[int, Adapter] = {}
        self._numbers = count(1)
        self._send: Callable[[Message], None] = lambda message: None
        self._epoch: int | None = None
        self._told = False
        self._changed = asyncio.Event()
        self.timeout = 60.0

    async def settle(self, name: str) -> None:
        """Wait while it is not known whether there is an adapter of that name, ``timeout`` seconds at most.

        That is before the first scheduler has told which there are, and while executors load those of the start.
        """
        try:
            async with asyncio.timeout(self.timeout):
                while name not in self._adapters and (not self._told or name in self._wanted):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of that name, if there is one."""
        return self._adapters.get(name)

    def all(self) -> tuple[Adapter, ...]:
        """Return all adapters."""
        return tuple(self._adapters.values())

    async def load(self, adapter: Adapter, *, replace: bool) -> None:
        """Have an adapter served. ``replace``: one of its name may be there.

        Raises:
            AdapterError: it cannot be served.
            AdmissionError: no scheduler answers, or there is no executor that could load it.
        """
        epoch, number = self._ask()
        await self._answer(number, RegisterAdapter(epoch, number, adapter, replace))

    async def unload(self, name: str) -> None:
        """Have an adapter served no more.

        Raises:
            AdapterError: there is none of that name.
            AdmissionError: no scheduler answers.
        """
        epoch, number = self._ask()
        await self._answer(number, UnregisterAdapter(epoch, number, name))

    def _ask(self) -> tuple[int, int]:
        if self._epoch is None:
            raise AdmissionError("unavailable", _NO_SCHEDULER)
        return self._epoch, next(self._numbers)

    async def _answer(self, number: int, message: Message) -> None:
        future = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(message)
            async with asyncio.timeout(ANSWER_SECONDS):
                answer = await future
        except TimeoutError:
            raise AdmissionError("unavailable", "the executors have not loaded the adapter in time") from None
        finally:
            self._questions.pop(number, None)
        if answer.kind == "unavailable":
            raise AdmissionError("unavailable", answer.message)
        if answer.kind:
            raise AdapterError(answer.message, unknown=answer.kind == "unknown")

    # ---- for the link --------------------------------------------------------------------------------

    def joined(self, epoch: int, send: Callable[[Message], None]) -> None:
        """A scheduler is there; it has been told what this gateway knew."""
        self._epoch, self._send = epoch, send
        for adapter in self._wanted.values():
            number = next(self._numbers)
            self._modules[number] = adapter
            send(RegisterAdapter(epoch, number, adapter, replace=True, waits=True))

    def lost(self) -> None:
        """The scheduler is gone."""
        self._epoch = None
        self._modules.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(AdmissionError("unavailable", _NO_SCHEDULER))

    def told(self, state: AdapterState) -> None:
        """The scheduler tells which adapters there are."""
        self.version, self._told = state.version, True
        self._changed.set()
        self._adapters = {adapter.name: adapter for adapter in state.adapters}

    def answered(self, answer: AdapterAnswer) -> None:
        """The scheduler has answered."""
        if (module := self._modules.pop(answer.number, None)) is not None:
            self._wanted.pop(module.name, None)
            self._changed.set()
            if answer.kind:
                text = printable(answer.message, 1000)
                log.error("the adapter %s, which this gateway was started with, is not served: %s", module.name, text)
        elif (question := self._questions.get(answer.number)) is not None and not question.done():
            question.set_result(answer)
