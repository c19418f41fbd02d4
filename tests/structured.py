"""A tiny model of random weights with a tokenizer, and helpers for tests of structured output."""

import json
import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import tokenizers
import transformers
from llguidance import LLMatcher, LLTokenizer
from pagewise_executor.structured.grammars import load_tokenizer
from pagewise_gateway.structured.grammars import choice_grammar, json_schema_grammar, regex_grammar
from tokenizers import decoders, models, pre_tokenizers

from tests.model_builders import build_model

EOS = 1
SPECIAL = ("<bos>", "<eos>", "<pad>")
MERGES = ('"a', '":', '",', "tr", "true", '{"', "[]", "12", "ab", "abc", "\n\n")
VOCAB_SIZE = 280
"""More than the tokenizer has: as many models have it, whose vocabulary is padded."""


def save_tokenizer(path: Path, *special: str) -> None:
    """Save a byte-level tokenizer that has any byte, a few tokens of several, and these ``special`` tokens besides."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = spelled_bytes()
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
    backend.add_special_tokens([*SPECIAL, *special])
    assert len(vocabulary) + len(special) < VOCAB_SIZE
    backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>", "bos_token": "<bos>"}))


def spelled_bytes() -> dict[int, str]:
    """How byte-level tokenizers spell bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def build_structured_model(path: Path, seed: int = 0, family: str = "llama") -> transformers.PreTrainedModel:
    """Save a model of random weights with its tokenizer."""
    embedded = {"vocab_size_per_layer_input": VOCAB_SIZE} if family == "gemma4" else {}
    model = build_model(family, path, seed, vocab_size=VOCAB_SIZE, **embedded)
    save_tokenizer(path)
    return model


def text_of(path: Path, tokens: Sequence[int]) -> str:
    """The text of tokens, except special ones."""
    backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return backend.decode(list(tokens), skip_special_tokens=True)


class Reference:
    """The tokens that a grammar allows, found one at a time by a matcher of its own."""

    def __init__(self, path: Path, grammar: str, vocab_size: int = VOCAB_SIZE) -> None:
        self.tokenizer: LLTokenizer = load_tokenizer(path, vocab_size)
        self._grammar = grammar
        self._vocab_size = vocab_size

    def allowed(self, output: Sequence[int]) -> list[int]:
        """The tokens that may follow this output."""
        matcher = LLMatcher(self.tokenizer, self._grammar, log_level=0)
        assert not output or matcher.consume_tokens(list(output)), matcher.get_error()
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size]).tolist()

    def holds(self, output: Sequence[int]) -> bool:
        """Whether each token of this output was allowed at its place."""
        return all(token in self.allowed(output[:number]) for number, token in enumerate(output))

    def prefix_allowed(self, num_prompt_tokens: int) -> Callable[[int, Any], list[int]]:
        """A function for ``prefix_allowed_tokens_fn`` of transformers."""
        return lambda _, ids: self.allowed(ids[num_prompt_tokens:].tolist())


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of keywords that llguidance supports, whose texts are mostly short."""
    kinds = ["integer", "string", "enum", "boolean", "null", "const"]
    if depth:
        kinds += ["object", "object", "array", "anyOf", "ref"]
    match rng.choice(kinds):
        case "integer":
            low = rng.randrange(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(2000)}
        case "string":
            return (
                {"type": "string", "maxLength": rng.randrange(4), "pattern": "^[a-d]*$"}
                if rng.random() < 0.5
                else ({"type": "string", "maxLength": rng.randrange(1, 4)})
            )
        case "enum":
            return {"enum": rng.sample(["red", "a\nb", "é", 7, None, "", "ab", [1], {"a": 1}], rng.randrange(1, 4))}
        case "const":
            return {"const": rng.choice(["abc", -1, True, {"k": [None]}])}
        case "object":
            names = rng.sample(["a", "ab", "name", "ü", "true"], rng.randrange(1, 4))
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": rng.sample(names, rng.randrange(len(names) + 1)),
                "additionalProperties": False,
            }
        case "array":
            least = rng.randrange(2)
            return {
                "type": "array",
                "items": random_schema(rng, depth - 1),
                "minItems": least,
                "maxItems": least + rng.randrange(3),
            }
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 3))]}
        case "ref":
            inner = random_schema(rng, 0)
            return {
                "type": "object",
                "properties": {"x": inner, "y": {"type": "array", "items": inner, "maxItems": 1}},
                "required": ["x"],
                "additionalProperties": False,
            }
        case kind:
            return {"type": kind}


def random_grammar(rng: random.Random) -> tuple[str, Callable[[str], bool]]:
    """A grammar, and whether a whole text matches it."""
    match rng.choice(["schema", "schema", "regex", "choice"]):
        case "schema":
            schema = random_schema(rng)
            return json_schema_grammar(schema, whitespace=False), lambda text: matches(schema, text)
        case "regex":
            regex = rng.choice(["[ab]{1,5}c?", "[0-9]{2,4}-(x|yy)", "(true|abc)+!", "é{2}|", r"[^\x00-\x7f]?z"])
            return regex_grammar(regex), lambda text: re.fullmatch(regex, text) is not None
        case _:
            choices = rng.sample(
                ["yes", "no", "", "true", 'say "no"', "a\\b", "日本", "ab", "abc"], rng.randrange(1, 5)
            )
            return choice_grammar(choices), lambda text: text in choices


def matches(schema: Any, text: str) -> bool:
    """Whether a text is JSON that a schema allows."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
