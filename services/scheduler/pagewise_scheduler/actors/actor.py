"""The actor: one task, one typed mailbox, nothing shared that another task writes."""

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

MessageT = TypeVar("MessageT")


class Actor(ABC, Generic[MessageT]):
    """Runs in one task, which is the only one that touches its state; everybody else leaves messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._mailbox: asyncio.Queue[MessageT] = asyncio.Queue()

    def tell(self, message: MessageT) -> None:
        """Leave a message; returns at once."""
        self._mailbox.put_nowait(message)

    async def receive(self) -> list[MessageT]:
        """All messages that have come in, in order; waits until there is one."""
        return [await self._mailbox.get(), *self.leftover()]

    def leftover(self) -> list[MessageT]:
        """Messages that are there already, without waiting."""
        return [self._mailbox.get_nowait() for _ in range(self._mailbox.qsize())]

    @abstractmethod
    async def run(self) -> None:
        """Live until cancelled, or until there is nothing left to do."""
