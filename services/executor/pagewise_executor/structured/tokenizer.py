"""The model's tokenizer as llguidance needs it."""

from pathlib import Path

from llguidance import LLTokenizer
from pagewise_shared.errors import PagewiseError
from pagewise_shared.model_files import end_token_ids, untyped_special_tokens

_MAX_REASON = 200


class NoGrammarsError(PagewiseError):
    """Outputs of this model cannot be made to match grammars; the text says why."""


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
