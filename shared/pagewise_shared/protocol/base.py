"""What all messages have in common.

Every message is one msgpack frame: a tagged, frozen, array-like struct. Fields are only ever appended, with
defaults, so that minor versions understand each other; a change that cannot be made that way raises
``PROTOCOL_MAJOR``. Bulk integers travel as little-endian int32 bytes (``pack_int32s``).
"""

from msgspec import Struct


class Message(Struct, frozen=True, array_like=True, tag=lambda name: name.lower(), omit_defaults=True):
    """Base of all messages: the class name in lower case is the tag."""


class Piece(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the parts that messages are made of."""
