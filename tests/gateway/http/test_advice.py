"""What clients say about the next use of a prompt: sessions and hints in requests, and ``/v1/cache/advice``."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from msgspec import structs
from pagewise.cache import cache
from pagewise_shared.adapters import read_adapter
from pagewise_shared.block_hash import adapter_salt
from pagewise_shared.protocol import Advised, ReuseHints, unpack_int32s

from tests.adapter_files import write_adapter
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.tool_model import CALLS, HERMES, PARAMETERS, TOKENIZER, reply
from tests.gateway.server import MODEL, Server, serving

ADVICE, CHATS = "/v1/cache/advice", "/v1/chat/completions"
ASKED: list[Any] = [{"role": "user", "content": "a"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("get_weather", "get_time")
]
FIXTURES = Path(__file__).parent / "agent_requests"
CONVERSATION = "5f1c9a52-77e7-4d0a-9d1e-6b3c1a2f4e90"
AGENT = "8d2b7c11-0b8e-4c55-a1f3-0e9d7a6b5c42"


async def hints(server: Server, path: str, body: dict[str, Any], **headers: str) -> ReuseHints:
    """The hints of a request that reach the scheduler."""
    status, answer = await server.post(path, {"max_tokens": 2, **body} if path != "/v1/responses" else body, **headers)
    assert status == 200, answer
    return server.scheduler.last.params.reuse


def chat(content: Any = "a", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def text(content: str, **cached: Any) -> dict[str, Any]:
    return {"type": "text", "text": content} | cached


def marked(ttl: str | None = None) -> dict[str, Any]:
    return {"prompt_cache_breakpoint": {"mode": "explicit"} | ({"ttl": ttl} if ttl else {})}


@pytest.mark.parametrize("path", ["/v1/completions", CHATS, "/v1/responses", "/v1/messages"])
async def test_sessions_and_hints_of_every_api(path: str) -> None:
    prompt = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}.get(path, {"messages": ASKED})
    async with serving(tokenizer=TOKENIZER) as server:
        plain = await hints(server, path, prompt)
        assert (plain.session, plain.parent, plain.returns_in, plain.ends) == ("", "", -1, False)
        given = {"session_id": "turn", "cache_hints": {"returns_in": 2.5, "ends": True, "parent": "main"}}
        full = await hints(server, path, prompt | given)
        assert (full.session, full.parent, full.returns_in, full.ends) == ("turn", "main", 2.5, True)
        headers = {"X-Session-Id": "head", "X-Parent-Session-Id": "above", "X-Dynamo-Session-Final": "True"}
        headed = await hints(server, path, prompt, **headers)
        assert (headed.session, headed.parent, headed.ends) == ("head", "above", True)
        both = await hints(server, path, prompt | given, **headers)
        assert (both.session, both.parent) == ("turn", "main")


async def test_which_name_of_a_session_counts() -> None:
    codex, dynamo = {"Session-Id": "codex"}, {"X-Dynamo-Session-Id": "nv"}
    conversation = {"conversation_params": {"conversation_id": "trt"}}
    async with serving() as server:
        assert (await hints(server, CHATS, chat(prompt_cache_key="key"))).session == "key"
        assert (await hints(server, CHATS, chat(prompt_cache_key="key"), **codex)).session == "key"
        assert (await hints(server, CHATS, chat(), **codex)).session == "codex"
        assert (await hints(server, CHATS, chat(), conversation_id="old")).session == "old"
        assert (await hints(server, CHATS, chat(prompt_cache_key="key"), **dynamo)).session == "nv"
        assert (await hints(server, CHATS, chat(prompt_cache_key="key"), **{"Thread-Id": "agent"})).session == "agent"
        assert (await hints(server, CHATS, chat(), **{"X-Session-Affinity": "worker"})).session == "worker"
        for path, body in ((CHATS, chat()), ("/v1/messages", chat()), ("/v1/responses", {"input": "a"})):
            assert (await hints(server, path, body | conversation, **dynamo)).session == "trt"
        assert (await hints(server, CHATS, chat(session_id="own", **conversation))).session == "own"
        assert (await hints(server, CHATS, chat(prompt_cache_key="", user="me"))).session == ""
        for name in ("X-Session-Id", "session_id"):
            status, answer = await server.post(CHATS, chat(), **{name: "x" * 2000})
            error: Any = answer["error"]
            assert (status, error["param"]) == (400, name)


async def test_openai_clients_send_hints_in_extra_fields() -> None:
    async with serving() as server:
        await server.openai.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            max_tokens=2,
            prompt_cache_key="shop",
            extra_body={"session_id": "s-1", "cache_hints": {"returns_in": 60}},
            extra_headers={"X-Parent-Session-Id": "s-0"},
        )
        found = server.scheduler.last.params.reuse
        assert (found.session, found.cache_key, found.parent, found.returns_in) == ("s-1", "shop", "s-0", 60)
        parts: Any = [text("a", **marked("12h")), text("b")]
        await server.openai.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": parts}],
            max_tokens=2,
            extra_body={"prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},  # openai 2.0 has no argument of it
        )
        assert server.scheduler.last.params.reuse.retention == 12 * 3600


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"prompt_cache_options": {"ttl": "30m"}}, 1800),
        ({"prompt_cache_options": {"mode": "implicit"}}, 0),
        ({"prompt_cache_options": {"ttl": "30m"}, "prompt_cache_retention": "24h"}, 86_400),
        ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "1h"}, "annotations": ["a"]}}, 3600),
        ({"kv_cache_retention_config": {}}, 0),
        (
            {
                "kv_cache_retention_config": {
                    "token_range_retention_configs": [
                        {"token_start": 0, "token_end": 64, "priority": 90, "duration_ms": 30_000},
                        {"token_start": 64, "priority": 10, "duration_ms": 90_000},
                        {"token_start": 64, "priority": 100},
                    ],
                    "decode_retention_priority": 36,
                    "decode_duration_ms": 45_500,
                    "transfer_mode": "DRAM",
                }
            },
            45,
        ),
    ],
)
async def test_how_long_a_prefix_should_be_kept(fields: dict[str, Any], seconds: int) -> None:
    async with serving() as server:
        assert (await hints(server, CHATS, chat(**fields))).retention == seconds
        assert (await hints(server, "/v1/responses", {"input": "a", **fields})).retention == seconds


async def test_the_last_breakpoint_says_how_long_a_prefix_should_be_kept() -> None:
    async with serving(FakeScheduler(max_model_len=4096, has_snapshots=True), tokenizer=TOKENIZER) as server:
        many = [text(f"part {number} ", **marked("30m" if number == 5 else None)) for number in range(6)]
        assert (await hints(server, CHATS, chat(many))).retention == 1800
        places = unpack_int32s(server.scheduler.last.prompts[0].places).tolist()
        rendered = TOKENIZER.decode(server.scheduler.last_prompt[: min(places)], skip_special_tokens=False)
        assert (len(places), rendered[-7:]) == (4, "part 2 "), "as in OpenAI's API, the last four count"
        item = {"role": "user", "content": [{"type": "input_text", "text": "a", **marked("1h")}]}
        assert (await hints(server, "/v1/responses", {"input": [item]})).retention == 3600
        long, short = ({"cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in ("1h", "5m"))
        system = {"system": [text("rules", **long)]}
        assert (await hints(server, "/v1/messages", chat(**system))).retention == 3600
        assert (await hints(server, "/v1/messages", chat([text("a", **short)], **system))).retention == 300
        assert (await hints(server, "/v1/messages", chat([text("a", **short)], **long))).retention == 3600


async def test_fields_of_dynamo() -> None:
    async with serving() as server:
        control = {"session_id": "nv", "action": "close", "timeout": 60}
        found = await hints(server, CHATS, chat(nvext={"session_control": control, "agent_hints": {"osl": 9}}))
        assert (found.session, found.ends) == ("nv", True)
        assert server.scheduler.last.params.priority == 0
        await hints(server, CHATS, chat(nvext={"agent_hints": {"priority": 5, "speculative_prefill": True}}))
        assert server.scheduler.last.params.priority == -5
        await hints(server, CHATS, chat(priority=3, nvext={"agent_hints": {"priority": 5}}))
        assert server.scheduler.last.params.priority == 3
        for fields, salt in (({}, "all/nv"), ({"cache_salt": "own"}, "all/own")):
            await hints(server, "/v1/messages", chat(nvext={"cache_salt": "nv", "greed_sampling": False}, **fields))
            assert server.scheduler.last.params.cache_salt == salt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"session_id": ""}, "session_id"),
        ({"session_id": "x" * 2000}, "session_id"),
        ({"cache_hints": {"returns_in": -1}}, "cache_hints.returns_in"),
        ({"cache_hints": {"return_in": 1}}, "cache_hints.return_in"),
        ({"cache_hints": {"parent": 7}}, "cache_hints.parent"),
        ({"prompt_cache_options": {"ttl": "soon"}}, "prompt_cache_options.ttl"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"nvext": {"session_control": {}}}, "nvext.session_control.session_id"),
        ({"nvext": {"agent_hints": {"priority": 2**40}}}, "nvext.agent_hints.priority"),
        ({"nvext": {"greed_sampling": True}}, "nvext.greed_sampling"),
        ({"nvext": {"token_data": [1]}}, "nvext.token_data"),
        ({"nvext": {"cache_salt": ""}}, "nvext.cache_salt"),
        ({"conversation_params": {}}, "conversation_params.conversation_id"),
        (
            {"kv_cache_retention_config": {"token_range_retention_configs": [{"priority": 101}]}},
            "kv_cache_retention_config.token_range_retention_configs[0].priority",
        ),
    ],
)
async def test_wrong_hints_are_named(fields: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(CHATS, chat(**fields))
        error: Any = answer["error"]
        assert (status, error["param"]) == (400, param)


# ---- the requests of coding agents ----


@pytest.mark.parametrize(
    ("name", "session", "parent", "retention"),
    [
        ("claude_code", CONVERSATION, "", 3600),
        ("claude_code_before_2_1_78", CONVERSATION, "", 0),
        ("claude_code_subagent", AGENT, CONVERSATION, 0),
        ("codex", CONVERSATION, "", 0),
        ("codex_subagent", AGENT, CONVERSATION, 0),
        ("codex_before_prompt_cache_keys", CONVERSATION, "", 0),
    ],
)
async def test_sessions_of_coding_agents(name: str, session: str, parent: str, retention: int) -> None:
    fixture = json.loads((FIXTURES / f"{name}.json").read_text())
    scheduler = FakeScheduler(replies=[reply("a")], max_model_len=4096)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        url = server.url + fixture["path"]
        async with server.http.post(url, json=fixture["body"], headers=fixture["headers"]) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
        found = server.scheduler.last.params.reuse
        assert (found.session, found.parent, found.retention) == (session, parent, retention)


@pytest.mark.parametrize("user", ["", "user_1", "{}", '{"session_id":7}', "{" * 100, '{"session_id":"\\u00e9"}', None])
async def test_other_users_name_no_session(user: str | None) -> None:
    async with (
        serving() as server,
        anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client,
    ):
        await client.messages.create(model=MODEL, max_tokens=2, messages=ASKED, metadata={"user_id": user})
        assert server.scheduler.last.params.reuse.session == ""
        metadata: Any = {"user_id": '{"session_id":"claude"}'}
        await client.messages.create(model=MODEL, max_tokens=2, messages=ASKED, metadata=metadata)
        assert server.scheduler.last.params.reuse.session == "claude"


# ---- the tools that a chat has called ----


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", [CHATS, "/v1/messages"])
async def test_called_tools_are_told(path: str, stream: bool) -> None:
    tools = TOOLS
    if path != CHATS:
        tools = [{"name": one["function"]["name"], "input_schema": PARAMETERS} for one in TOOLS]
    scheduler = FakeScheduler(replies=[reply(CALLS), reply("nothing"), reply(CALLS)], max_model_len=4096)
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        for session in ({"session_id": "s"}, {"session_id": "s"}, {}):
            body = chat(max_tokens=200, tools=tools, stream=stream, cache_salt="mine", **session)
            async with server.http.post(server.url + path, json=body) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
        await scheduler.until(lambda: scheduler.advice)
        await server.get("/debug/memory")  # an answer to a later message: nothing else is on the way
        (told,) = scheduler.advice
        assert (told.kind, told.tools) == ("called", ("get_weather", "get_time"))
        assert (told.session, told.cache_salt) == ("s", "all/mine")
        assert told.request_id == scheduler.submits[0].request_id


# ---- the endpoint ----


async def test_advice_reaches_the_scheduler_and_its_answer_the_client() -> None:
    scheduler = FakeScheduler(advised=Advised(0, "clipped", "the key may pin 10 blocks", 10, 160, 30.0))
    async with serving(scheduler, tokenizer=TOKENIZER, **HERMES) as server:
        body = {"advice": "pin", "session_id": "s-1", "ttl": "5m", "model": MODEL}
        assert await server.post(ADVICE, body) == (
            200,
            {"outcome": "clipped", "reason": "the key may pin 10 blocks", "seconds": 30.0, "blocks": 10, "tokens": 160},
        )
        (advice,) = scheduler.advice
        assert (advice.kind, advice.session, advice.seconds) == ("pin", "s-1", 300)
        assert (advice.key, advice.cache_salt, advice.request_id, advice.tokens) == ("", None, "", b"")
        for given, name in (
            ({"response_id": "chatcmpl-7f"}, "7f"),
            ({"response_id": "resp_7f"}, "7f"),
            ({"response_id": "msg_7f"}, "7f"),
            ({"request_id": "msg_7f"}, "msg_7f"),
        ):
            await server.post(ADVICE, {"advice": "cold", **given})
            assert scheduler.advice[-1].request_id == name
        await server.post(ADVICE, {"advice": "fork", "session_id": "child", "parent": "s-1", "seconds": 0})
        assert structs.replace(scheduler.advice[-1], epoch=0, number=0) == structs.replace(
            advice, epoch=0, number=0, kind="fork", session="child", parent="s-1", seconds=0
        )


async def test_prompts_of_advice_are_those_of_requests() -> None:
    async with serving(FakeScheduler(max_model_len=4096), tokenizer=TOKENIZER, **HERMES) as server:

        async def advised(**subject: Any) -> list[int]:
            status, answer = await server.post(ADVICE, {"advice": "willneed", "seconds": 1.5, **subject})
            assert status == 200, answer
            return unpack_int32s(server.scheduler.advice[-1].tokens).tolist()

        await server.post("/v1/completions", {"prompt": "Hello there", "max_tokens": 1})
        assert await advised(prompt="Hello there") == server.scheduler.last_prompt
        assert await advised(prompt=[7, 8, 9]) == [7, 8, 9]
        await server.post(CHATS, chat("Hello", tools=TOOLS, max_tokens=1))
        found = await advised(messages=chat("Hello")["messages"], tools=TOOLS)
        assert found == server.scheduler.last_prompt[: len(found)]
        rest = TOKENIZER.decode(server.scheduler.last_prompt[len(found) :], skip_special_tokens=False)
        assert rest == "<|assistant|>", "the next turn begins with this prompt, whoever speaks"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"session_id": "s"}, "advice"),
        ({"advice": "called", "session_id": "s"}, "advice"),
        ({"advice": "pin"}, "session_id"),
        ({"advice": "pin", "session_id": "s", "prompt": "a"}, "prompt"),
        ({"advice": "pin", "session_id": ""}, "session_id"),
        ({"advice": "pin", "session_id": "x" * 2000}, "session_id"),
        ({"advice": "pin", "session_id": "s", "seconds": -1}, "seconds"),
        ({"advice": "pin", "session_id": "s", "seconds": 1e9}, "seconds"),
        ({"advice": "pin", "session_id": "s", "ttl": "5 minutes"}, "ttl"),
        ({"advice": "pin", "session_id": "s", "ttl": "5m", "seconds": 300}, "ttl"),
        ({"advice": "pin", "session_id": "s", "ttl": "169h"}, "ttl"),
        ({"advice": "pin", "session_id": "s", "tools": []}, "tools"),
        ({"advice": "fork", "session_id": "s"}, "parent"),
        ({"advice": "pin", "session_id": "s", "parent": "t"}, "parent"),
        ({"advice": "pin", "prompt": ""}, "prompt"),
        ({"advice": "pin", "prompt": []}, "prompt"),
        ({"advice": "pin", "prompt": [1, 4000]}, "prompt"),
        ({"advice": "pin", "prompt": ["a", "b"]}, "prompt[0]"),
        ({"advice": "pin", "messages": []}, "messages"),
        ({"advice": "pin", "prompt": "a " * 9000}, "prompt"),
        ({"advice": "pin", "session_id": "s", "model": "other"}, "model"),
        ({"advice": "pin", "sessions": "s"}, "sessions"),
        ({"advice": "pin", "response_id": "7f"}, "response_id"),
    ],
)
async def test_wrong_advice_is_named(body: dict[str, Any], param: str) -> None:
    async with serving() as server:
        status, answer = await server.post(ADVICE, body)
        error: Any = answer["error"]
        assert (status, error["param"]) == (404 if param == "model" else 400, param), error
        assert not server.scheduler.advice


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
async def test_advice_for_no_number_of_seconds(number: str) -> None:
    body = f'{{"advice": "pin", "session_id": "s", "seconds": {number}}}'
    async with serving() as server:
        async with server.http.post(server.url + ADVICE, data=body, headers={"Content-Type": "application/json"}) as it:
            assert it.status == 400, await it.text()
        assert not server.scheduler.advice


async def test_a_key_advises_on_its_own_cache_alone(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice: sk-alice\nbob: sk-bob share=team requests-per-minute=60\n")
    keys.chmod(0o600)
    async with serving(FakeScheduler(), api_keys_file=str(keys)) as server:
        body = {"advice": "dontneed", "session_id": "s"}
        assert (await server.post(ADVICE, body))[0] == 401
        for key, fields, salt in (
            ("alice", {}, "key:alice"),
            ("alice", {"cache_salt": "key:bob"}, "key:alice/key:bob"),
            ("bob", {"cache_salt": "x"}, "group:team/x"),
        ):
            status, _ = await server.post(ADVICE, {**body, **fields}, Authorization=f"Bearer sk-{key}")
            advice = server.scheduler.advice[-1]
            assert (status, advice.key, advice.cache_salt) == (200, key, salt)
        found = await hints(server, CHATS, chat(nvext={"agent_hints": {"priority": 9}}), Authorization="Bearer sk-bob")
        assert found.session == ""
        assert server.scheduler.last.params.priority == 0, "a hint asks for no more than the key may"


async def test_advice_on_an_adapter(tmp_path: Path) -> None:
    adapter = read_adapter("one", str(write_adapter(tmp_path / "one")), 16)
    async with serving(FakeScheduler(adapters={"one": adapter}), enable_lora=True) as server:
        body = {"advice": "pin", "prompt": "Hello", "model": "one", "cache_salt": "x"}
        assert (await server.post(ADVICE, body))[0] == 200
        assert server.scheduler.advice[-1].cache_salt == adapter_salt(adapter.content, "all/x")
        await server.post(ADVICE, {"advice": "end", "session_id": "s", "model": "one", "cache_salt": "x"})
        assert server.scheduler.advice[-1].cache_salt == "all/x", "as its requests have it"


async def test_the_command_advises_on_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(FakeScheduler(advised=Advised(0, "accepted", "", 64, 1024, 300.0))) as server:

        async def run(*arguments: str) -> int:
            return await asyncio.to_thread(cache, [*arguments, "--url", server.url])

        assert await run("pin", "a", "b", "--ttl", "5m", "--cache-salt", "mine") == 0
        assert capsys.readouterr().out.splitlines() == [
            f"{session}: accepted, 1,024 tokens in 64 blocks, for 300 s" for session in ("a", "b")
        ]
        assert [(one.session, one.seconds, one.cache_salt) for one in server.scheduler.advice] == [
            (session, 300, "all/mine") for session in ("a", "b")
        ]
        server.scheduler.advised = Advised(0, "refused", "there is no session of this name")
        for verb in ("unpin", "prefetch", "cold", "forget", "end"):
            assert await run(verb, "a") == 1
            assert capsys.readouterr().out == "a: refused: there is no session of this name\n"
        kinds = [one.kind for one in server.scheduler.advice[2:]]
        assert kinds == ["unpin", "willneed", "cold", "dontneed", "end"]
        assert await run("end", "a", "--json") == 1
        assert json.loads(capsys.readouterr().out)["a"]["outcome"] == "refused"
