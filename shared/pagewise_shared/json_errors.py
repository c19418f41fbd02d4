"""Error texts for invalid JSON that name the cause."""

import re

import msgspec

_BYTE = re.compile(r"\(byte (\d+)\)$")
_HALF_PAIR = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB]..\\u[dD][c-fC-F]..)*+"
    rb"(\\u[dD][89a-fA-F][0-9a-fA-F]{2})(?!(?:\\.{0,4})?\Z)",
    re.DOTALL,
)
"""The first escape of half of a surrogate pair. At the very end of a text the other half may have been cut off."""


def why_not_json(text: bytes | bytearray, error: msgspec.MsgspecError) -> str:
    """Return why the decoder refuses a text, as "it ...". For half of a surrogate pair, for example, msgspec reports
    only that the input was truncated."""
    if not text.strip():
        return "it is empty"
    if (half := _HALF_PAIR.match(text)) is not None:
        return (
            f"it contains half of a surrogate pair, {half[1].decode()} (byte {half.start(1)}), which is not a "
            "character: the text was probably cut in the middle of one"
        )
    reason = str(error).replace(" - at `$[...]`", "").removeprefix("JSON is malformed: ")
    if isinstance(error, msgspec.ValidationError):
        return f"it contains a number that cannot be represented: {reason}"
    found = _BYTE.search(reason)
    byte = bytes(text[int(found[1]) : int(found[1]) + 1]) if found else b""
    hint = ""
    if byte in (b"N", b"I"):
        hint = " (JSON has no NaN and no Infinity)"
    elif byte and byte < b" ":
        hint = " (a control character in a string has to be escaped)"
    return f"it is not valid JSON: {reason}{hint}"
