"""The wire: round trips, garbage, and messages of older and newer minor versions."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_shared import protocol
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    Heartbeat,
    Hello,
    Inventory,
    NamedBlocks,
    NewSequence,
    StepPlan,
    StepResult,
    TierInfo,
    TokenLogprobs,
    Welcome,
    decode_from_executor,
    decode_from_scheduler,
    encode,
    named_blocks,
    pack_float32s,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import SamplingParams, TokenConstraints

PLAN = StepPlan(
    epoch=3,
    step=9,
    left=(1, 2),
    joined=(
        NewSequence(
            row=1,
            tokens=pack_int32s([5, 6, 7]),
            num_prompt_tokens=2,
            num_computed_tokens=0,
            blocks=pack_int32s([8]),
            sampling=SamplingParams(temperature=0.5, seed=2**64 - 1, logprobs=0),
            constraints=0,
        ),
    ),
    tables=pack_int32s([1, 2, 4]),
    chunks=((1, 3),),
    constraints=(
        TokenConstraints(
            allowed=b"\x0b",
            biased=pack_int32s([3]),
            biases=b"\0\0\x80\x3f",
            bad_words=(pack_int32s([1, 2]), pack_int32s([3])),
        ),
    ),
)
RESULT = StepResult(
    epoch=3,
    step=9,
    tokens=pack_int32s([1]),
    logprobs=(TokenLogprobs(0, 1, -0.5, 1, pack_int32s([1]), pack_float32s([-0.5])),),
)


def test_round_trips() -> None:
    assert decode_from_scheduler(encode(PLAN)) == PLAN
    assert decode_from_executor(encode(RESULT)) == RESULT


def test_a_plan_without_changes_is_a_few_bytes() -> None:
    assert len(encode(StepPlan(epoch=2**40, step=100_000))) < 40


def test_each_side_refuses_the_other_sides_messages() -> None:
    with pytest.raises(ProtocolError):
        decode_from_executor(encode(PLAN))
    with pytest.raises(ProtocolError):
        decode_from_scheduler(encode(RESULT))


@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_and_nothing_else(frame: bytes) -> None:
    for decode in (decode_from_executor, decode_from_scheduler):
        try:
            decode(frame)
        except ProtocolError:
            continue


@given(st.data())
def test_damaged_messages_are_protocol_errors_or_messages(data: st.DataObject) -> None:
    frame = bytearray(encode(PLAN))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_from_scheduler(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    except ProtocolError:
        return


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        decode_from_executor(b"\x91" * 100_000)


def test_older_and_newer_minor_versions_are_understood() -> None:
    older = msgspec.msgpack.encode(["welcome", 7, 4, 64])
    assert decode_from_scheduler(older) == Welcome(7, 4, 64)
    fields = msgspec.msgpack.decode(encode(Welcome(7, 4, 64, 500)))
    assert decode_from_scheduler(msgspec.msgpack.encode([*fields, "a field of the future", 1])) == Welcome(
        7, 4, 64, 500
    )
    assert decode_from_executor(msgspec.msgpack.encode(["heartbeat", 7])) == Heartbeat(7, refused=0)
    assert decode_from_executor(encode(Heartbeat(7, 3))) == Heartbeat(7, 3)


def test_every_message_belongs_to_exactly_one_direction() -> None:
    directions = (protocol.FromExecutor, protocol.FromScheduler)
    members = [kind for direction in directions for kind in direction.__args__]
    assert len(members) == len(set(members))
    assert Hello in members


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_int32s(values: list[int]) -> None:
    assert unpack_int32s(pack_int32s(values)).tolist() == values


def test_an_inventory_names_the_blocks_of_each_tier() -> None:
    one, other = (BlockHash(bytes([number] * 32)) for number in (1, 2))
    held = NamedBlocks(HOST, pack_int32s([7, 3]), one + other)
    inventory = Inventory((NamedBlocks(DEVICE, pack_int32s([5]), other), held))
    assert named_blocks(inventory) == {DEVICE: {other: 5}, HOST: {one: 7, other: 3}}
    windows = Inventory((*inventory.tiers, NamedBlocks(DEVICE, pack_int32s([5]), one, 2)))
    assert named_blocks(windows) == named_blocks(inventory)
    assert named_blocks(windows, 2) == {DEVICE: {one: 5}}
    hello = Hello(2, 0, "e", "f", 1, 1, 1, 1, tiers=(TierInfo(HOST, 8, 1.5),), inventory=inventory)
    assert decode_from_executor(encode(hello)) == hello
    for bad in (
        (held, held),
        (NamedBlocks(HOST, pack_int32s([7, 3]), one),),
        (NamedBlocks(HOST, pack_int32s([7]), one + other),),
        (NamedBlocks(HOST, b"abc", b""),),
    ):
        with pytest.raises(ProtocolError):
            named_blocks(Inventory(bad))


def test_int32s_that_are_none() -> None:
    with pytest.raises(OverflowError):
        pack_int32s([2**31])
    with pytest.raises(ProtocolError, match="whole number"):
        unpack_int32s(b"abc")
