"""The wire's decoders on frames of strangers: a message or a ProtocolError, at once and in little memory."""

import resource
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    Blocks,
    FromExecutor,
    FromGateway,
    FromScheduler,
    Message,
    ReadBlocks,
    ToGateway,
    decode_from_executor,
    decode_from_gateway,
    decode_from_peer,
    decode_from_scheduler,
    decode_to_gateway,
    encode,
)

from tests.fuzz.effort import examples
from tests.fuzz.messages import LENGTHS, frames

DIRECTIONS = (
    (decode_from_executor, FromExecutor),
    (decode_from_scheduler, FromScheduler),
    (decode_from_peer, ReadBlocks | Blocks),
    (decode_from_gateway, FromGateway),
    (decode_to_gateway, ToGateway),
)


def decoded(decode: Any, frame: bytes) -> Message | None:
    try:
        message: Message = decode(frame)
    except ProtocolError:
        return None
    return message


@examples(300)
@given(st.data(), st.sampled_from(DIRECTIONS))
def test_frames_are_messages_or_errors(data: st.DataObject, direction: tuple[Any, Any]) -> None:
    decode, kinds = direction
    frame = data.draw(frames(kinds))
    message = decoded(decode, frame)
    if message is not None:  # a decoded message can be encoded again, and means the same
        assert repr(decoded(decode, encode(message))) == repr(message)


@pytest.mark.parametrize("frame", LENGTHS, ids=range(len(LENGTHS)))
def test_lengths_that_are_claimed_cost_nothing(frame: bytes) -> None:
    began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for decode, _ in DIRECTIONS:
        assert decoded(decode, frame) is None
    assert time.perf_counter() - began < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB
