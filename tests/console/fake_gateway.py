"""A gateway that has nothing but the console, over executors that are made up: what a test wants to see happens.

``python -m tests.console.fake_gateway 8123`` serves it, for work on the page.
"""

import asyncio
import base64
import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pagewise_gateway
from aiohttp import web

STATIC = Path(pagewise_gateway.__file__).parent / "console" / "static"
CSP = "default-src 'self'"
STATES = ["free", "cached", "in use", "lent", "copying"]
FREE, CACHED, IN_USE, LENT, COPYING = range(5)
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class FakeExecutor:
    """A pool of blocks in which something happens at every ``step``."""

    def __init__(self, name: str, num_blocks: int, host_blocks: int) -> None:
        self.name, self.num_blocks, self.host_blocks = name, num_blocks, host_blocks
        self.states = bytearray(num_blocks)
        self.host_used = 0
        self.running = 0
        self.demoting = False
        self.rates = dict.fromkeys(
            ("evicted", "demoted", "dropped", "stored", "loaded", "fetched", "copied", "written", "recalled"), 0.0
        )
        self._random = random.Random(name)

    def step(self) -> None:
        pick = self._random.sample(range(self.num_blocks), max(1, self.num_blocks // 40))
        for block in pick if self.running else []:
            here = self.states[block]
            self.states[block] = self._random.choice([CACHED, IN_USE, IN_USE, LENT if here == IN_USE else IN_USE])
        for rate in self.rates:
            self.rates[rate] = 0.0
        if self.running:
            self.rates["copied"] = 3.0
            self.rates["fetched"] = 6.0
        if self.demoting:
            for block in pick:
                self.states[block] = self._random.choice([COPYING, FREE, IN_USE])
            self.host_used = min(self.host_blocks, self.host_used + len(pick))
            self.rates["demoted"] = self.rates["evicted"] = 2.0 * len(pick)
            self.rates["loaded"] = 9.0

    def counts(self) -> dict[str, int]:
        return {name.replace(" ", "_"): self.states.count(state) for state, name in enumerate(STATES)}

    def report(self) -> dict[str, Any]:
        return {
            "executor_id": self.name,
            "state": "ready",
            "role": "both",
            "block_size": 16,
            "bytes_per_block": 32768,
            "num_blocks": self.num_blocks,
            "counts": self.counts(),
            "tiers": {
                "host": {"num_blocks": self.host_blocks, "used": self.host_used, "storing": 0, "loading": 0},
            },
            "running": self.running,
            "waiting": 0,
            "preemptions": 0,
            "tokens_per_second": 90.0 * self.running,
            "rates": self.rates,
            "prediction_error": 0.12,
            "links": [{"tier": "host", "setup_us": 226.0, "block_us": 9.3, "error": 0.1, "loading": 0}],
            "saved_blocks": 9 * self.running,
        }

    def map(self, query: Any) -> dict[str, Any]:
        first = int(query.get("first", 0))
        count = min(int(query.get("count", self.num_blocks)), self.num_blocks - first)
        per_cell = -(-count // int(query.get("cells", 512)))
        cells = bytearray()
        for begin in range(first, first + count, per_cell):
            some = self.states[begin : begin + per_cell]
            best = max(range(5), key=some.count)
            cells += bytes([best, 255 * some.count(best) // len(some)])
        return {
            "executor_id": self.name,
            "tier": "device",
            "first": first,
            "count": count,
            "num_blocks": self.num_blocks,
            "blocks_per_cell": per_cell,
            "colour": query.get("colour", "state"),
            "counts": self.counts(),
            "legend": list(enumerate(STATES)),
            "cells": base64.b64encode(cells).decode(),
        }


class FakeGateway:
    """What the page may ask. ``key``: the operator's, "" if there are no keys."""

    def __init__(self, key: str = "") -> None:
        self.key = key
        self.executors = {
            name: FakeExecutor(name, size, 1024) for name, size in (("executor-0", 480), ("executor-1", 1600))
        }
        self.placed: dict[str, str] = {}
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
        self._count()

    def kill(self, name: str) -> None:
        """The executor is gone, and its requests are elsewhere."""
        del self.executors[name]
        (other, *_) = self.executors
        self.placed = {request: other if at == name else at for request, at in self.placed.items()}
        self._count()

    def cut(self) -> None:
        """Every stream breaks, and new ones are refused while ``down``."""
        for task in self.streams:
            task.cancel()

    def _count(self) -> None:
        for executor in self.executors.values():
            executor.running = list(self.placed.values()).count(executor.name)

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/console", self.page),
                web.get("/console/assets/{name:.+}", self.asset),
                web.get("/console/stream", self.stream),
                web.get("/console/block", self.block),
                web.post("/console/requests/{name}/abort", self.abort),
                web.get("/debug/requests/{name}", self.request),
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
        unknown = set(request.query) - {"parts", "executor", "tier", "first", "count", "colour", "cells"}
        assert not unknown, unknown
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self.streams.add(task)
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            while True:
                for name, data in self.events(request.query):
                    await answer.write(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode())
                await asyncio.sleep(self.pause)
        self.streams.discard(task)
        if request.transport is not None:
            request.transport.close()
        return answer

    def events(self, query: Any) -> list[tuple[str, dict[str, Any]]]:
        for executor in [] if self.still else self.executors.values():
            executor.step()
        maps = [
            ("map", executor.map(query))
            for executor in self.executors.values()
            if query.get("executor", executor.name) == executor.name
        ]
        events = [("fleet", self.fleet()), *maps, ("requests", self.requests()), ("prefixes", self.prefixes())]
        return [(name, data) for name, data in events if name in query["parts"].split(",")]

    def fleet(self) -> dict[str, Any]:
        executors = [executor.report() for executor in self.executors.values()]
        return {
            "time": time.time(),
            "model": "pagewise-demo",
            "scheduler": {
                "uptime_seconds": 4711.0,
                "version": "0.1.0",
                "requests_running": len(self.placed),
                "requests_waiting": 0,
                "unplaced": 0,
                "tokens_per_second": sum(each["tokens_per_second"] for each in executors),
                "prompt_tokens_per_second": 100.0,
                "hit_rate": {"device": 0.5, "host": 0.125, "peer": 0.0, "disk": 0.0, "redis": 0.0},
            },
            "gateways": [{"gateway_id": "gateway-0", "state": "ready", "requests": len(self.placed)}],
            "executors": executors,
            "consoles": len(self.streams),
        }

    def requests(self) -> dict[str, Any]:
        running = [
            {
                "request_id": name,
                "client_request_id": "",
                "key": "",
                "executor_id": at,
                "status": "decoding",
                "prompt_tokens": 284,
                "output_tokens": 12,
                "computed_tokens": 284,
                "blocks": 19,
                "shared_blocks": 17,
                "cached_tokens": {"device": 32, "host": 240},
                "preemptions": 0,
                "arrived_seconds_ago": 1.5,
                "queue_seconds": 0.0004,
                "first_token_seconds": 0.012,
            }
            for name, at in self.placed.items()
        ]
        return {"running": running, "waiting": [], "ended": [], "truncated": False}

    def prefixes(self) -> dict[str, Any]:
        trunk = {"id": 0, "parent": -1, "depth": 1, "num_blocks": 17, "forks": 8, "references": len(self.placed) // 2}
        runs = [trunk] + [
            {"id": number, "parent": 0, "depth": 18, "num_blocks": number, "forks": 0, "references": number % 3}
            for number in range(1, 9)
        ]
        for run in runs:
            run |= {"tiers": {"device": run["num_blocks"], "host": 0}, "price": 0.004, "text": "class Point:"}  # type: ignore[operator]
        evictions = [{"block": 11, "depth": 25, "price": 0.0001, "why": "not used for 40 s"}]
        return {
            "executors": [
                {"executor_id": name, "runs": runs, "saved_blocks": 99, "next_evictions": evictions, "truncated": False}
                for name in self.executors
            ]
        }

    async def block(self, request: web.Request) -> web.Response:
        self._check(request)
        executor = self.executors[request.query["executor"]]
        block = int(request.query["block"])
        return web.json_response(
            {
                "block": block,
                "state": STATES[executor.states[block]],
                "hash": f"{block:032x}",
                "references": 3,
                "requests": ["0" * 32],
                "depth": 4,
                "tokens": 16,
                "copies": {"host": 7},
                "elsewhere": [{"executor_id": "executor-9", "tier": "host", "block": 12}],
                "age_seconds": 3.25,
                "price": 0.002,
            }
        )

    async def abort(self, request: web.Request) -> web.Response:
        self._check(request)
        self.aborted.append(request.match_info["name"])
        self.placed.pop(request.match_info["name"], None)
        self._count()
        return web.Response(status=204)

    async def request(self, request: web.Request) -> web.Response:
        self._check(request)
        name = request.match_info["name"]
        if name not in self.placed:
            return web.json_response({"error": {"message": f"no request {name} is known"}}, status=404)
        history = [
            {
                "seconds_ago": 1.4,
                "kind": "started",
                "method": "load",
                "device_tokens": 32,
                "loaded_tokens": 240,
                "source": "host",
                "predicted_seconds": {"load": 0.003, "recompute": 0.02},
                "actual_seconds": 0.004,
            },
            {"seconds_ago": 1.0, "kind": "preempted", "reason": "decodes", "blocks": 19, "freed": 2},
            {"seconds_ago": 0.7, "kind": "resumed", "method": "load", "device_tokens": 272},
        ]
        sequence = {
            "index": 0,
            "status": "running",
            "num_prompt_tokens": 284,
            "num_output_tokens": 12,
            "num_computed_tokens": 295,
            "num_blocks": 19,
            "shared": 17,
            "preemptions": 1,
            "history": history,
        }
        return web.json_response(
            {
                "request_id": name,
                "client_request_id": "",
                "key": "",
                "priority": 0,
                "arrived_seconds_ago": 1.5,
                "queue_seconds": 0.1,
                "first_token_seconds": 0.3,
                "executors": [{"executor_id": self.placed[name], "seconds_ago": 1.45}],
                "cached_tokens": {"device": 32, "host": 240},
                "sequences": [sequence],
                "truncated": False,
            }
        )

    async def explain(self, request: web.Request) -> web.Response:
        return web.json_response(
            {
                "request_id": request.match_info["name"],
                "sentences": ["It waited 100 ms, because two prefills were before it."],
            }
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
