"""Messages of the wire with any values their types allow, and frames that are nearly messages."""

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st
from pagewise_shared.protocol import Message, encode, pack_int32s

INTS = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([-(2**63), -(2**31), 63, 64, 2**16, 2**31 - 1, 2**31, 2**63 - 1, 2**64 - 1]),
    st.integers(-(2**63), 2**64 - 1),
)
FLOATS = st.one_of(
    st.floats(-4, 4), st.sampled_from([float("nan"), float("inf"), float("-inf"), -1e300, 1e300]), st.floats()
)
INT32S = st.lists(
    st.one_of(st.integers(-2, 9), st.sampled_from([64, 4095, 4096, -(2**31), 2**31 - 1])), max_size=9
).map(pack_int32s)
BYTES = st.one_of(INT32S, st.binary(max_size=9))
TEXTS = st.one_of(st.sampled_from(["", "raw", "a\nb", "x" * 5000]), st.text(max_size=8))

_LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: FLOATS,
    bool: st.booleans(),
    str: TEXTS,
    bytes: BYTES,
    type(None): st.none(),
}


def of(kind: Any, **given: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Values of a type; of a struct, ``given`` are the strategies of some of its fields."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _LEAVES:
        return _LEAVES[kind]
    if origin is Annotated:
        return of(arguments[0])
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, types.UnionType):
        return st.one_of([of(one) for one in arguments])
    if origin is tuple and arguments[-1] is ...:
        return st.lists(of(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(of, arguments))
    if origin is dict:
        return st.dictionaries(of(arguments[0]), of(arguments[1]), max_size=3)
    hints = get_type_hints(kind)
    return st.builds(kind, **({name: of(hints[name]) for name in kind.__struct_fields__} | given))


def frames(direction: Any) -> st.SearchStrategy[bytes]:
    """Frames that a stranger may send to the side that decodes ``direction``: none of them, or one with any values."""
    messages = st.one_of([of(kind) for kind in get_args(direction)])
    whole = messages.filter(_fits).map(encode)
    return st.one_of(whole, _damaged(whole), st.binary(max_size=60), _wrong_types(messages), st.sampled_from(LENGTHS))


def _fits(message: Message) -> bool:
    try:
        encode(message)
    except (OverflowError, UnicodeEncodeError):  # a message that msgpack cannot encode is never sent
        return False
    return True


@st.composite
def _damaged(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    frame = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))])


@st.composite
def _wrong_types(draw: st.DrawFn, messages: st.SearchStrategy[Message]) -> bytes:
    fields = list(msgspec.to_builtins(draw(messages), builtin_types=(bytes,)))
    anything = st.recursive(
        st.one_of(INTS, FLOATS, TEXTS, BYTES, st.none()), lambda inner: st.lists(inner, max_size=3), max_leaves=6
    )
    fields[draw(st.integers(0, len(fields) - 1))] = draw(anything)
    return msgspec.msgpack.encode(fields)


def _head(tag: bytes, size: int) -> bytes:
    return bytes([0x90 + size, 0xA0 + len(tag)]) + tag


LENGTHS = [
    head + length
    for head in (
        b"",
        _head(b"heartbeat", 4) + b"\x01\x00",
        _head(b"stepresult", 5) + b"\x01\x01\xc4\x00",
        _head(b"hello", 16) + b"\x01\x00",
        _head(b"stepplan", 4) + b"\x01\x01",
        _head(b"submit", 5) + b"\x01\x01\xa0",
        _head(b"outputs", 5) + b"\x01\x90\x90",
    )
    for length in (
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\x91" * 50_000,
        b"\x81\x01" * 50_000,
    )
]
"""Frames that claim impossible lengths, or nest without an end."""
