"""The checksum of block content, wherever it is kept or sent."""

from typing import Any

import xxhash


def checksum(content: Any) -> int:
    """xxh3_64 of bytes, or of an array's."""
    return int(xxhash.xxh3_64_intdigest(content))
