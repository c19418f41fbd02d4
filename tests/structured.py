"""A tiny model of random weights with a tokenizer, and what structured output is tested with."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import transformers
from llguidance import LLMatcher, LLTokenizer
from pagewise_executor.structured.tokenizer import load_tokenizer
from tokenizers import decoders, models, pre_tokenizers

from tests.model_builders import build_model

EOS = 1
SPECIAL = ("<bos>", "<eos>", "<pad>")
MERGES = ('"a', '":', '",', "tr", "true", '{"', "[]", "12", "ab", "abc", "\n\n")
VOCAB_SIZE = 280
"""More than the tokenizer has: as many models have it, whose vocabulary is padded."""


def save_tokenizer(path: Path) -> None:
    """Save a byte-level tokenizer that has any byte, and a few tokens of several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = {byte: chars for byte, chars in transformers_bytes().items()}
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    merges = []
    for text in MERGES:
        token = "".join(spelled[byte] for byte in text.encode())
        merges.append((token[:-1], token[-1]) if token[:-1] in vocabulary else (token[0], token[1:]))
        vocabulary.setdefault(merges[-1][1], len(vocabulary))
        vocabulary.setdefault(token, len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    assert len(vocabulary) < VOCAB_SIZE
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"}))


def transformers_bytes() -> dict[int, str]:
    """How byte-level tokenizers spell bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def build_structured_model(path: Path, seed: int = 0, family: str = "llama") -> transformers.PreTrainedModel:
    """Save a model of random weights with its tokenizer."""
    model = build_model(family, path, seed, vocab_size=VOCAB_SIZE)
    save_tokenizer(path)
    return model


def text_of(path: Path, tokens: Sequence[int]) -> str:
    """The text of tokens, without those that are special."""
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return backend.decode(list(tokens), skip_special_tokens=True)


def schema_grammar(schema: Any, *, whitespace: bool = False) -> str:
    """The grammar of a schema; by default without whitespace, of which models of random weights make much."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": whitespace})


class Reference:
    """What a grammar allows, found one token at a time by a matcher of its own."""

    def __init__(self, path: Path, grammar: str, vocab_size: int = VOCAB_SIZE) -> None:
        self.tokenizer: LLTokenizer = load_tokenizer(path, vocab_size)
        self._grammar = grammar
        self._vocab_size = vocab_size

    def allowed(self, output: Sequence[int]) -> list[int]:
        """The tokens that may follow this output."""
        matcher = LLMatcher(self.tokenizer, self._grammar, log_level=0)
        assert matcher.consume_tokens(list(output)), matcher.get_error()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size]).tolist()

    def holds(self, output: Sequence[int]) -> bool:
        """Whether each token of this output was allowed where it stands."""
        return all(token in self.allowed(output[:number]) for number, token in enumerate(output))

    def prefix_allowed(self, num_prompt_tokens: int) -> Callable[[int, Any], list[int]]:
        """What transformers takes as ``prefix_allowed_tokens_fn``."""
        return lambda _, ids: self.allowed(ids[num_prompt_tokens:].tolist())
