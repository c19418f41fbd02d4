"""Errors name the true cause, because clients act on it: agents shorten a conversation after "too long"."""

from typing import Any

import pytest
from pagewise_gateway.text.tokenizer import Tokenizer

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import serving
from tests.gateway.text.tokenizer_builders import CHAT_TEMPLATE, byte_level_backend

COMPLETION, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
PATHS = (COMPLETION, CHAT, MESSAGES, RESPONSES)
OUTPUTS = {COMPLETION: "max_tokens", CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}
PROMPTS = {COMPLETION: "prompt", CHAT: "messages", MESSAGES: "messages", RESPONSES: "input"}


def body_of(path: str, text: str = "hi", /, **fields: Any) -> dict[str, Any]:
    """A request with a text."""
    name = PROMPTS[path]
    given = [{"role": "user", "content": text}] if name == "messages" else text
    return {name: given, OUTPUTS[path]: 4, **fields}


TEXTS = [
    (rb'"\ud800"', r"half of a surrogate pair, \ud800 (byte 12)"),
    (rb'"a\udc00b"', r"half of a surrogate pair, \udc00 (byte 13)"),
    (rb'"\ud83d\ude00 \uD83Dx"', r"half of a surrogate pair, \uD83D (byte 25)"),
    (rb'"\\ud800 \\\ud800"', r"half of a surrogate pair, \ud800 (byte 22)"),
    (rb'"\ud800\u0041"', r"half of a surrogate pair, \ud800"),
    (rb'"a", "\ud83d": 1', r"half of a surrogate pair, \ud83d"),
    (rb'"\\ud800', "truncated"),
    (rb'"\ud83d\u', "truncated"),
    (rb'"\ud83d', "truncated"),
    (b'"NaN", "max_tokens": 4,', "trailing comma"),
    (b'"a", "temperature": NaN', "NaN"),
    (b'"a", "temperature": -Infinity', "Infinity"),
    (b'"a", "temperature": 1e999', "number that cannot be represented"),
    (b'"a", "max_tokens": ' + b"9" * 5000, "number that cannot be represented"),
    (b'"a\nb"', "control character"),
]


@pytest.mark.parametrize(("text", "cause"), TEXTS, ids=range(len(TEXTS)))
async def test_bodies_that_cannot_be_decoded(text: bytes, cause: str) -> None:
    end = b"" if cause == "truncated" else b"}"
    async with serving() as server:
        status, answer = await server.post_bytes(COMPLETION, b'{"prompt": ' + text + end, "application/json")
        message = answer["error"]["message"]  # type: ignore[index]
        assert (status, cause in message) == (400, True), message
        for other in {"truncated", "surrogate", "NaN and"} - {cause}:
            assert other in cause or other not in message or cause in ("NaN", "Infinity"), message


@pytest.mark.parametrize("path", PATHS)
async def test_half_of_a_surrogate_pair_and_an_empty_body_for_every_api(path: str) -> None:
    async with serving() as server:
        for body, cause in ((rb'{"a": "cut \ud83d"}', "surrogate"), (b"", "empty"), (b" \n", "empty")):
            _, answer = await server.post_bytes(path, body, "application/json")
            assert cause in answer["error"]["message"]  # type: ignore[index]


@pytest.mark.parametrize("field", ["json", "structural_tag"])
async def test_schemas_that_are_texts(field: str) -> None:
    async with serving() as server:
        for text, cause in ((r'{"triggers": ["\ud800"]}', "surrogate"), ("", "empty"), ('{"triggers": ', "truncated")):
            body = {"prompt": "a", "structured_outputs": {field: text}}
            _, answer = await server.post(COMPLETION, body)
            assert cause in answer["error"]["message"], answer  # type: ignore[index]


async def test_a_long_body_of_escapes_is_searched_fast() -> None:
    body = b'{"prompt": "' + rb"\\\n\u0041" * 100_000 + rb'\ud800"}'
    async with serving(max_body_bytes=2_000_000) as server:
        _, answer = await server.post_bytes(COMPLETION, body, "application/json")
        assert "surrogate" in answer["error"]["message"]  # type: ignore[index]


def image_tokenizer() -> Tokenizer:
    backend = byte_level_backend(("<|image|>",))
    return Tokenizer(backend, eos_token_ids=frozenset({0}), chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("path", PATHS)
async def test_tokens_outside_the_vocabulary_are_not_a_length(path: str) -> None:
    tokenizer = image_tokenizer()
    image = tokenizer.special_tokens["<|image|>"]
    async with serving(FakeScheduler(vocab_size=image), tokenizer=tokenizer) as server:
        status, _ = await server.post(path, body_of(path, "a fox"))
        assert status == 200
        status, answer = await server.post(path, body_of(path, "a <|image|> fox"))
        error: Any = answer["error"]
        assert (status, error["param"], error["code"]) == (400, PROMPTS[path], None)
        assert f"'<|image|>', whose id {image} is outside the model's vocabulary of {image}" in error["message"]
        assert len(server.scheduler.submits) == 1


async def test_many_ids_outside_the_vocabulary_are_not_a_length() -> None:
    async with serving() as server:
        _, answer = await server.post(COMPLETION, {"prompt": [400] * 600})
        error: Any = answer["error"]
        assert (error["code"], "outside the vocabulary of 400" in error["message"]) == (None, True)


async def test_banned_words_that_the_model_cannot_say() -> None:
    tokenizer = image_tokenizer()
    image = tokenizer.special_tokens["<|image|>"]
    async with serving(FakeScheduler(vocab_size=image), tokenizer=tokenizer) as server:
        status, _ = await server.post(COMPLETION, {"prompt": "a", "bad_words": ["<|image|>", "a<|image|>b", "fox"]})
        assert status == 200
        constraints = server.scheduler.last.params.sampling.constraints
        assert constraints is not None
        assert constraints.error(image) is None


@pytest.mark.parametrize("wanted", [512, 10**6])
@pytest.mark.parametrize("path", PATHS)
async def test_outputs_longer_than_the_model_allows_are_not_the_prompts_fault(path: str, wanted: int) -> None:
    async with serving() as server:
        status, answer = await server.post(path, body_of(path, **{OUTPUTS[path]: wanted}))
        error: Any = answer["error"]
        assert (status, error["param"], error["code"]) == (400, OUTPUTS[path], None)
        assert f"{OUTPUTS[path]} is too large: {wanted}" in error["message"]
        status, answer = await server.post(path, body_of(path, "the fox", **{OUTPUTS[path]: 511}))
        assert answer["error"]["code"] == "context_length_exceeded"  # type: ignore[index]
        status, answer = await server.post(path, body_of(path, truncate_prompt_tokens=-1, **{OUTPUTS[path]: 512}))
        assert status == 400


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "content[0].type"),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0].type"),
        (MESSAGES, {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        (RESPONSES, {"tools": [{"type": "mcp", "server_label": "a"}]}, "tools[0].type"),
        (CHAT, {"tools": [{"type": "custom", "custom": {"name": "a"}}]}, "tools[0].type"),
    ],
)
async def test_parts_and_tools_of_other_types_are_unsupported(path: str, fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(path, body_of(path, **fields))
        error: Any = answer["error"]
        assert (status, error["code"]) == (400, "unsupported_parameter")
        assert error["param"].endswith(param)


async def test_fields_have_the_names_of_the_api() -> None:
    schema = {"type": "json_schema", "schema": {"type": "foo"}}
    async with serving() as server:
        for path, fields, name in (
            (MESSAGES, {"output_config": {"format": schema}}, "output_config.format"),
            (RESPONSES, {"text": {"format": {**schema, "name": "a"}}}, "text.format"),
            (MESSAGES, {"max_completion_tokens": 5}, "max_completion_tokens"),
            (MESSAGES, {"response_format": {}}, "response_format"),
            (CHAT, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        ):
            _, answer = await server.post(path, body_of(path, **fields))
            error: Any = answer["error"]
            assert (error["param"], name in error["message"]) == (name, True), error
            assert name == "response_format" or "response_format" not in error["message"]


async def test_an_item_whose_type_is_null_is_a_message() -> None:
    async with serving() as server:
        item = {"type": None, "role": "user", "content": "hi"}
        status, _ = await server.post(RESPONSES, {"input": [item]})
        assert status == 200
