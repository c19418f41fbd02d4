"""The bases of the structs on the wire, and the version of the protocol."""

from msgspec import Struct

PROTOCOL_MAJOR = 6
PROTOCOL_MINOR = 1


class Message(Struct, frozen=True, array_like=True, tag=lambda name: name.lower(), omit_defaults=True):
    """Base of all messages: the class name in lower case is the tag."""


class Piece(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Base of the structs inside messages."""
