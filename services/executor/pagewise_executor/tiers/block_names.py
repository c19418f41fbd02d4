"""The names of blocks in tiers that outlive executors, and the header that is stored with a block there."""

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote, unquote

import xxhash
from pagewise_shared.block_hash import HASH_BYTES, BlockHash, BlockName, block_hash

from pagewise_executor.tiers.tier import Rows

_HEADER = struct.Struct(f"<8sQQ{HASH_BYTES}s{HASH_BYTES}s")
_MAGIC = b"pagewis1"
HEADER_BYTES = _HEADER.size

_LOOKED_AT = 32


def content_name(fingerprint: str, digest: str) -> str:
    """Return the name of a model and a block format, for a file's name or a key."""
    return f"{quote(fingerprint, safe='')}.{digest}"


def fingerprint_of(content: str) -> str:
    """Return the model's fingerprint from a ``content_name``."""
    return unquote(content.rpartition(".")[0])


def short_hash(hash_of_block: BlockHash) -> str:
    """Return the first 16 hexadecimal digits of a hash, which identify a block where there is little room."""
    return hash_of_block.hex()[:16]


def descendants(parents: Mapping[str, str], root: str) -> list[str]:
    """Return all blocks below ``root``. ``parents``: the parent of each block; all by their short hashes."""
    children: dict[str, list[str]] = {}
    for own, parent in parents.items():
        children.setdefault(parent, []).append(own)
    found = list(children.pop(root, ()))
    for own in found:  # it grows
        found += children.pop(own, ())
    return found


def chain(root: BlockHash, tokens: bytes, block_size: int) -> list[BlockName]:
    """Return the names of the full blocks of ``tokens`` (int32 bytes)."""
    names: list[BlockName] = []
    parent, size = root, 4 * block_size
    for start in range(0, len(tokens) - size + 1, size):
        names.append(BlockName(block_hash(parent, tokens[start : start + size]), parent))
        parent = names[-1].hash
    return names


def num_leading(names: Sequence[BlockName], contains: Callable[[Sequence[BlockName]], list[bool]]) -> int:
    """Return how many of a prefix's first blocks a tier contains.

    A tier evicts the end of a prefix before its beginning. So this looks for the end by bisection, several blocks at
    a time: four rounds of at most 32 blocks for a prefix of a million. If the middle of a prefix is missing all the
    same, the answer may be too small or too great; blocks that a later load does not find are computed.
    """
    begin, end = 0, len(names)  # blocks before ``begin`` are there, blocks from ``end`` on are not
    while begin < end:
        step = -(-(end - begin) // _LOOKED_AT)
        indices = [*range(begin + step - 1, end - 1, step), end - 1]
        there = contains([names[index] for index in indices])
        if all(there):
            return end
        first_missing = there.index(False)
        end = indices[first_missing]
        begin = indices[first_missing - 1] + 1 if first_missing else begin
    return begin


def checksum(content: Any) -> int:
    """Return the xxh3_64 of a buffer of bytes."""
    return int(xxhash.xxh3_64_intdigest(content))


def header(name: BlockName, row: Rows) -> bytes:
    """Return the header that is stored before the content of a block."""
    return _HEADER.pack(_MAGIC, len(row), checksum(row), name.hash, name.parent)


def stored_bytes(stored: bytes) -> int:
    """Return how many bytes of content follow a header, as it says."""
    return int(_HEADER.unpack(stored)[1])


def is_sound(stored: bytes, name: BlockName, row: Rows) -> bool:
    """Whether this header was stored with this content under this name."""
    return stored == header(name, row)
