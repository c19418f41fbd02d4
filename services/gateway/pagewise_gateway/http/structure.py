"""Bounds what a body makes of memory and time when it is decoded.

The decoder holds the GIL, so it stops the event loop wherever it runs: what it does has to be bounded. Numbers and long
strings are decoded fast. Small arrays, objects and strings are not: 4 MiB of ``[],`` take a second.
"""

from pagewise_gateway.http.errors import InvalidRequestError

MAX_CONTAINERS = 16_384
"""Most arrays and objects of a body."""
MAX_STRINGS = 65_536
"""Most strings of a body, names of fields included."""
MAX_VALUES = 1_048_576
"""Most elements of all arrays and objects of a body, such as token ids."""
_ALWAYS_FAST = 32_768
"""Bodies of so many bytes are not looked at."""


def check_structure(body: bytearray) -> None:
    """Count the arrays, objects, strings and other values of a body that is going to be decoded.

    What is inside strings does not count: code is full of brackets. If the body is no JSON, the counts are right up to
    where the decoder stops.

    Raises:
        InvalidRequestError: there are too many of them.
    """
    if len(body) <= _ALWAYS_FAST:
        return
    few = body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") < MAX_VALUES
    if few and body.count(b'"') <= 2 * MAX_STRINGS:
        return
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # the quotes that are left begin and end strings
    strings = (bare.count(b'"') + 1) // 2
    if strings > MAX_STRINGS:
        raise InvalidRequestError(
            f"the body contains {strings} strings (names of fields included), the limit is {MAX_STRINGS}"
        )
    outside = b"".join(bare.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > MAX_CONTAINERS:
        raise InvalidRequestError(f"the body contains {containers} arrays and objects, the limit is {MAX_CONTAINERS}")
    if (values := outside.count(b",") + 1) > MAX_VALUES:
        raise InvalidRequestError(f"the body contains {values} values, the limit is {MAX_VALUES}")
