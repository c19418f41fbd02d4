"""Replaces the tokens of blocks by their text, where operators may see it."""

from typing import Any

import msgspec

from pagewise_gateway.text.tokenizer import Tokenizer

_LONGEST_TEXT = 400
"""Characters of the text of one block or prefix."""

_KEY = "the console"
"""Whose turn it is when text is made: none of an API key."""


async def with_text(tokenizer: Tokenizer, body: bytes) -> bytes:
    """Return JSON in which each object with ``token_ids`` has their ``text`` instead."""
    return await tokenizer.off_loop(lambda: msgspec.json.encode(_replaced(tokenizer, msgspec.json.decode(body))), _KEY)


def _replaced(tokenizer: Tokenizer, value: Any) -> Any:
    if isinstance(value, list):
        return [_replaced(tokenizer, one) for one in value]
    if not isinstance(value, dict):
        return value
    shown = {name: _replaced(tokenizer, one) for name, one in value.items() if name != "token_ids"}
    if "token_ids" in value:
        shown["text"] = tokenizer.decode(value["token_ids"], skip_special_tokens=False)[:_LONGEST_TEXT]
    return shown
