"""A gateway that has nothing but the console, over invented executors: a test decides the events.

``python -m tests.console.fake_gateway 8123`` serves it, for work on the page.
"""

import asyncio
import contextlib
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pagewise_gateway
from aiohttp import web
from msgspec import Struct
from pagewise_gateway.http.console.handlers import _BlockQuery, _parsed, _StreamQuery
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.core.request_report import later
from pagewise_scheduler.core.requests.timeline import LENDER_GONE
from pagewise_shared.protocol import SOURCES, ConsoleView
from pagewise_shared.reports import (
    Chunk,
    Event,
    FleetFrame,
    GatewayState,
    KeyState,
    Placement,
    PrefixesFrame,
    RequestLine,
    RequestName,
    RequestReport,
    RequestsFrame,
    SchedulerState,
    SequenceReport,
)

from tests.console.fake_fleet import FakeExecutor, line

STATIC = Path(pagewise_gateway.__file__).parent / "console" / "static"
CSP = "default-src 'self'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_WAITED = 0.1


class FakeGateway:
    """The answers to the page's queries. ``key``: the operator's, "" if there are no keys."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.executors = {
            name: FakeExecutor(name, size, 1024) for name, size in (("executor-0", 480), ("executor-1", 1600))
        }
        self.placed: dict[str, str] = {}
        self.moved_from: dict[str, str] = {}
        self.ended: dict[str, tuple[RequestReport, float]] = {}
        self.gateways = [GatewayState("gateway-0", "ready", 0)]
        self.keys: list[KeyState] = []
        self.began = time.monotonic()
        self.aborted: list[str] = []
        self.streams: set[asyncio.Task[Any]] = set()
        self.down = False
        self.pause = 0.2
        self.still = False
        """Whether nothing happens."""

    def load(self, requests: int) -> None:
        """So many requests run, evenly placed."""
        names = list(self.executors)
        self.placed = {f"{number:032x}": names[number % len(names)] for number in range(requests)}
        self.moved_from = {}
        self._serve()

    def kill(self, name: str) -> None:
        """The executor is gone, and its requests are elsewhere."""
        del self.executors[name]
        (other, *_) = self.executors
        self.moved_from |= {request: name for request, at in self.placed.items() if at == name}
        self.placed = {request: other if at == name else at for request, at in self.placed.items()}
        self._serve()

    def end(self, request: str) -> None:
        """A request has all its tokens."""
        report = self._report(request)
        report.sequences[0].status, report.sequences[0].finish_reason = "finished", "length"
        report.state, report.status, report.finish_reason, report.ended_seconds_ago = "ended", "finished", "length", 0.0
        self.ended[request] = report, time.monotonic()
        del self.placed[request]
        self._serve()

    def cut(self) -> None:
        """Every stream breaks, and new ones are refused while ``down``."""
        for task in self.streams:
            task.cancel()

    def _serve(self) -> None:
        for executor in self.executors.values():
            executor.serve([request for request, at in self.placed.items() if at == executor.name])

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/console", self.page),
                web.get("/console/assets/{name:.+}", self.asset),
                web.get("/console/stream", self.stream),
                web.get("/console/block", self.block),
                web.post("/console/requests/{name}/abort", self.abort),
                web.get("/debug/explain/{name}", self.explain),
                web.post("/tokenize", self.tokenize),
                web.post("/v1/chat/completions", self.chat),
            ]
        )
        return app

    async def page(self, _: web.Request) -> web.Response:
        return self._file("index.html")

    async def asset(self, request: web.Request) -> web.Response:
        return self._file(request.match_info["name"])

    def _file(self, name: str) -> web.Response:
        path = STATIC / name
        if ".." in name or not path.is_file():
            raise web.HTTPNotFound
        return web.Response(
            body=path.read_bytes(), content_type=TYPES[path.suffix], headers={"Content-Security-Policy": CSP}
        )

    def _check(self, request: web.Request) -> None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized(text=json.dumps({"error": {"message": "this key is not known"}}))

    async def stream(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        if self.down:
            raise web.HTTPServiceUnavailable
        query = _parsed(request, _StreamQuery)
        assert query.colour == "state" or query.executor, "the real gateway wants one"
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            while True:
                for name, data in self.events(query):
                    await answer.write(b"event: %b\ndata: %b\n\n" % (name.encode(), data))
                await asyncio.sleep(self.pause)
        self.streams.discard(task)
        if request.transport is not None:
            request.transport.close()
        return answer

    def events(self, query: _StreamQuery) -> Iterator[tuple[str, bytes]]:
        """One of each kind that is asked for."""
        parts, encode = query.parts.split(","), msgspec.json.encode
        for executor in [] if self.still else self.executors.values():
            executor.step()
        if "fleet" in parts:
            yield "fleet", b'%b,"consoles":%d}' % (encode(self.fleet())[:-1], len(self.streams))
        shown = [one for one in self.executors.values() if query.executor in ("", one.name)]
        for tier in query.tier.split(",") if "map" in parts else []:
            view = ConsoleView("map", query.executor, tier, query.first, query.count, query.colour, query.cells)
            for executor in shown:
                yield "map", encode(executor.map(view))
        if "requests" in parts:
            yield "requests", encode(self.requests())
        if "prefixes" in parts:
            yield "prefixes", encode(PrefixesFrame([one.prefixes() for one in shown]))

    def fleet(self) -> FleetFrame:
        """The processes."""
        names = list(self.executors)
        states = [one.state([peer for peer in names if peer != one.name]) for one in self.executors.values()]
        hits = dict.fromkeys(SOURCES, 0.0) | {"device": 0.5, "host": 0.125}
        tokens = sum(one.tokens_per_second for one in states)
        scheduler = SchedulerState(4711.0, "0.1.0", len(self.placed), 0, 0, tokens, 100.0, hits)
        return FleetFrame(time.time(), "pagewise-demo", scheduler, self.gateways, states, self.keys)

    def requests(self) -> RequestsFrame:
        """Running and ended requests."""
        age = self._age()
        running = [line(name, at, age, moved_from=self.moved_from.get(name)) for name, at in self.placed.items()]
        ended = [
            RequestLine(
                *(getattr(later(report, time.monotonic() - then), name) for name in RequestLine.__struct_fields__)
            )
            for report, then in self.ended.values()
        ]
        return RequestsFrame(running, [], ended, truncated=False)

    def _age(self) -> float:
        return round(1.5 + time.monotonic() - self.began, 3)

    async def block(self, request: web.Request) -> web.Response:
        self._check(request)
        query = _parsed(request, _BlockQuery)
        return _json(self.executors[query.executor].block(query.tier, query.block))

    async def abort(self, request: web.Request) -> web.Response:
        self._check(request)
        self.aborted.append(request.match_info["name"])
        self.placed.pop(request.match_info["name"], None)
        self._serve()
        return web.Response(status=204)

    async def explain(self, request: web.Request) -> web.Response:
        self._check(request)
        name = request.match_info["name"]
        if name in self.ended:
            report, then = self.ended[name]
            report = later(report, time.monotonic() - then)
        elif name in self.placed:
            report = self._report(name)
        else:
            return web.json_response({"error": {"message": f"no request {name} is known"}}, status=404)
        return web.json_response({**msgspec.to_builtins(report), "sentences": sentences(report)})

    def _report(self, name: str) -> RequestReport:
        """Every second request was preempted for the first one; the others lost the blocks that they were to load."""
        age = self._age()
        lost = Event(0.5, "started over", 0, seconds=0.3, reason=LENDER_GONE, blocks=19, freed=2)
        if not int(name, 16) % 2:
            lost.kind, lost.reason, lost.by = (
                "preempted",
                "decoding sequences need blocks",
                RequestName(f"{1:032x}", ""),
            )
        started = Event(
            0.1,
            "started",
            0,
            method="load",
            device_tokens=32,
            found_tokens=240,
            loaded_tokens=240,
            source="host",
            predicted_seconds={"load": 0.003, "recompute": 0.02, "both": 0.01},
            seconds=0.004,
        )
        resumed = Event(0.8, "resumed", 0, method="load", device_tokens=272, source="device")
        at = [(self.moved_from[name], 0.05), (self.placed[name], 0.9)] if name in self.moved_from else []
        shown = line(name, self.placed[name], age, moved_from=self.moved_from.get(name))
        return RequestReport(
            **msgspec.structs.asdict(shown),
            arrived=time.time() - age,
            state="running",
            total_seconds=age,
            ended_seconds_ago=None,
            executors=[Placement(*one) for one in at or [(self.placed[name], 0.05)]],
            cached_tokens=dict.fromkeys(SOURCES, 0) | {"device": 32, "host": 240},
            sequences=[SequenceReport(0, "decode", 284, 12, 295, 19, 17, 1)],
            events=[started, lost, resumed],
            chunks=[Chunk(0.1, 8), Chunk(0.2, 4)],
            waits={"rows": _WAITED},
        )

    async def tokenize(self, _: web.Request) -> web.Response:
        return web.json_response({"tokens": [3, 59, 7], "token_strs": ["<|user|>", "Write", "Ġthis"], "count": 3})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for token, logprob in (("def", -0.01), (" read", -0.9), ("_file", -2.0)):
            others = [{"token": token, "logprob": logprob}, {"token": " other", "logprob": -3.0}]
            content = [{"token": token, "logprob": logprob, "top_logprobs": others}]
            choice = {"index": 0, "delta": {"content": token}, "logprobs": {"content": content}, "finish_reason": None}
            await answer.write(f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [choice]})}\n\n".encode())
        usage = {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
        await answer.write(f"data: {json.dumps({'id': 'chatcmpl-1', 'choices': [], 'usage': usage})}\n\n".encode())
        await answer.write(b"data: [DONE]\n\n")
        return answer


def _json(value: Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


@contextlib.asynccontextmanager
async def serving_console(gateway: FakeGateway, port: int = 0) -> AsyncIterator[str]:
    """The address at which it is served."""
    runner = web.AppRunner(gateway.app(), shutdown_timeout=0.1)
    await runner.setup()
    with socket.create_server(("127.0.0.1", port)) as listening:
        site = web.SockSite(runner, listening)
        await site.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            gateway.cut()
            await runner.cleanup()


async def _main() -> None:
    gateway = FakeGateway()
    gateway.load(24)
    async with serving_console(gateway, int(sys.argv[1])) as url:
        print(f"{url}/console")
        await asyncio.sleep(5)
        gateway.executors["executor-0"].demoting = True
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
