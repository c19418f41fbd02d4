"""Whatever schema is taken, the texts that its grammar allows are valid: nothing is taken and ignored."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher
from pagewise_gateway.structured.grammars import check_grammar, json_schema_grammar
from pagewise_gateway.structured.walk import GrammarError
from pagewise_shared.model_files import resolve_model

from tests.structured import Reference

NUMBERS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"]
PATTERNS = ["a", "^a", "b$", "^[a-c]+$", r"^\d{2}$", r"\w", "^(x|y)", "[^a]"]
FORMATS = ["date", "time", "ipv4", "uuid", "email", "hostname"]
VALUES = [1, "a", None, True, [1], {"a": 1}, "", 1.5]
TOKENIZER = Reference(resolve_model("pagewise-demo"), "start: /.*/", 4096).tokenizer
ENDS, FIRST = (0, 1), 4
CLOSING = frozenset((b'"', b"}", b"]", b",", b'"}', b'":'))


def random_schema(rng: random.Random, depth: int) -> dict[str, Any]:
    """A schema that may make no sense, of keywords beside each other that may contradict each other."""
    schema: dict[str, Any]
    match rng.randrange(9 if depth else 4):
        case 0:
            schema = {"type": rng.choice(["integer", "number", ["integer", "null"]])}
            schema |= {name: rng.choice([-20, -1, 0, 3, 7.5, 100]) for name in rng.sample(NUMBERS, rng.randrange(3))}
            if rng.random() < 0.3:
                schema["multipleOf"] = rng.choice([1, 2, 3, 0.5, 0.25])
        case 1:
            schema = {"type": rng.choice(["string", ["string", "boolean"]])}
            some = {"minLength": rng.randrange(4), "maxLength": rng.randrange(1, 6), "pattern": rng.choice(PATTERNS)}
            some["format"] = rng.choice(FORMATS)
            schema |= {name: some[name] for name in rng.sample(list(some), rng.randrange(3))}
        case 2:
            schema = {"enum": rng.sample(VALUES, 3)} if rng.random() < 0.6 else {"const": rng.choice(VALUES)}
        case 3:
            schema = {"type": rng.choice(["boolean", "null", "string", "integer"])}
        case 4 | 5:
            names = rng.sample(["a", "b", "c", "d"], rng.randrange(4))
            schema = {"type": "object", "properties": {name: random_schema(rng, depth - 1) for name in names}}
            more = {"required": rng.sample(["a", "b", "c", "e"], rng.randrange(3)), "minProperties": rng.randrange(3)}
            more |= {"maxProperties": rng.randrange(4), "uniqueItems": True, "patternProperties": {"^a": {}}}
            more["additionalProperties"] = rng.choice([False, True, random_schema(rng, 0)])
            schema |= {name: more[name] for name in rng.sample(list(more), rng.randrange(4))}
        case 6:
            more = {"prefixItems": [random_schema(rng, depth - 1)], "minItems": rng.randrange(3)}
            more |= {"maxItems": rng.randrange(4), "items": rng.choice([False, random_schema(rng, depth - 1)])}
            schema = {"type": "array"} | {name: more[name] for name in rng.sample(list(more), rng.randrange(4))}
        case 7:
            schema = {rng.choice(["anyOf", "allOf", "oneOf"]): [random_schema(rng, depth - 1) for _ in range(2)]}
        case _:
            schema = {"$ref": "#/$defs/x"}
    if depth and rng.random() < 0.15:
        schema = random_schema(rng, depth - 1) | schema
    return schema


def texts(grammar: str, rng: random.Random, count: int) -> Iterator[str]:
    """Some whole texts that a grammar allows, found token by token; long ones are given up."""
    for _ in range(count):
        matcher, output = LLMatcher(TOKENIZER, grammar, log_level=0), []
        for _ in range(60):
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            if matcher.is_error():  # nothing matches, as of a schema that refers to itself alone
                break
            if ENDS[0] in allowed and (len(allowed) <= len(ENDS) or rng.random() < 0.4):
                yield TOKENIZER.decode_str(output)
                break
            allowed = [token for token in allowed if token >= FIRST]
            closing = [token for token in allowed if TOKENIZER.decode_bytes([token]) in CLOSING]
            output.append(rng.choice(closing if closing and rng.random() < 0.6 else allowed))
            assert matcher.consume_token(output[-1])


@pytest.mark.parametrize("wanted", [60, pytest.param(2000, marks=pytest.mark.long)])
def test_texts_of_schemas_that_are_taken_are_valid(wanted: int) -> None:
    rng, taken, checked = random.Random(wanted), 0, 0
    while taken < wanted:
        schema = random_schema(rng, 3) | {"$defs": {"x": random_schema(rng, 1)}}
        try:
            check_grammar(grammar := json_schema_grammar(schema, whitespace=False))
        except GrammarError:
            continue
        taken += 1
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        for text in texts(grammar, rng, 3):
            # A year that Python's dates do not have, and a day that the library's expression allows in every year.
            if "0000-" not in text and "-02-29" not in text:
                validator.validate(json.loads(text))
            checked += 1
    assert checked > wanted
