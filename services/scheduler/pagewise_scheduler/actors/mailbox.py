"""What sockets and timers leave for the coordinator, and where."""

import asyncio
from typing import Literal, NamedTuple

from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import Message

PeerKind = Literal["executor", "gateway"]
"""What a process is that connects to the scheduler."""


class Received(NamedTuple):
    """A frame has come over the socket for ``kind``, from the connection ``identity``.

    ``key``: the public key (Z85 text) that the connection has proved to own, "" without CURVE. ``message``: what the
    frame says, or why it is no message.
    """

    kind: PeerKind
    identity: bytes
    key: str
    message: Message | ProtocolError


class ConnectionsBroke(NamedTuple):
    """Connections of the socket for ``kind`` have broken; it is not known whose."""

    kind: PeerKind


class Unreachable(NamedTuple):
    """A message could not be sent to the connection ``identity`` of the socket for ``kind``. What was received before
    is in front of this message in the mailbox."""

    kind: PeerKind
    identity: bytes


class Tick(NamedTuple):
    """Time has passed: look for those that are late."""


MailboxMessage = Received | ConnectionsBroke | Unreachable | Tick


class Mailbox:
    """Messages in the order in which they came. Anybody on the event loop may leave one; one task takes them out."""

    def __init__(self) -> None:
        self._messages: list[MailboxMessage] = []
        self._arrived = asyncio.Event()

    def put(self, message: MailboxMessage) -> None:
        """Leave a message; returns at once."""
        self._messages.append(message)
        self._arrived.set()

    async def take_all(self) -> list[MailboxMessage]:
        """All messages that have come in; waits until there is one."""
        await self._arrived.wait()
        self._arrived.clear()
        messages, self._messages = self._messages, []
        return messages
