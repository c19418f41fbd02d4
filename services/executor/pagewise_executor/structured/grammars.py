"""Compiled grammars, and the matchers that begin with them."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from pagewise_shared.errors import PagewiseError
from pagewise_shared.model_files import end_token_ids, untyped_special_tokens
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
"""Limits of the work for one mask, for which all rows of a step wait. A grammar beyond them fails, and its request
alone. With the library's own limits an ambiguous grammar takes up to a quarter of a second for a mask, with these some
20 ms. An object with 480 optional properties needs 6,000 items. Rules may be more ambiguous than schemas, and get half
of that. A state of a lexeme takes 1 to 2 KiB."""


class Grammars:
    """Compiles grammars for one tokenizer, on threads of its own, and computes the masks of matchers.

    Fields:
        num_words: int32 words of the mask of one matcher. most: the most grammars that are kept compiled; the least
            recently used one is evicted. num_waits: how often ``matcher`` had to wait for the compilation.
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

        Steps wait for this. So the scheduler asks for the grammar before the sequence joins.
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


_MAX_REASON = 200


class NoGrammarsError(PagewiseError):
    """Outputs of this model cannot be made to match grammars."""


def load_tokenizer(path: Path, vocab_size: int) -> LLTokenizer:
    """Return the tokenizer in a model's directory. This takes seconds for a large vocabulary.

    transformers reads it, as in gateways, because tokens may be named beside tokenizer.json only.

    ``vocab_size``: the width of the model's logits, which may be greater than the tokenizer's vocabulary.

    Raises:
        NoGrammarsError: there is no tokenizer.json, llguidance cannot use it, or the model's output has no end.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise NoGrammarsError("the model's directory has no tokenizer.json")
    from transformers import PreTrainedTokenizerFast

    try:
        special = untyped_special_tokens(path)
        read = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True, **special)  # nosec B615 # a directory
        backend = read.backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        ends = end_token_ids(path, backend.token_to_id)
        known = sorted(token for token in ends if token < vocab_size)
        if not known:
            raise NoGrammarsError("no token ends the model's output")
        return LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=known)
    except NoGrammarsError:
        raise
    except Exception as error:  # the libraries raise plain exceptions of many kinds
        text = " ".join(str(error).split())[:_MAX_REASON]
        raise NoGrammarsError(f"tokenizer.json cannot be used: {text}") from error
