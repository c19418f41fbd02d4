"""The messages about adapters; ``docs/wire-protocol.md`` tells how they are used."""

from typing import Annotated

from msgspec import Meta

from pagewise_shared.protocol.base import Message, Piece

MAX_ADAPTERS = 1024
"""Adapters that a fleet may serve."""

AdapterList = Annotated[tuple["Adapter", ...], Meta(max_length=MAX_ADAPTERS)]


class Adapter(Piece, frozen=True):
    """An adapter in PEFT's format.

    Fields:
        name: what clients call it. path: its folder, as executors see it, or a hub id.
        content: hash of its files (32 bytes), of ``read_adapter``; KV belongs to it, whatever the name.
        num_bytes: of its weights. rank: the greatest of its modules. created: seconds since 1970.
    """

    name: str
    path: str
    content: bytes
    num_bytes: int = 0
    rank: int = 0
    created: int = 0


# ---- scheduler and executors --------------------------------------------------------------------------


class LoadAdapter(Message, frozen=True):
    """Bring an adapter to a slot of the device; answered by ``AdapterLoaded`` with the same ``number``.

    ``slot``: 0 <= slot < ``AdapterCapacity.slots``, which no row of a step in flight uses; -1: to the host only, to see
    whether it can be loaded.
    """

    epoch: int
    number: int
    adapter: Adapter
    slot: int = -1


class AdapterCapacity(Piece, frozen=True):
    """Which adapters an executor can serve.

    ``slots``: for adapters on its device; 0: it serves none. ``max_rank``: the greatest that they may have.
    """

    slots: int = 0
    max_rank: int = 0


NO_ADAPTERS = AdapterCapacity()
"""Those of an executor that serves none."""


class AdapterLoaded(Message, frozen=True):
    """An adapter has been loaded, or could not be.

    Fields:
        elapsed_us: reading it, checking it and copying it to its slot, without waiting for others, microseconds.
        from_host: it lay on the host already. evicted: adapters that the host gave up for it (their contents).
        error: why it could not be loaded; then the slot holds nothing.
    """

    epoch: int
    number: int
    elapsed_us: int = 0
    from_host: bool = False
    evicted: Annotated[tuple[bytes, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    error: str = ""


# ---- gateways and scheduler ---------------------------------------------------------------------------


class RegisterAdapter(Message, frozen=True):
    """Serve an adapter from now on: answered by ``AdapterAnswer`` once executors have loaded it, or could not.

    ``replace``: one of this name may be there; requests that run go on with it. ``waits``: if there is no executor, it
    is loaded and listed when one joins, and the answer comes then.
    """

    epoch: int
    number: int
    adapter: Adapter
    replace: bool = False
    waits: bool = False


class UnregisterAdapter(Message, frozen=True):
    """Serve the adapter of this name no more: answered by ``AdapterAnswer``. Requests that run go on with it."""

    epoch: int
    number: int
    name: str


class AdapterAnswer(Message, frozen=True):
    """What became of a ``RegisterAdapter`` or ``UnregisterAdapter``.

    ``kind``: "" if it was done, else "refused" (``message`` says why), "unknown" (no adapter has that name) or
    "unavailable" (no executor could try).
    """

    number: int
    kind: str = ""
    message: str = ""


class AdapterState(Message, frozen=True):
    """The adapters that are served. Sent after the welcome and whenever they change.

    ``version``: greater than that of any state before, over restarts of the scheduler too.
    """

    epoch: int
    version: int = 0
    adapters: AdapterList = ()
