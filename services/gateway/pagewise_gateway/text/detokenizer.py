"""Incremental detokenizing: the text of one sequence while its tokens arrive."""

import codecs
from collections.abc import Callable, Sequence

from pagewise_gateway.text.stop_matcher import StopMatcher, StopStrings
from pagewise_gateway.text.tokenizer import TokenBytes, Tokenizer

_CONTEXT_TOKENS = 6
"""How many of the prompt's last tokens are taken into account when output tokens are decoded."""

_MAX_UNDECIDED_TOKENS = 16
"""After so many tokens without complete text, the text is emitted as it is, so that work per token is bounded."""

_LONGEST_CHARACTER = 4
"""Bytes of the longest character, and so at most as many tokens."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns one sequence's output tokens into text that is never taken back.

    The returned pieces together are the text that the output tokens add when prompt and output are decoded at once.
    Characters whose bytes are incomplete are held back, and so is text that may become a stop string. A character
    that the prompt's last token leaves incomplete belongs to the output.

    ``stop``: the stop strings, if there are any. ``stopped_by``: the one that was found; no text is returned after it.
    ``min_tokens``: the text of that many first tokens is not searched for stop strings. ``shown``: special tokens that
    are not skipped.
    """

    __slots__ = ("_decoder", "_stopping", "push_one")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        stop: StopStrings | None = None,
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        decoder: _ByteDecoder | _WindowDecoder
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        if shown:
            skipped -= shown
        if tokenizer.token_bytes is not None:
            decoder = _ByteDecoder(tokenizer.token_bytes, prompt_token_ids, skipped)
        else:
            decoder = _WindowDecoder(tokenizer, prompt_token_ids, skipped)
        self._stopping = _StoppingDecoder(decoder, StopMatcher(stop), min_tokens) if stop else None
        self._decoder = self._stopping or decoder
        # Called for every token that is served, so there is no layer between. It must not be a method of this object
        # either, which would then hold itself and stay until the next garbage collection.
        self.push_one: Callable[[int], str] = self._decoder.push_one
        """Take the next token; return the text that is final now."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if one did."""
        return None if self._stopping is None else self._stopping.matcher.matched

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that is final now."""
        return self._decoder.push(token_ids)

    def finish(self) -> str:
        """Return the text that was held back, with an incomplete character as U+FFFD. No more tokens come."""
        return self._decoder.finish()


class _StoppingDecoder:
    """Decodes as another decoder does, up to a stop string. The first ``unchecked`` tokens are not searched for one."""

    __slots__ = ("_decoder", "_unchecked", "matcher")

    def __init__(self, decoder: "_ByteDecoder | _WindowDecoder", matcher: StopMatcher, unchecked: int) -> None:
        self._decoder, self.matcher, self._unchecked = decoder, matcher, unchecked

    def push(self, token_ids: Sequence[int]) -> str:
        text = ""
        if self._unchecked:
            unchecked, token_ids = token_ids[: self._unchecked], token_ids[self._unchecked :]
            self._unchecked -= len(unchecked)
            text = self._decoder.push(unchecked)
            if not token_ids:
                return text
        fresh = self._decoder.push(token_ids)
        if fresh:
            fresh = self.matcher.push(fresh)
        return text + fresh if text else fresh

    def push_one(self, token_id: int) -> str:
        return self.push((token_id,))

    def finish(self) -> str:
        return self.matcher.push(self._decoder.finish()) + self.matcher.finish()


class _ByteDecoder:
    """Decodes vocabularies in which every token has fixed bytes. The result is exact; each token is decoded once."""

    __slots__ = ("_open", "_skipped", "_strip_space", "_texts", "_token_bytes", "_utf8")

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip_space = token_bytes.strips_first_space and all(token in self._skipped for token in prompt_token_ids)
        self._utf8 = _UTF8("replace")
        context = self._bytes(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._utf8.decode(context)  # keeps the bytes of an incomplete last character
        self._texts = token_bytes.texts
        self._open = self._is_open()

    def push(self, token_ids: Sequence[int]) -> str:
        data = self._bytes(token_ids)
        if not data:
            return ""
        text = self._utf8.decode(data)
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        self._open = self._is_open()
        return text

    def push_one(self, token_id: int) -> str:
        if not self._open and (text := self._texts.get(token_id)) is not None and token_id not in self._skipped:
            return text
        return self.push((token_id,))

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def _is_open(self) -> bool:
        """Whether the text of the next token depends on the tokens before it."""
        return self._strip_space or bool(self._utf8.getstate()[0])

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        skipped, table = self._skipped, self._token_bytes
        if len(token_ids) == 1:
            token_id = token_ids[0]
            return b"" if token_id in skipped else table[token_id]
        return b"".join([table[token_id] for token_id in token_ids if token_id not in skipped])


class _WindowDecoder:
    """Decodes any vocabulary, by decoding a small window of tokens again with each new one.

    The window is ``_ids``; the text of its first ``_read`` tokens, ``_prefix_text``, has been returned already. As in
    Hugging Face's text-generation-inference (``decode_token``), text that ends in U+FFFD counts as incomplete. If
    there has been only such text for long, because every push ended within a character, the text before the tokens of
    that character is returned.
    """

    __slots__ = ("_ids", "_prefix_text", "_read", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        self._ids += token_ids
        if len(self._ids) == self._read:
            return ""
        window = self._decode(self._ids)
        if not window.endswith("\ufffd"):
            return self._take(window)
        if len(self._ids) - self._read <= _MAX_UNDECIDED_TOKENS:
            return ""
        for end in range(len(self._ids) - 1, max(self._read, len(self._ids) - _LONGEST_CHARACTER), -1):
            complete = self._decode(self._ids[:end])
            if not complete.endswith("\ufffd"):
                return self._take(complete, end)
        return self._take(window)

    def push_one(self, token_id: int) -> str:
        return self.push((token_id,))

    def finish(self) -> str:
        return self._take(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _take(self, window: str, end: int | None = None) -> str:
        """Return the new part of ``window``, the text of the first ``end`` tokens (None: of all)."""
        open_tokens = 0 if end is None else len(self._ids) - end
        fresh = window[len(self._prefix_text) :]
        if fresh:  # tokens without text (special ones) stay in the window, as long as it is short
            self._ids = self._ids[self._read :]
        elif len(self._ids) > _CONTEXT_TOKENS + _MAX_UNDECIDED_TOKENS:
            self._ids = self._ids[-_CONTEXT_TOKENS - open_tokens :]
        self._read = len(self._ids) - open_tokens
        self._prefix_text = self._decode(self._ids[: self._read])
        return fresh

    def _decode(self, token_ids: list[int]) -> str:
        skipped = self._skipped
        shown = [token_id for token_id in token_ids if token_id not in skipped] if skipped else token_ids
        return self._tokenizer.decode(shown, skip_special_tokens=False)
