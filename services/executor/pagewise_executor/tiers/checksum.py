"""The checksum that goes with the content of blocks in the host tier and on the wire."""

from typing import Any

import xxhash


def checksum(content: Any) -> int:
    """Return the xxh3_64 of a buffer of bytes."""
    return int(xxhash.xxh3_64_intdigest(content))
