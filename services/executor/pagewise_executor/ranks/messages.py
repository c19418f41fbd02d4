"""What rank 0 and the other ranks of an executor tell each other, beside the messages of schedulers."""

import msgspec
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    AdapterLoaded,
    CancelCopies,
    Copied,
    Found,
    Inventory,
    LoadAdapter,
    LookUp,
    StepPlan,
    Welcome,
)
from pagewise_shared.protocol.base import Message


class Seat(Message, frozen=True):
    """The first message: which rank of how many this process is, and where the ranks meet.

    ``folder``: of theirs, if all are on one node. ``store``: otherwise HOST:PORT where rank 0 keeps what they tell each
    other to meet. ``device``: which of the GPUs that this process sees it takes. ``on_host``: how many of the ranks are
    on this host, and share its memory and its cores.
    """

    rank: int
    size: int
    folder: str
    store: str = ""
    device: int = 0
    on_host: int = 1


class Join(Message, frozen=True):
    """A node asks node 0 for its ranks' part in an executor. ``host``: tells hosts apart; nodes may be on the same.

    ``settings``: options that have to be the same on all nodes (``agreement.settings_of``).
    """

    node: int
    version: str
    host: str
    settings: dict[str, str]


class Noted(Message, frozen=True):
    """Node 0 has heard of this node, and is still there. It waits for others, or serves."""


class TurnedAway(Message, frozen=True):
    """This node is not let in. ``final``: asking again would change nothing."""

    reason: str
    final: bool


class Admitted(Message, frozen=True):
    """All nodes are there: start the ranks. See ``Seat`` for the fields."""

    store: str
    on_host: int


class Ended(Message, frozen=True):
    """The process of a rank on this node has ended."""

    rank: int


class ListBlocks(Message, frozen=True):
    """Which hashed blocks are in the tiers? Answered by ``Listed``; no step is under way."""


class Stop(Message, frozen=True):
    """End: no call follows."""


class Ready(Message, frozen=True):
    """The rank's part of the model is loaded. ``block_endpoint``: where the same rank of others fetches blocks.

    ``computes``: what has to be the same on all ranks (``agreement.computes``).
    """

    block_endpoint: str
    device: str
    computes: dict[str, str]


class Settled(Message, frozen=True):
    """The rank has been reset for ``epoch``, after ``num_steps`` steps since it was reset before."""

    epoch: int
    num_steps: int


class Listed(Message, frozen=True):
    """The rank's inventory."""

    inventory: Inventory | None


class Counted(Message, frozen=True):
    """What a rank has counted so far; see the properties of ``Runner``."""

    num_refused: int = 0
    num_closed: int = 0
    num_storage_errors: int = 0


class Failed(Message, frozen=True):
    """The rank ends. ``final``: starting it again would fail the same way."""

    reason: str
    final: bool = False


ToRank = StepPlan | Welcome | CancelCopies | LookUp | LoadAdapter | ListBlocks | Stop
FromRank = Ready | Settled | Listed | Counted | Failed | Copied | Found | AdapterLoaded

ToNode = Noted | TurnedAway | Admitted
FromNode = Join | Ended

decode_seat = msgspec.msgpack.Decoder(Seat).decode
decode_config = msgspec.msgpack.Decoder(ExecutorConfig).decode
decode_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
decode_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
decode_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
decode_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
encode_config = msgspec.msgpack.Encoder().encode
