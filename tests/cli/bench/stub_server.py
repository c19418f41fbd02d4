"""An OpenAI-compatible server on a real socket whose answers are scripted, in a thread of its own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Script:
    """How the server behaves.

    ``first``, ``gap``: seconds to the first event, and between events. ``per_event``: tokens of each. ``usage``:
    whether it tells token counts. ``refuses``: fields of bodies that it refuses by name. ``key``: the API key it wants.
    ``cached``: what it says of its cache. ``most``: tokens after which it ends an output. ``fails``: which requests
    fail how: a status, ``cut`` (the connection), ``error`` (an event), ``error object`` (an event of vLLM's),
    ``silent`` (no token). ``done``: whether a stream ends with ``[DONE]``. ``last_chunk_usage``: whether the last chunk
    of the text has the usage, asked for or not, and other chunks have fields without a value.
    """

    first: float = 0.0
    gap: float = 0.0
    per_event: int = 1
    usage: bool = True
    refuses: tuple[str, ...] = ()
    key: str = ""
    cached: int | None = None
    most: int = 10**9
    fails: Callable[[int], int | str | None] = lambda number: None
    done: bool = True
    last_chunk_usage: bool = False
    models: tuple[str, ...] = ("stub",)
    lists: int = 200
    """The status of /v1/models."""
    max_model_len: int | None = None


@dataclass
class Stub:
    """A running server: where, how it behaves from now on, and what it was sent."""

    url: str
    script: Script
    bodies: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When requests came, in seconds of ``time.perf_counter``."""


def words(body: dict[str, Any]) -> list[str]:
    """The words of all messages, or of the prompt."""
    texts = [message["content"] for message in body["messages"]] if "messages" in body else [body["prompt"]]
    return " ".join(texts).split()


@contextmanager
def stub_server(**script: Any) -> Iterator[Stub]:
    """A server on a free port; a word is a token for it."""
    stub = Stub("", Script(**script))
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()

        async def models(request: web.Request) -> web.Response:
            return _models(stub, request)

        async def generate(request: web.Request) -> web.StreamResponse:
            return await _generate(stub, request)

        app.router.add_get("/v1/models", models)
        app.router.add_get("/version", _version)
        app.router.add_post("/v1/completions", generate)
        app.router.add_post("/v1/chat/completions", generate)
        runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        stub.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert started.wait(10)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


async def _version(request: web.Request) -> web.Response:
    return web.json_response({"version": "stub 1"})


def _refused(stub: Stub, request: web.Request) -> web.Response | None:
    if stub.script.key and request.headers.get("Authorization") != f"Bearer {stub.script.key}":
        return web.json_response({"error": {"message": "wrong key"}}, status=401)
    return None


def _models(stub: Stub, request: web.Request) -> web.Response:
    models = [{"id": name, "max_model_len": stub.script.max_model_len} for name in stub.script.models]
    if stub.script.lists != 200:
        return web.Response(status=stub.script.lists, text="Internal Server Error")
    return _refused(stub, request) or web.json_response({"data": models})


async def _generate(stub: Stub, request: web.Request) -> web.StreamResponse:
    came = time.perf_counter()
    if refused := _refused(stub, request):
        return refused
    body = await request.json()
    script = stub.script
    if body["model"] not in script.models:
        return web.json_response({"error": {"message": f"The model {body['model']!r} does not exist"}}, status=404)
    for name in script.refuses:
        if name in body:
            return web.json_response({"error": {"message": f"Unknown field {name!r}"}}, status=400)
    fails = script.fails(len(stub.bodies))
    stub.bodies.append(body)
    stub.times.append(came)
    if isinstance(fails, int):
        return web.json_response({"error": {"message": "scripted"}}, status=fails)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await _stream(script, body, response, came, fails)
    return response


async def _stream(
    script: Script, body: dict[str, Any], response: web.StreamResponse, came: float, fails: str | None
) -> None:
    chat = "messages" in body
    tokens = min(script.most, body["max_tokens"]) if fails != "silent" else 0

    async def send(event: dict[str, Any]) -> None:
        await response.write(f"data: {json.dumps(event)}\n\n".encode())

    if chat:
        await send({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
    due = came + script.first
    for start in range(0, tokens, script.per_event):
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        due += script.gap
        text = " tok" * min(script.per_event, tokens - start)
        await send({"choices": [{"delta": {"content": text}} if chat else {"text": text, "finish_reason": None}]})
        if fails == "cut" and start:
            assert response._req is not None
            assert response._req.transport is not None
            response._req.transport.abort()
            return
        if fails == "error" and start:
            await send({"error": {"message": "the model fell over"}})
            return
        if fails == "error object" and start:
            await send({"object": "error", "message": "the model fell over", "code": 500})
            return
    last = {"choices": [{"delta": {}, "finish_reason": "length"} if chat else {"text": "", "finish_reason": "length"}]}
    if script.last_chunk_usage:
        await send({"choices": None, "usage": None})
        last |= {"usage": {"prompt_tokens": len(words(body)), "completion_tokens": tokens}}
    await send(last)
    if script.usage and body.get("stream_options", {}).get("include_usage"):
        details = {} if script.cached is None else {"prompt_tokens_details": {"cached_tokens": script.cached}}
        usage = {"prompt_tokens": len(words(body)), "completion_tokens": tokens} | details
        await send({"choices": [], "usage": usage})
    if script.done:
        await response.write(b"data: [DONE]\n\n")
