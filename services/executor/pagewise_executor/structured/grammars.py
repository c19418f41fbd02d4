"""Compiled grammars, and the matchers that begin with them."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from pagewise_shared.protocol.limits import MAX_COMPILED_CHARACTERS

log = logging.getLogger(__name__)

_STACK_BYTES = 64 * 1024 * 1024
"""The library compiles rules recursively, about 8 KiB for each level. Gateways refuse more than a thousand levels."""
_MAX_ITEMS_IN_ROW = 2000
SCHEMA_LIMITS = LLParserLimits(
    verbose_errors=False, max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=6000, max_lexer_states=50_000
)
RULE_LIMITS = LLParserLimits(
    verbose_errors=False, max_items_in_row=_MAX_ITEMS_IN_ROW, step_max_items=3000, max_lexer_states=50_000
)
"""How much a matcher may look at for one mask, for which all rows of a step wait: a grammar that takes more fails, and
its request alone. With the library's own limits an ambiguous grammar takes up to a quarter of a second for a mask, with
these ones some 20 ms. An object with 480 properties that may be there needs 6,000 items. Rules may be more ambiguous
than schemas, and get half of that. A state of a lexeme takes 1 to 2 KiB."""


class Grammars:
    """Compiles grammars for one tokenizer, on threads of its own, and computes the masks of matchers.

    Fields:
        num_words: int32 words of the mask of one matcher. most: grammars that are kept compiled, those that were used
            last. num_waits: how often a matcher was wanted of one that was not compiled yet.
    """

    def __init__(self, tokenizer: LLTokenizer, num_threads: int, most: int = 512, num_compilers: int = 1) -> None:
        """``num_threads``: how many threads compute masks. ``num_compilers``: how many compile grammars."""
        self.most, self.num_waits = most, 0
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._characters = 0
        self._fill = LLExecutor(num_threads) if num_threads > 1 else None
        self._compiler = ThreadPoolExecutor(num_compilers, thread_name_prefix="grammars")
        default = threading.stack_size(_STACK_BYTES)
        try:
            started = threading.Barrier(num_compilers + 1)
            for _ in range(num_compilers):
                self._compiler.submit(started.wait)
            started.wait()
        finally:
            threading.stack_size(default)
        self.num_words = (tokenizer.vocab_size + 31) // 32

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Begin to compile a grammar, unless it is compiled; may be called on any thread."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
                return compiled
            compiled = self._compiler.submit(self._compile, grammar)
            self._compiled[grammar] = compiled
            self._characters += len(grammar)
            while len(self._compiled) > self.most or (
                self._characters > MAX_COMPILED_CHARACTERS and len(self._compiled) > 1
            ):
                self._characters -= len(self._compiled.popitem(last=False)[0])
            return compiled

    def matcher(self, grammar: str) -> LLMatcher:
        """Return a matcher that has consumed nothing. It is in an error state if the grammar cannot be compiled.

        Steps wait for this. Whoever plans them asks for the grammar before its sequence joins.
        """
        compiled = self.prepare(grammar)
        if not compiled.done():
            self.num_waits += 1
            if self.num_waits == 1:
                log.warning("a step waits for a grammar to be compiled (further ones are only counted)")
        return compiled.result().deep_copy()

    def _compile(self, grammar: str) -> LLMatcher:
        limits = SCHEMA_LIMITS if grammar.startswith("{") else RULE_LIMITS  # a schema or regular expression alone
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        matcher.compute_bitmask()  # copies have it then: in large grammars it takes longer than all later ones
        return matcher

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
        """Stop the threads."""
        self._compiler.shutdown(cancel_futures=True)
