"""The bytes behind each token, for vocabularies in which a token always stands for the same bytes.

That holds for byte-level BPE (GPT-2, Llama 3, Qwen) and for SentencePiece-style BPE with byte fallback (Llama 2,
Mistral, Gemma, Phi-3): nearly every model. Text can then be decoded exactly, token by token, without ever decoding
a token twice. WordPiece and other decoders that look at neighbouring tokens have no such table.
"""

import contextlib
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al., 2019, ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(256 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(printable)))}
    return alphabet


_ALPHABET = _byte_level_alphabet()


class TokenBytes:
    """Maps token ids to bytes, lazily.

    ``strips_first_space``: whether the decoder drops one space at the very beginning of a text. ``texts``: the texts of
    those tokens, among the ones looked up so far, that consist of whole characters.
    """

    def __init__(self, backend: tokenizers.Tokenizer, byte_level: bool, strips_first_space: bool) -> None:
        self.strips_first_space = strips_first_space
        self._backend = backend
        self._convert = _from_byte_level if byte_level else _from_sentencepiece
        self._known: dict[int, bytes] = {}
        self.texts: dict[int, str] = {}

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> "TokenBytes | None":
        """Return the table for a tokenizer with this ``decoder`` (as in tokenizer.json), or None if it has none."""
        decoder = decoder or {}
        parts: list[dict[str, Any]] = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
        kinds = [part.get("type") for part in parts]
        if set(kinds) - {"Fuse"} == {"ByteLevel"}:
            return cls(backend, byte_level=True, strips_first_space=False)
        if kinds[:3] != ["Replace", "ByteFallback", "Fuse"] or kinds[3:] not in ([], ["Strip"]):
            return None
        if parts[0].get("pattern") != {"String": "▁"} or parts[0].get("content") != " ":
            return None
        strip = parts[3] if kinds[3:] else None
        if strip is not None and (strip.get("content"), strip.get("start"), strip.get("stop")) != (" ", 1, 0):
            return None
        return cls(backend, byte_level=False, strips_first_space=strip is not None)

    def __getitem__(self, token_id: int) -> bytes:
        """Return the token's bytes, which are empty for an id that the tokenizer does not know."""
        known = self._known.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id)
            known = self._known[token_id] = b"" if token is None else self._convert(token)
            with contextlib.suppress(UnicodeDecodeError):
                self.texts[token_id] = known.decode()
        return known


def _from_byte_level(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[character] for character in token])
    except KeyError:  # an added token: it stands for itself
        return token.encode()


def _from_sentencepiece(token: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
