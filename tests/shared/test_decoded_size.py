"""Decoded frames to the scheduler are bounded: in the worst case of each message type, by its greatest frame."""

import gc
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import decode_from_executor, decode_from_gateway
from pagewise_shared.protocol.codec import _MOST_BYTES, _SMALL_FRAME
from pagewise_shared.protocol.limits import MAX_DECODED_BYTES, MAX_FRAME_TO_SCHEDULER

COUNT = 60_000
"""Elements of the lists: no list may have more than 65,536 of most kinds."""

MANY = b"\xdd" + COUNT.to_bytes(4, "big")
WIDE = "🦊".encode()
"""A character that makes the others of its text take four bytes each."""


def text(length: int) -> bytes:
    return b"\xdb" + (length + len(WIDE)).to_bytes(4, "big") + b"a" * length + WIDE


def frame(tag: str, fields: int, content: bytes) -> bytes:
    size = fields + 1
    head = bytes([0x90 + size]) if size < 16 else b"\xdc" + size.to_bytes(2, "big")
    return head + bytes([0xA0 + len(tag)]) + tag.encode() + content


RESULT = b"\x01\x01\xc4\x00"
HELLO = b"\x03\x00\xa0\xa0" + b"\x01" * 4
PARAMS = b"\x91\x90"
METRICS = b"\x01\x91\x94\xa0\xa0\xa0"
WORST: list[tuple[str, Callable[[bytes], Any], bytes]] = [
    ("stepresult", decode_from_executor, frame("stepresult", 4, RESULT + MANY + b"\x94\x00\x00\x00\x00" * COUNT)),
    (
        "stepresult",
        decode_from_executor,
        frame("stepresult", 4, RESULT + MANY + (b"\x96" + bytes(4) + b"\xc4\x02ab\xc4\x02ab") * COUNT),
    ),
    ("stepresult", decode_from_executor, frame("stepresult", 5, RESULT + b"\x90" + MANY + b"\x92\x00\x90" * COUNT)),
    (
        "stepresult",
        decode_from_executor,
        frame("stepresult", 5, RESULT + b"\x90\x91\x92\x00" + MANY + b"\x94\x00\x00\x00\x00" * COUNT),
    ),
    ("goodbye", decode_from_executor, frame("goodbye", 2, b"\x01" + text(COUNT))),
    ("hello", decode_from_executor, frame("hello", 8, b"\x03\x00" + text(COUNT) + b"\xa0" + b"\x01" * 4)),
    ("submit", decode_from_gateway, frame("submit", 5, b"\x01\x01\xa0" + MANY + b"\x92\xc4\x00\x00" * COUNT + PARAMS)),
    (
        "submit",
        decode_from_gateway,
        frame("submit", 5, b"\x01\x01\xa0\x91\x93\xc4\x00\x00" + MANY + b"\x91\xc4\x00" * COUNT + PARAMS),
    ),
    ("submit", decode_from_gateway, frame("submit", 5, b"\x01\x01" + text(COUNT) + b"\x90" + PARAMS)),
    (
        "metricssnapshot",
        decode_from_gateway,
        frame("metricssnapshot", 2, b"\x01" + MANY + b"\x94\xa0\xa0\xa0\x90" * COUNT),
    ),
    ("metricssnapshot", decode_from_gateway, frame("metricssnapshot", 2, METRICS + MANY + b"\x93\xa0\x90\x00" * COUNT)),
    (
        "metricssnapshot",
        decode_from_gateway,
        frame("metricssnapshot", 2, METRICS + b"\x91\x93\xa0" + MANY + b"\x92\xa0\xa0" * COUNT + b"\x00"),
    ),
    ("query", decode_from_gateway, frame("query", 4, b"\x01\x01\xa6memory" + text(COUNT))),
]


@pytest.mark.parametrize(("tag", "decode", "worst"), WORST, ids=[f"{n} {one[0]}" for n, one in enumerate(WORST)])
def test_no_frame_becomes_more_than_is_stated(tag: str, decode: Callable[[bytes], Any], worst: bytes) -> None:
    gc.collect()
    tracemalloc.start()
    message = decode(worst)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert type(message).__name__.lower() == tag
    growth = peak / len(worst)
    print(f"{tag}: {growth:.1f}")
    assert growth * _MOST_BYTES.get(tag.encode(), _SMALL_FRAME) <= MAX_DECODED_BYTES, f"{growth:.1f} times its size"


@pytest.mark.parametrize(
    ("decode", "worst", "reason"),
    [
        (decode_from_gateway, frame("submit", 5, b"\x01\x01\xa0\xdd\x00\x01\x00\x01" + b"\x90" * 65_537), "length"),
        (decode_from_executor, frame("stepresult", 4, RESULT + b"\xdd\x00\x01\x00\x01" + b"\x90" * 65_537), "length"),
        (
            decode_from_executor,
            frame("hello", 14, HELLO + bytes(3) + b"\xa0\xa0\xdc\x00\x81" + bytes(129)),
            "length <= 128",
        ),
        (
            decode_from_executor,
            frame("heartbeat", 2, b"\x01" + bytes(_SMALL_FRAME)),
            "longer than messages of its type",
        ),
        (decode_from_gateway, frame("query", 4, bytes(_SMALL_FRAME)), "longer than messages of its type"),
        (decode_from_executor, frame("stepresult", 5, bytes(MAX_FRAME_TO_SCHEDULER // 2)), "longer than messages"),
        (decode_from_executor, bytes(_SMALL_FRAME + 1), "longer than messages"),
        (decode_from_executor, b"\xdc\x00\x10" + b"\xff" * _SMALL_FRAME, "longer than messages"),
    ],
)
def test_what_is_too_long_is_refused_before_anything_is_made_of_it(
    decode: Callable[[bytes], Any], worst: bytes, reason: str
) -> None:
    tracemalloc.start()
    with pytest.raises(ProtocolError, match=reason):
        decode(worst)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000
