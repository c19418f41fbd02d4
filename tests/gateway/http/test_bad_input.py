"""Invalid requests are refused with the right status, in OpenAI's shape, and the error names the field."""

import gzip
import json
from typing import Any

import openai
import pytest
from pagewise_gateway.http import completions

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, serving

COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"


def error_of(answer: dict[str, Any]) -> dict[str, Any]:
    """The error, after a look at its shape."""
    assert set(answer) == {"error"}
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


BODIES = [
    b"",
    b"{",
    b'{"prompt": "a",}',
    b'{"prompt": "a"} x',
    b"[]",
    b'"text"',
    b"null",
    b'{"prompt": "a\xff"}',
    b"\xff\xfe{\x00}\x00",
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e999}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b"[" * 100_000,
    b'{"prompt": "a", "chat_template_kwargs": ' + b'{"a":' * 5000 + b"1" + b"}" * 5001,
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
@pytest.mark.parametrize("path", [COMPLETION, CHAT, "/tokenize"])
async def test_bodies_that_are_no_request(path: str, body: bytes) -> None:
    async with serving() as server:
        status, answer = await server.post_bytes(path, body, "application/json")
        assert status == 400
        assert error_of(answer)["type"] == "invalid_request_error"
        assert server.scheduler.submits == []


@pytest.mark.parametrize("field", ["max_tokens", "n", "best_of", "top_k", "min_tokens"])
@pytest.mark.parametrize("number", [b"1e300", b"-1e300", b"1" * 400, b"9" * 4000])
async def test_long_numbers_are_quoted_short(field: str, number: bytes) -> None:
    async with serving() as server:
        body = b'{"prompt": "a", "max_tokens": 4, "%b": %b}' % (field.encode(), number)
        status, answer = await server.post_bytes(COMPLETION, body, "application/json")
        error = error_of(answer)
        assert (status, error["param"]) == (400, field)
        assert len(error["message"]) < 300, error["message"]


WRONG_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [1, [2]]}, "prompt"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [400]}, "prompt"),
    ({"prompt": [10**30]}, "prompt[0]"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 513}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": 17}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": "1"}, "n"),
    ({"best_of": 0}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 9}, "best_of"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 3, "n": 2}, "best_of"),
    ({"use_beam_search": True, "best_of": 4, "n": 2}, "best_of"),
    ({"use_beam_search": True, "stop": "x"}, "stop"),
    ({"use_beam_search": True, "logprobs": 0}, "logprobs"),
    ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
    ({"length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
    ({"use_beam_search": True, "early_stopping": "sometimes"}, "early_stopping"),
    ({"use_beam_search": True, "n": 4, "stop_token_ids": [*range(128)]}, "stop_token_ids"),
    ({"use_beam_search": True, "temperature": 0.5}, "temperature"),
    ({"use_beam_search": True, "top_k": 5}, "top_k"),
    ({"use_beam_search": True, "presence_penalty": 1}, "presence_penalty"),
    ({"use_beam_search": True, "echo": True}, "echo"),
    ({"temperature": "NaN"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": 5}, "cache_salt"),
    ({"prompt_cache_retention": "25 h"}, "prompt_cache_retention"),
    ({"prompt_cache_retention": "0s"}, "prompt_cache_retention"),
    ({"prompt_cache_retention": 60}, "prompt_cache_retention"),
    ({"min_p": 2}, "min_p"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 5e-324}, "repetition_penalty"),  # dividing by it would overflow in the executor
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"²": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 10000: 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [400]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 401}, "allowed_token_ids"),
    ({"bad_words": ["\U0001f98a" * 1024] * 5}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"echo": "yes"}, "echo"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"priority": 2**40}, "priority"),
    ({"stream": 1}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"what": True}}, "stream_options.what"),
    ({"user": 5}, "user"),
    ({"model": 5}, "model"),
    ({"unheard_of": 1}, "unheard_of"),
    ({"unheard_of": None}, "unheard_of"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_FIELDS, ids=lambda value: repr(value)[:40])
async def test_wrong_field_is_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(COMPLETION, {"model": MODEL, "prompt": "the fox", **fields})
        assert (status, error_of(answer)["param"]) == (400, param)
        assert server.scheduler.submits == []


MESSAGE = {"role": "user", "content": "hi"}
WRONG_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "hi"}]}, "messages[0].role"),
    ({"messages": [MESSAGE, {"role": "user", "content": 5}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{**MESSAGE, "mood": "good"}]}, "messages[0].mood"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_completion_tokens": 9999}, "max_completion_tokens"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"prompt": "hi"}, "prompt"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=lambda value: repr(value)[:40])
async def test_wrong_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(CHAT, {"model": MODEL, "messages": [MESSAGE], **fields})
        assert (status, error_of(answer)["param"]) == (400, param)
        assert server.scheduler.submits == []


UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"prediction": {"type": "content", "content": "a"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"suffix": "tail"}, "suffix"),
    ({"guided_json": {}}, "guided_json"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"return_mm_kwargs": True}, "return_mm_kwargs"),
    ({"messages": [{"role": "function", "content": "1", "name": "f"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content[0]"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=lambda value: repr(value)[:40])
async def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(CHAT, {"messages": [MESSAGE], **fields})
        error = error_of(answer)
        assert (status, error["param"], error["code"]) == (400, param, "unsupported_parameter")
        assert param in error["message"]


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    harmless: dict[str, Any] = {
        "tools": [],
        "tool_choice": "none",
        "functions": None,
        "parallel_tool_calls": True,
        "store": False,
        "metadata": {},
        "service_tier": "auto",
        "verbosity": "low",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "best_of": 2,
        "n": 2,
        "top_k": -1,
        "stop": None,
        "seed": None,
        "user": "somebody",
        "logprobs": False,
        "top_logprobs": None,
        "reasoning_effort": None,
        "stream": False,
        "stream_options": None,
        "length_penalty": 1.0,
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": None, "refusal": None, "annotations": []},
            {"role": "user", "content": "hi", "name": "bob"},
        ],
    }
    async with serving() as server:
        status, _ = await server.post(CHAT, {"model": MODEL, **harmless})
        assert status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETION, {"prompt": "the quick brown fox " * 200}, "prompt"),
        (COMPLETION, {"prompt": [5] * 512}, "prompt"),
        (COMPLETION, {"prompt": "x" * 500_000}, "prompt"),
        (COMPLETION, {"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "the quick brown fox " * 200}]}, "messages"),
    ],
)
async def test_prompt_over_the_models_length(path: str, fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(path, fields)
        error = error_of(answer)
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
        assert "maximum context length is 512 tokens" in error["message"]


async def test_prompt_that_just_fits() -> None:
    async with serving() as server:
        status, _ = await server.post(COMPLETION, {"prompt": [5] * 511})
        assert (status, server.scheduler.last.prompts[0].max_tokens) == (200, 1)
        status, _ = await server.post(COMPLETION, {"prompt": [5] * 512, "max_tokens": 0, "echo": True})
        assert (status, server.scheduler.last.prompts[0].max_tokens) == (200, 0)


async def test_body_over_the_limit() -> None:
    async with serving(max_body_bytes=10_000) as server:
        status, answer = await server.post(COMPLETION, {"prompt": "a" * 20_000})
        assert (status, error_of(answer)["code"]) == (413, "body_too_large")
        packed = gzip.compress(json.dumps({"prompt": "a" * 20_000}).encode())
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with server.http.post(server.url + COMPLETION, data=packed, headers=headers) as response:
            assert (response.status, error_of(await response.json())["code"]) == (413, "body_too_large")


async def test_content_type() -> None:
    body = b'{"prompt": "the fox"}'
    async with serving() as server:
        for bad in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            status, answer = await server.post_bytes(COMPLETION, body, bad)
            assert (status, error_of(answer)["code"]) == (415, "unsupported_media_type")
        status, _ = await server.post_bytes(COMPLETION, body, "application/json; charset=utf-8")
        assert status == 200


async def test_embeddings_are_refused_by_name() -> None:
    async with serving() as server:
        with pytest.raises(openai.BadRequestError, match="/v1/embeddings is not supported by Pagewise") as raised:
            await server.openai.embeddings.create(model="fake/model", input="a" * 100_000)
        assert raised.value.code == "unsupported_endpoint"


async def test_routes_and_methods() -> None:
    async with serving() as server:
        for path in ("/v1/rerank", "/score", "/v1/audio/transcriptions", "/" + "x" * 3000):
            status, answer = await server.post(path, {})
            assert (status, error_of(answer)["code"]) == (404, "not_found")
            message = error_of(answer)["message"]
            for endpoint in ("POST /v1/chat/completions", "GET /v1/models/{model}", "GET /openapi.json"):
                assert endpoint in message
            assert "..." not in message.partition(": ")[2]
        status, answer = await server.get(COMPLETION)
        assert (status, error_of(answer)["code"]) == (405, "method_not_allowed")
        status, answer = await server.post(COMPLETION, {"model": "other", "prompt": "a"})
        assert (status, error_of(answer)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("kind", "status"), [("never_fits", 400), ("invalid", 400), ("overloaded", 429), ("unavailable", 503)]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refused_by_the_scheduler(kind: Any, status: int, stream: bool) -> None:
    """All prompts of a request are taken together, or none."""
    scheduler = FakeScheduler(refuse=(kind, "no", 0))
    async with serving(scheduler) as server:
        body = {"prompt": ["a", "b", "c"], "stream": stream}
        async with server.http.post(server.url + COMPLETION, json=body) as response:
            assert response.status == status
            assert ("Retry-After" in response.headers) == (status != 400)
            error = error_of(await response.json())
            assert error["message"] == "no"
            assert (error["code"] == "context_length_exceeded") == (kind == "never_fits")
        assert (scheduler.submits, scheduler.aborts, server.scheduler_client.num_live) == ([], [], 0)


async def test_no_executor_yet() -> None:
    async with serving(FakeScheduler(ready=0, max_model_len=0)) as server:
        for path, body in ((COMPLETION, {"prompt": "a"}), (CHAT, {"messages": [MESSAGE]})):
            status, answer = await server.post(path, body)
            assert (status, error_of(answer)["type"]) == (503, "server_error")
        status, _ = await server.get("/health")
        assert status == 503


def check_failure(status: int, answer: str, begun: bool, text: str) -> None:
    """An answer about a failure on our side: an event at the end of a stream that has begun."""
    if begun:
        assert status == 200
        events = answer.removesuffix("\n\n").split("\n\n")
        answer = events[-1].removeprefix("data: ")
        assert "[DONE]" not in events
    else:
        assert status == 500
    assert text in error_of(json.loads(answer))["message"]
    assert "secret" not in answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("prompts", [["the fox"], ["the fox", "the dog"]])
async def test_failures_of_the_executor(stream: bool, after: int, prompts: list[str]) -> None:
    async with serving(FakeScheduler(fail_after=after)) as server:
        body = {"prompt": prompts, "stream": stream}
        async with server.http.post(server.url + COMPLETION, json=body) as response:
            check_failure(response.status, await response.text(), stream and after > 0, "caught fire")


async def test_no_executor_came() -> None:
    async with serving(FakeScheduler(fail_after=0, fail_kind="unavailable")) as server:
        status, answer = await server.post(COMPLETION, {"prompt": "the fox"})
        assert (status, error_of(answer)["code"]) == (503, "service_unavailable")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_failures_of_our_own(stream: bool, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told = 0

    def fail(completion: Any, news: Any = None) -> Any:
        nonlocal told
        told += 1
        if told > after * stream:
            raise RuntimeError("a secret that clients must not see")
        return events(completion, news)

    events = completions._Completion.events
    monkeypatch.setattr(completions._Completion, "events", fail)
    monkeypatch.setattr(completions.LiveRequest, "outcome", fail)
    async with serving(FakeScheduler(step_seconds=0.005)) as server:
        body = {"prompt": ["the fox", "the dog"], "stream": stream}
        async with server.http.post(server.url + COMPLETION, json=body) as response:
            check_failure(response.status, await response.text(), stream and after > 0, "internal error")
        await server.scheduler.until(lambda: len(server.scheduler.aborts) == 1)
