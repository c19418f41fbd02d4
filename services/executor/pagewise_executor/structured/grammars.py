"""Compiled grammars, and the matchers that begin with them."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

_MOST_GRAMMARS = 128
_MOST_CHARACTERS = 4 * 1024 * 1024
"""Compiled grammars that are kept, and characters of their texts together."""
_STACK_BYTES = 64 * 1024 * 1024
"""The library compiles rules recursively, about 8 KiB for each level. Gateways refuse more than a thousand levels."""
_LIMITS = LLParserLimits(verbose_errors=False)


class Grammars:
    """Compiles grammars for one tokenizer, on a thread of its own, and computes the masks of matchers.

    Fields:
        num_words: int32 words of the mask of one matcher.
    """

    def __init__(self, tokenizer: LLTokenizer, num_threads: int) -> None:
        """``num_threads``: how many threads compute masks."""
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._characters = 0
        self._fill = LLExecutor(num_threads) if num_threads > 1 else None
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        default = threading.stack_size(_STACK_BYTES)
        try:
            self._compiler.submit(int).result()  # starts the thread
        finally:
            threading.stack_size(default)
        self.num_words = (tokenizer.vocab_size + 31) // 32

    def prepare(self, grammar: str) -> None:
        """Begin to compile a grammar, unless it is compiled: a prompt is computed meanwhile."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
            return
        self._compiled[grammar] = self._compiler.submit(
            LLMatcher, self._tokenizer, grammar, log_level=0, limits=_LIMITS
        )
        self._characters += len(grammar)
        while len(self._compiled) > _MOST_GRAMMARS or (self._characters > _MOST_CHARACTERS and len(self._compiled) > 1):
            dropped, _ = self._compiled.popitem(last=False)
            self._characters -= len(dropped)

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that has consumed nothing. It is in an error state if the grammar cannot be compiled."""
        self.prepare(grammar)
        return self._compiled[grammar].result().deep_copy()

    def masks(self, matchers: Sequence[LLMatcher]) -> npt.NDArray[np.int32]:
        """Return the tokens that each of these matchers allows next, as bits: int32 [n, num_words].

        A matcher that fails now is in an error state afterwards.
        """
        masks = np.zeros((len(matchers), self.num_words), np.int32)
        num_bytes = masks.itemsize * self.num_words
        if self._fill is not None and len(matchers) > 1:
            numbered = [(matcher, number) for number, matcher in enumerate(matchers)]
            self._fill.unsafe_compute_mask_ptr(numbered, masks.ctypes.data, num_bytes, len(matchers))
        else:
            for number, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(masks[number].ctypes.data, num_bytes)
        return masks

    def close(self) -> None:
        """Stop the thread."""
        self._compiler.shutdown(cancel_futures=True)
