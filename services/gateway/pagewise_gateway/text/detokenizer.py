"""Incremental detokenization: the text of one sequence while its tokens arrive, up to a stop string."""

import codecs
from collections.abc import Callable, Sequence
from functools import cached_property

from pagewise_gateway.text.tokenizer import TokenBytes, Tokenizer

_CONTEXT_TOKENS = 6
"""The last tokens of the prompt that are decoded with the output tokens."""

_MAX_UNDECIDED_TOKENS = 16
"""After so many tokens without complete text, incomplete text is returned, so that work per token is bounded."""

_UTF8 = codecs.getincrementaldecoder("utf-8")


class StopStrings:
    """The stop strings of a request, and the tables of the search, which all outputs of the request share.

    The tables are built when a text first contains the first character of a stop string: never for a request that is
    refused. ``include``: whether the stop string stays in the text.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self.stops = stops
        self.include = include
        self.by_first_character: dict[str, list[int]] = {}
        for number, stop in enumerate(stops):
            self.by_first_character.setdefault(stop[0], []).append(number)

    @cached_property
    def failures(self) -> list[list[int]]:
        """The failure function of each stop string (Knuth, Morris and Pratt, 1977)."""
        return [_failure_function(stop) for stop in self.stops]


class StopMatcher:
    """Finds stop strings in text that arrives in pieces, and returns the text before.

    The match that ends first wins, and the longest one among matches with the same end. So the result does not depend
    on the pieces. Text that may be the beginning of a stop string is held back. Work per character is constant on
    average, for stop strings of any length.

    ``matched``: the stop string that was found; no text is returned after it.
    """

    __slots__ = ("_held", "_states", "_strings", "matched")

    def __init__(self, strings: StopStrings) -> None:
        self.matched: str | None = None
        self._strings = strings
        # By the number of a stop string: how many of its characters the text ends with, if any.
        self._states: dict[int, int] = {}
        self._held = ""

    def push(self, text: str) -> str:
        """Take text; return the text that is final. With ``include``, the returned text ends with the stop string."""
        if self.matched is not None:
            return ""
        if not self._held and self._strings.by_first_character.keys().isdisjoint(text):
            return text
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            stop = self._advance(buffer[position])
            if stop is not None:
                self.matched = stop
                self._held = ""
                self._states.clear()
                end = position + 1
                return buffer[: end if self._strings.include else end - len(stop)]
        held = max(self._states.values(), default=0)
        final, self._held = buffer[: len(buffer) - held], buffer[len(buffer) - held :]
        return final

    def finish(self) -> str:
        """Return the text that was held back. No more text comes."""
        held, self._held = self._held, ""
        self._states.clear()
        return held

    def _advance(self, character: str) -> str | None:
        begun, begins = self._states, self._strings.by_first_character.get(character, ())
        if not (begun or begins):
            return None
        complete = ""
        stops, failures = self._strings.stops, self._strings.failures
        self._states = states = {}
        for i in {*begun, *begins}:
            stop, failure = stops[i], failures[i]
            state = begun.get(i, 0)
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                complete = max(complete, stop, key=len)
                state = failure[state - 1]
            if state:
                states[i] = state
        return complete or None


def _failure_function(stop: str) -> list[int]:
    """Return, for each prefix of ``stop``, the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = failure[length - 1]
        if stop[i] == stop[length]:
            length += 1
        failure[i] = length
    return failure


class IncrementalDetokenizer:
    """Turns one sequence's output tokens into text that is never taken back.

    The returned pieces together are the text that the output tokens add when prompt and output are decoded at once.
    Characters whose bytes are incomplete are held back, and so is text that may become a stop string. A character
    that the prompt's last token leaves incomplete belongs to the output.

    ``stop``: the stop strings, if there are any. ``min_tokens``: the text of so many first tokens is not searched for
    stop strings. ``shown``: special tokens that are not skipped.
    """

    __slots__ = ("_decoder", "_stopping", "push")

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
        # This is called for every token, so there is no layer between. A method of this object would make a reference
        # cycle, which keeps the object until the next garbage collection.
        self.push: Callable[[int], str] = self._decoder.push
        """Take the next token; return the text that is final now."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was found; no text is returned after it."""
        return None if self._stopping is None else self._stopping.matcher.matched

    def finish(self) -> str:
        """Return the text that was held back, with an incomplete character as U+FFFD. No more tokens come."""
        return self._decoder.finish()


class _StoppingDecoder:
    """Wraps a decoder, whose text ends with a stop string. The first ``unchecked`` tokens are not searched for one."""

    __slots__ = ("_decoder", "_unchecked", "matcher")

    def __init__(self, decoder: "_ByteDecoder | _WindowDecoder", matcher: StopMatcher, unchecked: int) -> None:
        self._decoder, self.matcher, self._unchecked = decoder, matcher, unchecked

    def push(self, token_id: int) -> str:
        text = self._decoder.push(token_id)
        if self._unchecked:
            self._unchecked -= 1
            return text
        return self.matcher.push(text) if text else ""

    def finish(self) -> str:
        return self.matcher.push(self._decoder.finish()) + self.matcher.finish()


class _ByteDecoder:
    """Decodes vocabularies in which every token has fixed bytes, exactly, and each token once."""

    __slots__ = ("_open", "_skipped", "_strip_space", "_texts", "_token_bytes", "_utf8")

    def __init__(self, token_bytes: TokenBytes, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._strip_space = token_bytes.strips_first_space and all(token in skipped for token in prompt_token_ids)
        self._utf8 = _UTF8("replace")
        for token_id in prompt_token_ids[-_CONTEXT_TOKENS:]:  # keeps the bytes of an incomplete last character
            self._utf8.decode(b"" if token_id in skipped else token_bytes[token_id])
        self._texts = token_bytes.texts
        self._open = self._is_open()

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._open and (text := self._texts.get(token_id)) is not None:
            return text
        text = self._utf8.decode(self._token_bytes[token_id])
        if self._strip_space and text:
            self._strip_space = False
            text = text.removeprefix(" ")
        self._open = self._is_open()
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", True)

    def _is_open(self) -> bool:
        # Whether the text of the next token depends on the tokens before it.
        return self._strip_space or bool(self._utf8.getstate()[0])


class _WindowDecoder:
    """Decodes any vocabulary, by decoding a small window of tokens again with each new one.

    The window is ``_ids``; the text of its first ``_read`` tokens, ``_prefix_text``, has been returned already. As in
    Hugging Face's text-generation-inference (``decode_token``), text that ends in U+FFFD counts as incomplete.
    """

    __slots__ = ("_ids", "_prefix_text", "_read", "_skipped", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        window = self._decode(self._ids)
        if window.endswith("\ufffd") and len(self._ids) - self._read <= _MAX_UNDECIDED_TOKENS:
            return ""
        return self._take(window)

    def finish(self) -> str:
        return self._take(self._decode(self._ids)) if len(self._ids) > self._read else ""

    def _take(self, window: str) -> str:
        fresh = window[len(self._prefix_text) :]
        if fresh:  # tokens without text (special ones) stay in the window, as long as it is short
            self._ids = self._ids[self._read :]
        elif len(self._ids) > _CONTEXT_TOKENS + _MAX_UNDECIDED_TOKENS:
            self._ids = self._ids[-_CONTEXT_TOKENS:]
        self._read = len(self._ids)
        self._prefix_text = self._decode(self._ids)
        return fresh

    def _decode(self, token_ids: list[int]) -> str:
        skipped = self._skipped
        shown = [token_id for token_id in token_ids if token_id not in skipped] if skipped else token_ids
        return self._tokenizer.decode(shown, skip_special_tokens=False)
