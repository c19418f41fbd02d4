"""What gateways ask of the scheduler for their consoles; ``docs/console.md`` tells what consoles show."""

from typing import Annotated, Literal

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece

MAX_CELLS = 4096
"""Cells of the memory maps of one answer."""

ConsolePart = Literal["fleet", "requests", "map", "prefixes", "block"]
"""What a console shows. All but "block" change all the time, so consoles ask for them again and again."""

UPDATE_SECONDS: dict[str, float] = {"fleet": 0.5, "map": 0.5, "requests": 1.0, "prefixes": 2.0, "block": 1.0}
"""How often a gateway asks for each part while a console shows it; that of "block" is asked for when somebody points at
one."""

Colour = Literal["state", "request", "prefix", "age", "tier"]
"""What the colours of a memory map tell of a block."""


class ConsoleView(Piece, frozen=True):
    """What a ``Query`` of the kind "console" asks for. Equal views have the same answer, whoever asks.

    Fields:
        part: of the console.
        executor_id: which executor to show; empty: all of them, each with a share of the cells.
        tier, first, count: which blocks of it are mapped; a count of 0: all from the first one on.
        colour: what the colours of the map tell. cells: the most cells of all maps together.
        block: the block to describe, if ``part`` is "block".
        tokens: whether token ids come with blocks and prefixes, because the gateway shows their text.
    """

    part: ConsolePart
    executor_id: Annotated[str, Meta(max_length=256)] = ""
    tier: Annotated[str, Meta(max_length=16)] = "device"
    first: Annotated[int, Meta(ge=0)] = 0
    count: Annotated[int, Meta(ge=0)] = 0
    colour: Colour = "state"
    cells: Annotated[int, Meta(ge=1, le=MAX_CELLS)] = 2048
    block: Annotated[int, Meta(ge=0)] = 0
    tokens: bool = False


class AbortRequest(Message, frozen=True):
    """An operator ends the request called ``request_id``, by our id or its client's, whichever gateway it came from.

    Its client is told that its outputs end there, with the finish reason "abort". Answered by ``QueryAnswer`` with the
    same ``number``: found, if there was such a request.
    """

    epoch: int
    number: int
    request_id: str
