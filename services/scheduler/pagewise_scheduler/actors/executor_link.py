"""The engine's way to its executor."""

from collections.abc import Callable
from dataclasses import dataclass

from pagewise_shared.protocol import Message


@dataclass(slots=True, frozen=True)
class ExecutorLink:
    """How the engine reaches its executor.

    ``send``: sends one message; an executor that cannot be reached is lost soon. ``next_epoch``: begins an epoch,
    higher than any before; what the executor sends under older ones is dropped from then on.
    """

    send: Callable[[Message], None]
    next_epoch: Callable[[], int]


GONE = ExecutorLink(lambda message: None, lambda: 0)
"""Of an engine that is lost. Its own link holds its session, which holds the engine."""
