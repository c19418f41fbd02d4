"""Bodies: counted before they are read, bounded in memory and structure, and numbers that JSON does not tell apart."""

import asyncio
import contextlib
import gc
import io
import json
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagewise_gateway.http.errors import APIError, InvalidRequestError
from pagewise_gateway.http.parsing import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, check_structure, parse_request
from pagewise_gateway.http.schema import ChatRequest, CompletionRequest, DetokenizeRequest
from pagewise_shared.config import ServeConfig
from pagewise_shared.config.reading import build_config
from pagewise_shared.errors import ConfigError

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.raw_connections import http_bytes
from tests.gateway.server import MODEL, Server, serving

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
BODY = {"model": MODEL, "prompt": "the fox", "max_tokens": 4}
LIMITED, FREE = {"Authorization": "Bearer sk-bob"}, {"Authorization": "Bearer sk-alice"}
MIB = 1024 * 1024


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text("alice: sk-alice\nbob: sk-bob concurrent=2\ncarol: sk-carol\n")
    return str(path)


# ---- counted before they are read ----------------------------------------------------------------------


async def test_a_request_takes_the_place_of_what_it_was_counted_as(keys: str) -> None:
    async with serving(api_keys_file=keys) as server:
        for path, body in ((COMPLETION, BODY), (CHAT, {"messages": [{"role": "user", "content": "hi"}]})):
            server.scheduler.submits.clear()
            status, _ = await server.post(path, body, **LIMITED)
            counted, real = server.scheduler.submits
            assert (status, counted.prompts, counted.counted_as) == (200, (), -1)
            assert (len(real.prompts), real.counted_as, real.params.key) == (1, counted.stream, "bob")
            assert real.stream > counted.stream
        assert server.scheduler.aborts == [], "the scheduler has put the requests there, nothing is left to end"
        assert server.scheduler_client.num_live == 0


async def test_a_key_without_limits_pays_no_round_trip(keys: str) -> None:
    async with serving(api_keys_file=keys) as server:
        assert (await server.post(COMPLETION, BODY, **FREE))[0] == 200
        assert [submit.counted_as for submit in server.scheduler.submits] == [-1]


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"prompt": "a", "n": 99}', "application/json", 400),
        (b'{"prompt": "a", "model": "other"}', "application/json", 404),
        (b"a" * 2 * MIB, "application/json", 413),
        (b"a=1", "application/x-www-form-urlencoded", 415),
    ],
)
async def test_what_is_refused_has_been_counted(keys: str, content: bytes, kind: str, status: int) -> None:
    async with serving(api_keys_file=keys) as server:
        headers = {"Content-Type": kind, **LIMITED}
        async with server.http.post(server.url + COMPLETION, data=io.BytesIO(content), headers=headers) as response:
            assert response.status == status
        (counted,) = server.scheduler.submits
        assert counted.prompts == ()
        await server.scheduler.until(lambda: server.scheduler.aborts == [counted.stream])
        assert server.scheduler_client.num_live == 0


async def test_a_key_over_its_limit_is_refused_before_its_body_comes(keys: str) -> None:
    scheduler = FakeScheduler(refuse=("overloaded", "API key bob: too much", 17))
    async with serving(scheduler, api_keys_file=keys) as server, begun(server, LIMITED, 1000) as (reader, _):
        assert b" 429 " in await reader.readline()
        assert "http_body_bytes" in server.shown()
        assert held(server) == 0


async def test_a_client_that_goes_away_while_it_sends_no_longer_counts(keys: str) -> None:
    async with serving(api_keys_file=keys) as server:
        async with begun(server, LIMITED, 1000):
            await server.scheduler.until(lambda: server.scheduler.submits)
            await server.scheduler.until(lambda: held(server) == 1000)
        await server.scheduler.until(lambda: server.scheduler.aborts == [server.scheduler.last.stream])
        assert held(server) == 0


async def test_a_request_is_counted_once_although_the_scheduler_is_replaced_while_its_body_comes(keys: str) -> None:
    body = json.dumps(BODY).encode()
    async with serving(api_keys_file=keys) as server, begun(server, LIMITED, len(body)) as (reader, writer):
        await server.scheduler.until(lambda: server.scheduler.submits)
        await server.scheduler.welcome_again()
        await server.scheduler.until(lambda: len(server.scheduler.submits) == 2)
        writer.write(body)
        assert b" 200 " in await reader.readline()
        _, again, real = server.scheduler.submits
        assert (again.prompts, again.resumed, real.counted_as, real.resumed) == ((), True, again.stream, False)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_request_that_was_not_answered_before_the_scheduler_is_replaced_is_counted_by_the_next(
    keys: str, refused: bool
) -> None:
    body = json.dumps(BODY).encode()
    async with serving(api_keys_file=keys) as server:
        server.scheduler.mute = True
        async with begun(server, LIMITED, len(body)) as (reader, writer):
            await server.scheduler.until(lambda: server.scheduler.submits)
            server.scheduler.mute = False
            if refused:
                server.scheduler.refuse = ("overloaded", "the limit of concurrent requests is 1", 60)
                server.scheduler.refuse_after = 1
            await server.scheduler.welcome_again()
            if not refused:
                await server.scheduler.until(lambda: len(server.scheduler.submits) == 2)
                assert not server.scheduler.last.resumed
                writer.write(body)
            async with asyncio.timeout(20):
                assert (b" 429 " if refused else b" 200 ") in await reader.readline()


# ---- memory --------------------------------------------------------------------------------------------


def held(server: Server) -> float:
    """Bytes that bodies take."""
    (line,) = (line for line in server.shown().splitlines() if line.startswith("pagewise_http_body_bytes{"))
    return float(line.split()[-1])


def refusals(server: Server, reason: str) -> float:
    (line,) = (
        line
        for line in server.shown().splitlines()
        if f'gateway_requests_refused_total{{model_name="{MODEL}",reason="{reason}"' in line
    )
    return float(line.split()[-1])


@asynccontextmanager
async def begun(
    server: Server, headers: dict[str, str], size: int, sent: bytes = b"", *, chunked: bool = False
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A request whose body was announced, and of which only ``sent`` has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    lines = [
        f"POST {COMPLETION} HTTP/1.1",
        "Host: a",
        "Content-Type: application/json",
        length,
        *(f"{name}: {text}" for name, text in headers.items()),
    ]
    writer.write("\r\n".join([*lines, "", ""]).encode())
    if sent:
        writer.write(b"%x\r\n%b\r\n" % (len(sent), sent) if chunked else sent)
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_bodies_take_no_more_memory_than_their_keys_share(keys: str) -> None:
    async with serving(api_keys_file=keys, max_body_memory=4 * MIB) as server:
        async with begun(server, FREE, MIB, b"a" * (MIB - 1)):
            await server.scheduler.until(lambda: held(server) == MIB - 1)
            status, answer = await server.post(COMPLETION, BODY, **FREE)
            error: Any = answer["error"]
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
            assert "API key alice" in error["message"]
            assert str(MIB) in error["message"]
            assert refusals(server, "key_body_memory") == 1
            assert (await server.post(COMPLETION, BODY, Authorization="Bearer sk-carol"))[0] == 200
        await server.scheduler.until(lambda: held(server) == 0)
        assert (await server.post(COMPLETION, BODY, **FREE))[0] == 200


async def test_bodies_of_all_keys_take_no_more_memory_than_there_is(keys: str) -> None:
    sent = b"a" * (MIB - 1)
    async with serving(api_keys_file=keys, max_body_memory=3 * MIB // 2) as server, begun(server, FREE, MIB, sent):
        await server.scheduler.until(lambda: held(server) == MIB - 1)
        carol = {"Authorization": "Bearer sk-carol", "Content-Type": "application/json"}
        large = b'{"prompt": "' + b"a" * (MIB // 2)
        async with server.http.post(server.url + COMPLETION, data=large, headers=carol) as response:
            assert response.status == 429
            assert response.headers["Retry-After"]
            assert "--max-body-memory" in await response.text()
        assert refusals(server, "body_memory") == 1


async def test_bodies_that_are_only_announced_take_nothing_of_others() -> None:
    async with serving(max_body_memory=2 * MIB) as server, contextlib.AsyncExitStack() as stack:
        for _ in range(16):
            await stack.enter_async_context(begun(server, {}, MIB))
        await server.scheduler.until(lambda: held(server) > 0)
        assert (await server.post(COMPLETION, BODY))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_without_keys_all_of_the_memory_is_everybodys(chunked: bool) -> None:
    async with serving(max_body_memory=2 * MIB) as server:
        sent = b"a" * (MIB - 1)
        async with begun(server, {}, MIB, sent, chunked=chunked), begun(server, {}, MIB, sent, chunked=chunked):
            await server.scheduler.until(lambda: held(server) >= 2 * (MIB - 1))
            assert (await server.post(COMPLETION, BODY))[0] == 429
        await server.scheduler.until(lambda: held(server) == 0)


async def test_the_memory_of_a_body_is_free_while_its_request_runs() -> None:
    async with serving(FakeScheduler(paused=True)) as server:
        running = asyncio.create_task(server.post(COMPLETION, BODY))
        await server.scheduler.until_running()
        assert held(server) == 0
        server.scheduler.paused = False
        assert (await running)[0] == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param(COMPLETION, {"prompt": "a" * 60_000, "truncate_prompt_tokens": 1}, id="text"),
        pytest.param(COMPLETION, {"prompt": [[5] * 60_000], "truncate_prompt_tokens": 1}, id="token ids"),
        pytest.param(COMPLETION, {"prompt": "a", "allowed_token_ids": [70] * 60_000}, id="allowed_token_ids"),
        pytest.param(COMPLETION, {"prompt": "a", "bad_words": [" " * 1000 + "a"] * 128}, id="bad_words"),
        pytest.param(
            CHAT,
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"a": [[]] * 10_000}},
            id="chat_template_kwargs",
        ),
    ],
)
async def test_what_was_parsed_is_gone_while_the_request_runs(path: str, body: dict[str, Any]) -> None:
    content = json.dumps({"max_tokens": 1, **body}).encode()
    sent = http_bytes(path, content)
    async with serving(FakeScheduler(paused=True, max_model_len=100_000, vocab_size=100_000)) as server:
        connections = []
        try:
            for number in range(3):
                if number == 1:  # the first one has filled caches
                    tracemalloc.start()
                connections.append(await asyncio.open_connection("127.0.0.1", server.port))
                connections[-1][1].write(sent)
                await server.scheduler.until(lambda: len(server.scheduler.submits) == len(connections))
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 2 * 100_000
        finally:
            tracemalloc.stop()
            for _, writer in connections:
                writer.close()


@pytest.mark.parametrize("echo", [False, True])
async def test_the_text_of_a_prompt_is_kept_only_to_be_echoed(echo: bool) -> None:
    text = "the fox of this test"
    async with serving(FakeScheduler(paused=True)) as server:
        task = asyncio.create_task(server.post(COMPLETION, {**BODY, "prompt": text, "echo": echo}))
        await server.scheduler.until_running()
        lists = [thing for thing in gc.get_objects() if type(thing) is list]
        assert any(type(one) is str and one == text for each in lists for one in each) == echo
        server.scheduler.paused = False
        _, answer = await task
        choices: Any = answer["choices"]
        assert choices[0]["text"].startswith(text) == echo


@pytest.mark.parametrize("name", ["user", "safety_identifier", "prompt_cache_key"])
async def test_names_that_are_ignored_are_short(name: str) -> None:
    async with serving() as server:
        assert (await server.post(COMPLETION, {**BODY, name: "x" * 1024}))[0] == 200
        status, answer = await server.post(COMPLETION, {**BODY, name: "x" * 1025})
        error: Any = answer["error"]
        assert (status, error["param"], "1024" in error["message"]) == (400, name, True)


def test_a_body_has_to_fit_into_the_memory() -> None:
    with pytest.raises(ConfigError, match="--max-body-memory"):
        build_config(ServeConfig, {"max_body_bytes": "100", "max_body_memory": "99"}, {})


# ---- structure -----------------------------------------------------------------------------------------


def count(value: Any) -> tuple[int, int]:
    """Strings, and arrays and objects, of a JSON value."""
    if isinstance(value, str):
        return 1, 0
    if isinstance(value, list):
        parts = [count(item) for item in value]
    elif isinstance(value, dict):
        parts = [count(item) for pair in value.items() for item in pair]
    else:
        return 0, 0
    return sum(strings for strings, _ in parts), 1 + sum(containers for _, containers in parts)


ODD_TEXT = st.text(st.sampled_from('a"\\[]{},:é\n'), max_size=12)
VALUES = st.recursive(
    ODD_TEXT | st.integers() | st.none(),
    lambda values: st.lists(values, max_size=5) | st.dictionaries(ODD_TEXT, values, max_size=5),
    max_leaves=30,
)


@given(VALUES, st.booleans())
def test_what_is_inside_strings_does_not_count(value: Any, ascii: bool) -> None:
    strings, containers = count(value)
    body = json.dumps([value, "[" * (MAX_CONTAINERS + 40_000)], ensure_ascii=ascii).encode()
    check_structure(bytearray(body))
    filling = [[]] * (MAX_CONTAINERS - containers - 2)
    check_structure(bytearray(json.dumps([value, filling], ensure_ascii=ascii).encode()))
    with pytest.raises(InvalidRequestError, match=f"{MAX_CONTAINERS + 1} arrays and objects"):
        check_structure(bytearray(json.dumps([value, [*filling, []]], ensure_ascii=ascii).encode()))
    with pytest.raises(InvalidRequestError, match=f"{MAX_STRINGS + 1} strings"):
        check_structure(
            bytearray(json.dumps([value, ["a"] * (MAX_STRINGS + 1 - strings)], ensure_ascii=ascii).encode())
        )


def test_many_values_are_refused() -> None:
    check_structure(bytearray(b"[%b]" % b",".join([b"1"] * MAX_VALUES)))
    with pytest.raises(InvalidRequestError, match=f"the limit is {MAX_VALUES}"):
        check_structure(bytearray(b"[%b]" % b",".join([b"1"] * (MAX_VALUES + 1))))


@pytest.mark.parametrize("end", [b"", b'"', b'\\"', b"\\", b'{"a', b"\xff"])
def test_a_body_that_breaks_off_is_counted_up_to_there(end: bytes) -> None:
    with pytest.raises(InvalidRequestError, match="arrays and objects"):
        check_structure(bytearray(b"[" * 40_000 + end + b"]" * 40_000))


async def test_messages_parts_and_kwargs_are_bounded() -> None:
    async with serving(FakeScheduler(max_model_len=100_000)) as server:
        message = {"role": "user", "content": "a"}
        part = {"type": "text", "text": "a"}
        for fields, name, limit in (
            ({"messages": [message] * 4097}, "messages", 4096),
            ({"messages": [{"role": "user", "content": [part] * 1025}]}, "messages", 1024),
            ({"messages": [message], "chat_template_kwargs": {"a": "x" * 65_536}}, "chat_template_kwargs", 65_536),
        ):
            status, answer = await server.post(CHAT, fields)
            error: Any = answer["error"]
            assert (status, str(limit) in error["message"]) == (400, True), error
            assert error["param"].startswith(name)
        for fields in (
            {"messages": [message] * 4096, "max_tokens": 1},
            {"messages": [{"role": "user", "content": [part] * 1024}], "max_tokens": 1},
            {"messages": [message], "chat_template_kwargs": {"a": "x" * 60_000}, "max_tokens": 1},
        ):
            assert (await server.post(CHAT, fields))[0] == 200


async def test_errors_are_short_whatever_they_quote() -> None:
    async with serving() as server:
        for path, fields in (
            (COMPLETION, {"prompt": "a", "x" * 500_000: 1}),
            (COMPLETION, {"prompt": "a", "model": "\\" * 500_000}),
            (COMPLETION, {"prompt": "a", "stream_options": {"é" * 100_000: 1}}),
            (CHAT, {"messages": [{"role": "user", "content": [{"type": "x" * 500_000}]}]}),
            (CHAT, {"messages": [{"role": "x" * 500_000, "content": ""}]}),
            (CHAT, {"messages": [{"role": "user", "content": ""}], "response_format": {"type": "x" * 500_000}}),
        ):
            async with server.http.post(server.url + path, json=fields) as response:
                text = await response.read()
            assert response.status in (400, 404)
            assert len(text) < 8192
            assert len(json.loads(text)["error"]["message"]) <= 1024


@pytest.mark.parametrize(("context", "most"), [(512, 65_536), (5000, 80_000)])
async def test_texts_to_tokenize_and_to_truncate_have_a_greatest_length(context: int, most: int) -> None:
    async with serving(FakeScheduler(max_model_len=context)) as server:
        for path, fields in (
            ("/tokenize", {}),
            (COMPLETION, {"truncate_prompt_tokens": 9, "max_tokens": 1}),
        ):
            assert (await server.post(path, {"prompt": "a" * most, **fields}))[0] == 200
            status, answer = await server.post(path, {"prompt": "a" * (most + 1), **fields})
            error: Any = answer["error"]
            assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
            assert f"the limit is {most}" in error["message"]
        assert (await server.post("/detokenize", {"tokens": [5] * 65_536}))[0] == 200
        status, answer = await server.post("/detokenize", {"tokens": [5] * 65_537})
        assert status == 400
        assert "the limit is 65536" in str(answer)


# ---- integers ------------------------------------------------------------------------------------------


async def test_integral_floats_are_integers() -> None:
    fields = b'"max_tokens": 10.0, "n": 2.0, "seed": 1e2, "top_k": 5E0, "stop_token_ids": [7.0, 8], "priority": -1.0'
    async with serving() as server:
        content = b'{"prompt": [5.0, 6, 7e0], "logprobs": 1.0, ' + fields + b"}"
        status, _ = await server.post_bytes(COMPLETION, content, "application/json")
        last = server.scheduler.last
        assert (status, last.prompts[0].max_tokens, last.params.n, last.params.priority) == (200, 10, 2, -1)
        assert (last.params.sampling.seed, last.params.sampling.top_k, last.params.sampling.logprobs) == (100, 5, 1)
        assert {7, 8} <= set(last.params.sampling.stop_token_ids)
        assert server.scheduler.last_prompt == [5, 6, 7]
        status, answer = await server.post_bytes("/detokenize", b'{"tokens": [5.0, 6.0]}', "application/json")
        assert status == 200, answer


@pytest.mark.parametrize(
    ("content", "param"),
    [
        (b'{"prompt": "a", "max_tokens": 10.5}', "max_tokens"),
        (b'{"prompt": "a", "max_tokens": 10.0, "n": 1.5}', "n"),
        (b'{"prompt": "a", "stop_token_ids": [1.0, 2.5]}', "stop_token_ids[1]"),
        (b'{"prompt": "a", "top_k": 1e300}', "top_k"),
        (b'{"prompt": "a", "stream": 1.0}', "stream"),
        (b'{"prompt": [[1.0], [1.5]]}', "prompt[1][0]"),
        (b'{"prompt": [-1.0]}', "prompt[0]"),
        (b'{"prompt": "a", "max_tokens": "10.0"}', "max_tokens"),
        (b'{"prompt": "a", "user": 1.0}', "user"),
    ],
)
async def test_other_floats_are_refused_by_name(content: bytes, param: str) -> None:
    async with serving() as server:
        status, answer = await server.post_bytes(COMPLETION, content, "application/json")
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, param)


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "max_tokens": st.integers(0, 2**53),
            "n": st.integers(-1, 5),
            "top_k": st.integers(-3, 2**32),
            "stop_token_ids": st.lists(st.integers(-1, 2**31), max_size=4),
            "temperature": st.floats(-1, 3),
            "prompt": st.lists(st.integers(-1, 100), max_size=4) | st.lists(st.lists(st.integers(0, 9)), max_size=3),
            "user": st.text(max_size=3),
        },
    )
)
def test_a_number_means_the_same_with_and_without_a_fraction(fields: dict[str, Any]) -> None:
    def floated(value: Any) -> Any:
        if isinstance(value, int):
            return float(value)
        return [floated(item) for item in value] if isinstance(value, list) else value

    def parsed(body: dict[str, Any]) -> object:
        try:
            return msgspec.to_builtins(parse_request(bytearray(json.dumps(body).encode()), CompletionRequest))
        except APIError as error:
            return type(error), error.param

    assert parsed({name: floated(value) for name, value in fields.items()}) == parsed(fields)


def test_every_kind_of_body_takes_integral_floats() -> None:
    chat = parse_request(
        bytearray(
            b'{"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 5.0, "top_logprobs": 2.0}'
        ),
        ChatRequest,
    )
    assert (chat.max_completion_tokens, chat.top_logprobs) == (5, 2)
    assert parse_request(bytearray(b'{"tokens": [1.0]}'), DetokenizeRequest).tokens == [1]
