"""Encoding and decoding of messages, and packed arrays of numbers."""

import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol.base import Message
from pagewise_shared.protocol.gateway_messages import FromGateway, ToGateway
from pagewise_shared.protocol.limits import MAX_FRAME_TO_SCHEDULER, MAX_STEP_RESULT_BYTES, MAX_SUBMIT_BYTES
from pagewise_shared.protocol.messages import Blocks, FromExecutor, FromScheduler, Inventory, NamedBlocks, ReadBlocks
from pagewise_shared.protocol.tiers import TIER_NAMES

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("the wire format is little-endian int32; this machine is big-endian")

_SMALL_FRAME = 1024 * 1024
_MOST_BYTES = {
    b"hello": MAX_FRAME_TO_SCHEDULER,
    b"submit": MAX_SUBMIT_BYTES,
    b"stepresult": MAX_STEP_RESULT_BYTES,
    b"copied": MAX_FRAME_TO_SCHEDULER // 2,
    b"metricssnapshot": 8 * 1024 * 1024,
}
"""Maximum bytes of a frame to the scheduler, by the message's tag; other messages fit a small frame.

A decoded frame takes several times its size. The factor depends on the message, and these limits keep every message
below ``MAX_DECODED_BYTES``.
"""

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """Encode one message as one msgpack frame."""
    return _encoder.encode(message)


def _decoder(messages: Any, *, bounded: bool = False) -> Callable[[bytes | memoryview], Any]:
    """Return a function that decodes one of ``messages``. ``bounded``: apply ``_MOST_BYTES`` first."""
    decoder = msgspec.msgpack.Decoder(messages)

    def decode(frame: bytes | memoryview) -> Any:
        if bounded and len(frame) > _SMALL_FRAME:
            _check_length(frame)
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"not a message of this protocol ({len(frame)} bytes): {error}") from error

    return decode


# Each decodes one frame, and raises ProtocolError unless the sender may send such a message.
decode_from_executor: Callable[[bytes | memoryview], FromExecutor] = _decoder(FromExecutor, bounded=True)
decode_from_gateway: Callable[[bytes | memoryview], FromGateway] = _decoder(FromGateway, bounded=True)
decode_from_scheduler: Callable[[bytes | memoryview], FromScheduler] = _decoder(FromScheduler)
decode_to_gateway: Callable[[bytes | memoryview], ToGateway] = _decoder(ToGateway)
decode_from_peer: Callable[[bytes | memoryview], ReadBlocks | Blocks] = _decoder(ReadBlocks | Blocks)


def _check_length(frame: bytes | memoryview) -> None:
    # The tag is read by hand, because decoding the frame is the work that this check prevents. An array of up to 15
    # elements has a header of one byte, a longer array has three bytes. The tag is a short string.
    start = 1 if frame[0] & 0xF0 == 0x90 else 3
    tag = bytes(frame[start + 1 : start + 1 + (frame[start] & 0x1F)])
    if len(frame) > _MOST_BYTES.get(tag, _SMALL_FRAME):
        raise ProtocolError(f"a frame of {len(frame)} bytes is longer than messages of its type may be")


def pack_int32s(values: Iterable[int]) -> bytes:
    """Pack integers as little-endian int32 bytes.

    Raises:
        OverflowError: a value does not fit into 32 bits.
    """
    return array("i", values).tobytes()


def unpack_int32s(data: bytes) -> "array[int]":
    """Unpack the integers of ``pack_int32s``.

    Raises:
        ProtocolError: the length is no multiple of 4.
    """
    return _unpack("i", data)


def pack_float32s(values: Iterable[float]) -> bytes:
    """Pack numbers as little-endian float32 bytes."""
    return array("f", values).tobytes()


def unpack_float32s(data: bytes) -> "array[float]":
    """Unpack the numbers of ``pack_float32s``.

    Raises:
        ProtocolError: the length is no multiple of 4.
    """
    return _unpack("f", data)


def _unpack(kind: str, data: bytes) -> "array[Any]":
    values = array(kind)
    try:
        values.frombytes(data)
    except ValueError as error:
        raise ProtocolError(f"{len(data)} bytes are no whole number of 4-byte values") from error
    return values


def tier_name(number: int) -> str:
    """Return the name of a tier, for people and metrics."""
    return TIER_NAMES[number] if 0 <= number < len(TIER_NAMES) else f"tier {number}"


def named_blocks(inventory: Inventory, group: int = 0) -> dict[int, dict[BlockHash, int]]:
    """Return the block ids of an inventory by block hash, for each tier number. ``group``: of layers.

    Raises:
        ProtocolError: the numbers of hashes and blocks differ, or a group of a tier is named twice.
    """
    if len({(held.tier, held.group) for held in inventory.tiers}) != len(inventory.tiers):
        raise ProtocolError("a group of a tier is named twice")
    return {held.tier: _by_hash(held) for held in inventory.tiers if held.group == group}


def _by_hash(held: NamedBlocks) -> dict[BlockHash, int]:
    blocks, hashes = unpack_int32s(held.blocks), held.hashes
    if len(hashes) != HASH_BYTES * len(blocks):
        raise ProtocolError(f"{len(hashes)} bytes of hashes name {len(blocks)} blocks")
    return {
        BlockHash(hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]): block for index, block in enumerate(blocks)
    }
