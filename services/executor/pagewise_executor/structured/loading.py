"""What an executor needs to follow grammars, or why it cannot."""

import logging
from typing import TYPE_CHECKING

from pagewise_shared.cpu_threads import available_cores
from pagewise_shared.model_files import resolve_model

from pagewise_executor.device_defaults import SizedConfig

if TYPE_CHECKING:
    from pagewise_executor.structured.grammars import Grammars

log = logging.getLogger(__name__)

_MOST_THREADS = 8
"""Threads that compute masks for a GPU, which waits for them. On the CPU one does: the cores have the model to compute,
and 16 masks of a vocabulary of 113,000 tokens take half a millisecond."""
_MOST_COMPILERS = 4
"""Threads that compile grammars, likewise."""
_MORE_GRAMMARS = 256
"""Grammars that are kept compiled beside those of all rows: of sequences that are to join, or were preempted."""


def load_grammars(config: SizedConfig, vocab_size: int, device: str) -> "tuple[Grammars | None, str]":
    """Return what compiles grammars for the model's tokenizer; or None, and why there is nothing that could.

    ``vocab_size``: the width of the model's logits. ``device``: the type of the device that computes them.
    """
    try:
        from pagewise_executor.structured.grammars import Grammars
        from pagewise_executor.structured.tokenizer import NoGrammarsError, load_tokenizer
    except ImportError:
        reason = "llguidance is not installed"
    else:
        path = resolve_model(config.model, config.revision, tokenizer_only=True)
        cores = available_cores() if device == "cuda" else 1
        most = 2 * (config.max_num_seqs + _MORE_GRAMMARS)  # schedulers count on half of them
        try:
            tokenizer = load_tokenizer(path, vocab_size)
            return Grammars(tokenizer, min(_MOST_THREADS, cores), most, min(_MOST_COMPILERS, cores)), ""
        except NoGrammarsError as error:
            reason = str(error)
    log.warning("requests for structured output are refused: %s", reason)
    return None, reason
