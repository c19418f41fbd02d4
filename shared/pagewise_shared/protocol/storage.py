"""The messages about tiers whose blocks have no ids (``HASH_TIERS``): look-ups, and deleting blocks there."""

from pagewise_shared.protocol.base import Message

# ---- scheduler -> executor ----------------------------------------------------------------------------


class LookUp(Message, frozen=True):
    """Ask how much of a prefix one of ``HASH_TIERS`` holds; ``Found`` with the same ``number`` answers.

    ``tier``: its number. ``root``: the parent hash of the prefix's first block. ``tokens``: of the prefix (int32
    bytes), behind whose full blocks a sequence may begin.
    """

    epoch: int
    number: int
    tier: int
    root: bytes
    tokens: bytes


class DropStored(Message, frozen=True):
    """Delete blocks of this model and block format in one of ``HASH_TIERS``; ``StoredDropped`` with the same ``number``
    answers.

    Fields:
        tier: its number.
        step: the blocks are deleted after the copies of this step and of earlier ones have been made.
        names: of the blocks to delete, with their blocks in all groups of layers (``pack_names``).
        tag: if there are no names: the ``salt_tag`` of the blocks to delete. Blocks whose salt the tier does not know
            are deleted too. Empty: all blocks are deleted.
    """

    epoch: int
    number: int
    tier: int
    step: int = 0
    names: bytes = b""
    tag: bytes = b""


# ---- executor -> scheduler ----------------------------------------------------------------------------


class Found(Message, frozen=True):
    """Answers ``LookUp``: the tier probably holds the first ``num_blocks`` full blocks of the prefix, and if there are
    several groups of layers, also the windows with which a sequence begins behind these blocks."""

    epoch: int
    number: int
    num_blocks: int


class StoredDropped(Message, frozen=True):
    """Answers ``DropStored``: ``num_blocks`` blocks were deleted, or pages if there are several groups of layers.

    ``error``: why not all of them could be deleted.
    """

    epoch: int
    number: int
    num_blocks: int = 0
    error: str = ""


class StoredGone(Message, frozen=True):
    """One of ``HASH_TIERS`` has deleted blocks by itself, to make room, or for ``DropStored``. For KV events.

    ``tier``: its number. ``hashes``: of the blocks (32 bytes each), of all executors that share the tier.
    """

    epoch: int
    tier: int
    hashes: bytes
