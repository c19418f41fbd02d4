"""Typed encoding and decoding of messages, and the byte form of many numbers."""

import sys
from array import array
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol.base import Message
from pagewise_shared.protocol.gateway_messages import FromGateway, ToGateway
from pagewise_shared.protocol.limits import MAX_FRAME_TO_SCHEDULER, MAX_STEP_RESULT_BYTES, MAX_SUBMIT_BYTES
from pagewise_shared.protocol.messages import (
    TIER_NAMES,
    Blocks,
    FromExecutor,
    FromScheduler,
    Inventory,
    NamedBlocks,
    ReadBlocks,
)

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("the wire format is little-endian int32; this machine is big-endian")

T = TypeVar("T")

_SMALL_FRAME = 1024 * 1024
_MOST_BYTES = {
    b"hello": MAX_FRAME_TO_SCHEDULER,
    b"submit": MAX_SUBMIT_BYTES,
    b"stepresult": MAX_STEP_RESULT_BYTES,
    b"copied": MAX_FRAME_TO_SCHEDULER // 2,
    b"metricssnapshot": 8 * 1024 * 1024,
}
"""How long frames to the scheduler may be, by tag; others may be as long as a small frame.

A frame becomes objects of several times its size. The more so for a type, the less may come of it, so that none takes
more than ``MAX_DECODED_BYTES``.
"""

_encoder = msgspec.msgpack.Encoder()
# mypy takes a union of types for no type.
_from_executor: msgspec.msgpack.Decoder[FromExecutor] = msgspec.msgpack.Decoder(FromExecutor)
_from_scheduler: msgspec.msgpack.Decoder[FromScheduler] = msgspec.msgpack.Decoder(FromScheduler)
_from_gateway: msgspec.msgpack.Decoder[FromGateway] = msgspec.msgpack.Decoder(FromGateway)
_to_gateway: msgspec.msgpack.Decoder[ToGateway] = msgspec.msgpack.Decoder(ToGateway)
_from_peer: msgspec.msgpack.Decoder[ReadBlocks | Blocks] = msgspec.msgpack.Decoder(ReadBlocks | Blocks)


def encode(message: Message) -> bytes:
    """One message as one msgpack frame."""
    return _encoder.encode(message)


def decode_from_executor(frame: bytes | memoryview) -> FromExecutor:
    """The message an executor sent.

    Raises:
        ProtocolError: the frame is not one of the messages an executor may send.
    """
    _check_length(frame)
    return _decode(_from_executor, frame)


def decode_from_scheduler(frame: bytes | memoryview) -> FromScheduler:
    """The message a scheduler sent.

    Raises:
        ProtocolError: the frame is not one of the messages a scheduler may send.
    """
    return _decode(_from_scheduler, frame)


def decode_from_peer(frame: bytes | memoryview) -> ReadBlocks | Blocks:
    """The message another executor sent.

    Raises:
        ProtocolError: the frame is not one of the messages executors send each other.
    """
    return _decode(_from_peer, frame)


def decode_from_gateway(frame: bytes | memoryview) -> FromGateway:
    """The message a gateway sent.

    Raises:
        ProtocolError: the frame is not one of the messages a gateway may send.
    """
    _check_length(frame)
    return _decode(_from_gateway, frame)


def decode_to_gateway(frame: bytes | memoryview) -> ToGateway:
    """The message a scheduler sent to a gateway.

    Raises:
        ProtocolError: the frame is not one of the messages a scheduler may send to a gateway.
    """
    return _decode(_to_gateway, frame)


def _check_length(frame: bytes | memoryview) -> None:
    """Refuse a frame to the scheduler that is longer than messages of its type are, before anything is made of it."""
    if len(frame) <= _SMALL_FRAME:
        return
    # An array of up to 15 elements has one byte before them, a longer one has three. A tag is a short string.
    start = 1 if frame[0] & 0xF0 == 0x90 else 3
    tag = bytes(frame[start + 1 : start + 1 + (frame[start] & 0x1F)])
    if len(frame) > _MOST_BYTES.get(tag, _SMALL_FRAME):
        raise ProtocolError(f"a frame of {len(frame)} bytes is longer than messages of its type may be")


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes | memoryview) -> T:
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a message of this protocol ({len(frame)} bytes): {error}") from error


def pack_int32s(values: Iterable[int]) -> bytes:
    """Integers as little-endian int32 bytes.

    Raises:
        OverflowError: a value does not fit into 32 bits.
    """
    return array("i", values).tobytes()


def unpack_int32s(data: bytes) -> "array[int]":
    """The inverse of ``pack_int32s``.

    Raises:
        ProtocolError: the length is no multiple of 4.
    """
    return _unpack("i", data)


def pack_float32s(values: Iterable[float]) -> bytes:
    """Numbers as little-endian float32 bytes."""
    return array("f", values).tobytes()


def unpack_float32s(data: bytes) -> "array[float]":
    """The inverse of ``pack_float32s``.

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
    """What a tier is called, for people and metrics."""
    return TIER_NAMES[number] if 0 <= number < len(TIER_NAMES) else f"tier {number}"


def named_blocks(inventory: Inventory) -> dict[int, dict[BlockHash, int]]:
    """What an inventory offers: block ids by block hash, for each tier by its number.

    Raises:
        ProtocolError: hashes and blocks do not match, or a tier is named twice.
    """
    tiers = {held.tier: _by_hash(held) for held in inventory.tiers}
    if len(tiers) != len(inventory.tiers):
        raise ProtocolError("a tier is named twice")
    return tiers


def _by_hash(held: NamedBlocks) -> dict[BlockHash, int]:
    blocks, hashes = unpack_int32s(held.blocks), held.hashes
    if len(hashes) != HASH_BYTES * len(blocks):
        raise ProtocolError(f"{len(hashes)} bytes of hashes name {len(blocks)} blocks")
    return {
        BlockHash(hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]): block for index, block in enumerate(blocks)
    }
