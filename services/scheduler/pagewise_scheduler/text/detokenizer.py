"""Tokens to text as they come: whole characters only, and no text that a stop string may still take back."""

from collections.abc import Sequence

from pagewise_scheduler.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 6
"""Prompt tokens that are decoded along: what a token reads as can depend on those before it (leading spaces)."""

_INCOMPLETE = "\ufffd"
_MOST_PENDING = 8
"""Tokens that may wait for the rest of a character; more of them are no character but invalid bytes."""


class IncrementalDetokenizer:
    """Text of one sequence. The concatenation of everything returned is the sequence's text, stop string cut off.

    Work per token is bounded: a short window of tokens is decoded twice, with and without the new ones, and the
    difference is new text. Source: the prefix and read offsets of Hugging Face's text-generation-inference.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = list(prompt_token_ids[-_CONTEXT_TOKENS:])
        self._read = len(self._window)
        self._read_text = self._decode(self._window)
        self._stop = stop
        self._include_stop = include_stop_str_in_output
        self._held = ""
        self._ended = False

    def push(self, token_ids: list[int]) -> str:
        """Take new tokens; returns the text that has become final. After a stop string nothing more comes."""
        final = ""
        for token in token_ids:
            if self._ended:
                break
            self._window.append(token)
            final += self._filter(self._new_text(flush=False))
        return final

    def finish(self) -> str:
        """The sequence has ended: the text that was held back."""
        if self._ended:
            return ""
        final = self._filter(self._new_text(flush=True))
        if self.stopped_by is None:
            final += self._held
        self._held, self._ended = "", True
        return final

    def _new_text(self, flush: bool) -> str:
        text = self._decode(self._window)
        pending = len(self._window) - self._read
        if pending == 0:
            return ""
        if text.endswith(_INCOMPLETE) and not flush and pending < _MOST_PENDING:
            return ""
        fresh = text[len(self._read_text) :]
        # The tokens just read become the context of the next.
        self._window = self._window[-max(_CONTEXT_TOKENS, pending) :]
        self._read = len(self._window)
        self._read_text = self._decode(self._window)
        return fresh

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _filter(self, fresh: str) -> str:
        """Hold back what may become a stop string; cut at the first one that is complete."""
        if not self._stop:
            return fresh
        text = self._held + fresh
        found = min(((at, s) for s in self._stop if (at := text.find(s)) >= 0), default=None)
        if found is not None:
            at, self.stopped_by = found
            self._held, self._ended = "", True
            return text[: at + len(self.stopped_by)] if self._include_stop else text[:at]
        keep = max(_overlap(text, s) for s in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
