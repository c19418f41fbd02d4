"""Messages between rank 0 and the other ranks of an executor, and between its nodes.

Beside these, rank 0 forwards messages of the scheduler, and ranks answer with messages that are made for it.
"""

import msgspec
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    AdapterLoaded,
    CancelCopies,
    Copied,
    DropStored,
    Found,
    GroupedStepPlan,
    Inventory,
    LoadAdapter,
    LookUp,
    Message,
    ProposingStepPlan,
    SetStoredBudgets,
    StepPlan,
    StoredDropped,
    StoredGone,
    Welcome,
)

from pagewise_executor.runner import Counted


class RankSpec(Message, frozen=True):
    """The first message to a rank: its number, the number of ranks, and where torch.distributed connects them.

    ``folder``: the folder of the file through which ranks on one node find each other. ``store``: for ranks on several
    nodes, HOST:PORT of rank 0's TCP store instead. ``device``: the index of the rank's GPU among the GPUs that its
    process can use. ``on_host``: the number of ranks on this host, which share its memory and its cores.
    """

    rank: int
    size: int
    folder: str
    store: str = ""
    device: int = 0
    on_host: int = 1


class Join(Message, frozen=True):
    """A node asks node 0 to be admitted. ``host``: identifies the host, because several nodes may share one.

    ``settings``: the options that must be the same on all nodes (``agreement.settings_of``).
    """

    node: int
    version: str
    host: str
    settings: dict[str, str]


class Heartbeat(Message, frozen=True):
    """Node 0 has received this node's ``Join``, and is alive. It is sent again and again, also while the executor
    serves."""


class Rejected(Message, frozen=True):
    """Node 0 does not admit this node. ``final``: asking again would change nothing."""

    reason: str
    final: bool


class Admitted(Message, frozen=True):
    """All nodes have joined, and this node is to start its ranks. ``RankSpec`` explains the fields."""

    store: str
    on_host: int


class Ended(Message, frozen=True):
    """The process of a rank on this node has ended."""

    rank: int


class ListBlocks(Message, frozen=True):
    """Asks for the hashed blocks in all tiers. It is answered by ``Listed``, and sent while no step is in flight."""


class Offered(Message, frozen=True):
    """The blocks that all ranks hold, with new ids: follows ``ListBlocks`` if there are several groups of layers."""

    inventory: Inventory | None


class Stop(Message, frozen=True):
    """Ends a rank. No message follows."""


class Ready(Message, frozen=True):
    """The rank has loaded its part of the model.

    ``block_endpoint``: where the ranks of the same number of other executors fetch blocks. ``computes``: the settings
    that all ranks must share (``agreement.computes``).
    """

    block_endpoint: str
    device: str
    computes: dict[str, str]


class ResetDone(Message, frozen=True):
    """The rank has been reset for ``epoch``. ``num_steps``: how many steps it has run since the last reset."""

    epoch: int
    num_steps: int


class Listed(Message, frozen=True):
    """The rank's inventory."""

    inventory: Inventory | None


class Failed(Message, frozen=True):
    """The rank has failed and ends. ``final``: another start would fail in the same way."""

    reason: str
    final: bool = False


ToRank = (
    StepPlan
    | GroupedStepPlan
    | ProposingStepPlan
    | Welcome
    | CancelCopies
    | LookUp
    | DropStored
    | SetStoredBudgets
    | LoadAdapter
    | ListBlocks
    | Offered
    | Stop
)
FromRank = Ready | ResetDone | Listed | Counted | Failed | Copied | Found | StoredDropped | StoredGone | AdapterLoaded

ToNode = Heartbeat | Rejected | Admitted
FromNode = Join | Ended

decode_spec = msgspec.msgpack.Decoder(RankSpec).decode
decode_config = msgspec.msgpack.Decoder(ExecutorConfig).decode
decode_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
decode_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
decode_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)
decode_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
