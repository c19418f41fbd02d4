"""What an executor needs to follow grammars, or why it cannot."""

import logging
from typing import TYPE_CHECKING

from pagewise_shared.config import ExecutorConfig
from pagewise_shared.model_files import resolve_model

if TYPE_CHECKING:
    from pagewise_executor.structured.grammars import Grammars

log = logging.getLogger(__name__)

_MOST_THREADS = 8
"""Threads that compute masks: 64 masks of a vocabulary of 113,000 tokens take one of them some milliseconds."""


def load_grammars(config: ExecutorConfig, vocab_size: int) -> "tuple[Grammars | None, str]":
    """Return what compiles grammars for the model's tokenizer; or None, and why there is nothing that could.

    ``vocab_size``: the width of the model's logits.
    """
    try:
        from pagewise_executor.structured.grammars import Grammars
        from pagewise_executor.structured.tokenizer import NoGrammarsError, load_tokenizer
    except ImportError:
        reason = "llguidance is not installed"
    else:
        path = resolve_model(config.model, config.revision, tokenizer_only=True)
        threads = config.threads if isinstance(config.threads, int) else 1
        try:
            return Grammars(load_tokenizer(path, vocab_size), min(threads, _MOST_THREADS)), ""
        except NoGrammarsError as error:
            reason = str(error)
    log.warning("requests for structured output are refused: %s", reason)
    return None, reason
