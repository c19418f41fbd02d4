"""The model's tokenizer as llguidance needs it."""

from pathlib import Path

import msgspec
from llguidance import LLTokenizer
from pagewise_shared.end_tokens import end_token_ids
from pagewise_shared.errors import ModelError, PagewiseError

_MAX_REASON = 200


class NoGrammarsError(PagewiseError):
    """Outputs of this model cannot be made to match grammars; the text says why."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def load_tokenizer(path: Path, vocab_size: int) -> LLTokenizer:
    """Return the tokenizer in a model's directory. This takes up to a second for a large vocabulary.

    ``vocab_size``: the width of the model's logits, which may be greater than the tokenizer's vocabulary.

    Raises:
        NoGrammarsError: there is no tokenizer.json, llguidance cannot use it, or the model's output has no end.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise NoGrammarsError("the model's directory has no tokenizer.json")
    try:
        added = msgspec.json.decode(file.read_bytes(), type=_TokenizerFile).added_tokens
        ends = end_token_ids(path, {token.content: token.id for token in added}.get)
        known = sorted(token for token in ends if token < vocab_size)
        if not known:
            raise NoGrammarsError("no token ends the model's output")
        return LLTokenizer(str(file), n_vocab=vocab_size, eos_token=known)
    except (msgspec.MsgspecError, UnicodeDecodeError, OSError, ValueError, ModelError) as error:
        text = " ".join(str(error).split())[:_MAX_REASON]
        raise NoGrammarsError(f"tokenizer.json cannot be used: {text}") from error
