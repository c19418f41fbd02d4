"""The console's routes: rights to see it, that views are shared, and that slow consoles delay nothing."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from pagewise_gateway.http.console import feeds
from pagewise_gateway.http.console.feeds import MAX_CONSOLES, Watcher
from pagewise_gateway.metrics import Metrics
from pagewise_shared.protocol import ConsoleView

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import Server, serving

VIEWS = {
    "fleet": b'{"model":"m"}',
    "requests": b'{"running":[]}',
    "map": b'{"executor_id":"a"}\n{"executor_id":"b"}',
    "prefixes": b'{"executors":[]}',
    "block": b'{"block":7}',
}


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler(views=dict(VIEWS))


@asynccontextmanager
async def watching(server: Server, query: str = "", **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    """A console that is open."""
    async with server.http.get(f"{server.url}/console/stream?{query}", headers=headers) as response:
        yield response


async def events(response: aiohttp.ClientResponse, number: int) -> list[tuple[str, dict[str, object]]]:
    """The next events of a stream: names and data."""
    found: list[tuple[str, dict[str, object]]] = []
    name = ""
    async with asyncio.timeout(10):
        while len(found) < number:
            read = await response.content.readline()
            assert read, "the stream has ended"
            line = read.decode().rstrip()
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append((name, json.loads(line.removeprefix("data: "))))
    return found


async def test_a_console_gets_every_part(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server, watching(server) as response:
        assert response.content_type == "text/event-stream"
        seen = await events(response, 5)
        assert sorted(name for name, _ in seen) == ["fleet", "map", "map", "prefixes", "requests"]
        assert ("fleet", {"model": "m", "consoles": 1}) in seen
        assert [data for name, data in seen if name == "map"] == [{"executor_id": "a"}, {"executor_id": "b"}]
        scheduler.views["requests"] = b'{"running":[1]}'
        assert await events(response, 1) == [("requests", {"running": [1]})], "only what has changed"


async def test_a_part_of_which_nothing_is_left_does_not_end_the_stream(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server, watching(server, "parts=map") as response:
        assert len(await events(response, 2)) == 2
        scheduler.views["map"] = b""  # the last executor has gone
        await asyncio.sleep(1.2)
        scheduler.views["map"] = b'{"executor_id":"c"}'
        assert await events(response, 1) == [("map", {"executor_id": "c"})]


async def test_one_stream_has_the_maps_of_several_tiers(scheduler: FakeScheduler) -> None:
    async with (
        serving(scheduler) as server,
        watching(server, "parts=map&executor=a&tier=device,host,device") as response,
    ):
        await events(response, 4)
        views = [query.view for query in scheduler.queries if query.view is not None]
        assert [view.tier for view in views[:2]] == ["device", "host"]


async def test_consoles_with_the_same_view_share_one_answer(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server:
        query = "parts=map&executor=a&tier=host&first=16&count=64&colour=age&cells=32"
        async with (
            watching(server, query) as one,
            watching(server, query) as two,
            watching(server, "parts=map") as all_,
        ):
            for response in (one, two, all_):
                assert len(await events(response, 2)) == 2
            await asyncio.sleep(1.2)
            view = ConsoleView("map", "a", "host", 16, 64, "age", 32)
            asked = [query.view for query in scheduler.queries]
            assert {*asked} == {view, ConsoleView("map")}
            assert asked.count(view) <= 5, "once for both"
            assert 'consoles_open{model_name="fake/model"} 3.0' in server.shown()
        await scheduler.until(lambda: 'consoles_open{model_name="fake/model"} 0.0' in server.shown())
        before = len(scheduler.queries)
        await asyncio.sleep(0.8)
        assert len(scheduler.queries) == before, "nothing is asked for that nobody watches"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("cells=x", "cells"),
        ("cells=0", "cells"),
        ("cells=5000", "cells"),
        ("first=-1", "first"),
        ("colour=red", "colour"),
        ("colour=age", "executor"),
        ("parts=fleet,what", "parts"),
        ("zoom=1", "zoom"),
        ("executor=a&tier=a,b,c,d,e", "tier"),
        (f"executor=a&tier=device,{'x' * 17}", "tier"),
        (f"executor={'x' * 300}", "executor"),
    ],
)
async def test_bad_views_are_refused(scheduler: FakeScheduler, query: str, named: str) -> None:
    async with serving(scheduler) as server:
        status, body = await server.get(f"/console/stream?{query}")
        assert status == 400
        assert named in str(body)


async def test_what_cannot_be_shown_is_said() -> None:
    async with serving(FakeScheduler(views={"fleet": b"{}"})) as server:
        async with watching(server, "parts=map&executor=gone") as response:
            ((name, data),) = await events(response, 1)
            assert (name, data["part"]) == ("problem", "map")
            assert "no executor 'gone'" in str(data["message"])
            with pytest.raises(TimeoutError):  # it is sent once, although it is asked for twice a second
                async with asyncio.timeout(1.5):
                    await events(response, 1)
        async with watching(server, "parts=requests") as response:
            server.scheduler.silent = True
            await events(response, 1)


async def test_a_problem_that_is_over_is_taken_back() -> None:
    async with serving(FakeScheduler(views={"fleet": b"{}"})) as server, watching(server, "parts=map") as response:
        ((name, data),) = await events(response, 1)
        assert (name, bool(data["message"])) == ("problem", True)
        server.scheduler.views["map"] = b""  # there is no executor, of which a map could be shown
        ((name, data),) = await events(response, 1)
        assert (name, data["message"]) == ("problem", "")


async def test_a_stream_without_news_shows_that_the_gateway_lives(
    scheduler: FakeScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "ALIVE_SECONDS", 0.2)
    async with serving(scheduler) as server, watching(server, "parts=prefixes") as response:
        await events(response, 1)
        async with asyncio.timeout(20):
            assert (await response.content.readline(), await response.content.readline()) == (
                b"\n",
                b": nothing has changed\n",
            )


async def test_everything_but_the_page_needs_an_operator_s_key(scheduler: FakeScheduler, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("bob: sk-bob\nops: sk-ops operator=yes\n")
    scheduler.endable = {"id"}
    async with serving(scheduler, api_keys_file=str(keys)) as server:
        for path in ("/", "/console", "/console/assets/index.html"):
            async with server.http.get(server.url + path) as response:
                assert response.status == 200
        paths = {
            "/console/stream": "GET",
            "/console/block?executor=a&block=1": "GET",
            "/console/requests/id/abort": "POST",
        }
        for path, method in paths.items():
            for key, status in (("", 401), ("sk-no", 401), ("sk-bob", 403)):
                headers = {"Authorization": f"Bearer {key}"} if key else {}
                async with server.http.request(method, server.url + path, headers=headers) as response:
                    assert response.status == status, (path, key)
        assert scheduler.queries == []
        assert scheduler.endable == {"id"}
        async with watching(server, Authorization="Bearer sk-ops") as response:
            await events(response, 1)


async def test_the_page_comes_with_tags_and_a_policy(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server:
        async with server.http.get(server.url + "/", allow_redirects=False) as response:
            assert (response.status, response.headers["Location"]) == (302, "/console")
        async with server.http.get(server.url + "/console") as response:
            assert (response.status, response.content_type) == (200, "text/html")
            assert response.headers["Content-Security-Policy"].startswith("default-src 'self';")
            tag = response.headers["ETag"]
        async with server.http.get(server.url + "/console", headers={"If-None-Match": tag}) as response:
            assert (response.status, await response.read()) == (304, b"")
        for path in ("/console/assets/nothing.js", "/console/assets/..%2F__init__.py", "/console/nothing", "/nowhere"):
            status, body = await server.get(path)
            assert status == 404
            assert "/console" not in str(body).partition("there are")[2]


async def test_a_request_is_aborted(scheduler: FakeScheduler) -> None:
    scheduler.endable = {"one", "two"}
    async with serving(scheduler) as server:
        for name, status in (("one", 204), ("chatcmpl-two", 204), ("one", 404), ("x" * 400, 404)):
            async with server.http.post(f"{server.url}/console/requests/{name}/abort") as response:
                assert response.status == status
        elsewhere = {"Sec-Fetch-Site": "cross-site"}
        async with server.http.post(f"{server.url}/console/requests/one/abort", headers=elsewhere) as response:
            assert response.status == 403


async def test_a_block(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server:
        assert await server.get("/console/block?executor=a&block=7&tier=host") == (200, {"block": 7})
        assert scheduler.queries[-1].view == ConsoleView("block", "a", "host", block=7)
        del scheduler.views["block"]
        assert (await server.get("/console/block?executor=a&block=7"))[0] == 404
        assert (await server.get("/console/block?executor=a"))[0] == 400


async def test_without_a_console_there_is_none(scheduler: FakeScheduler) -> None:
    async with serving(scheduler, console=False) as server:
        for path in ("/", "/console", "/console/stream", "/console/assets/index.html", "/console/block"):
            assert (await server.get(path))[0] == 404


async def test_the_number_of_consoles_is_bounded(scheduler: FakeScheduler) -> None:
    async with serving(scheduler) as server:
        opened = [await server.http.get(f"{server.url}/console/stream?parts=fleet") for _ in range(MAX_CONSOLES)]
        async with server.http.get(f"{server.url}/console/stream") as response:
            assert response.status == 429
        opened.pop().close()
        async with asyncio.timeout(10):
            while True:
                async with server.http.get(f"{server.url}/console/stream") as response:
                    if response.status == 200:
                        break
        for one in opened:
            one.close()


async def test_a_slow_console_gets_the_newest_frames_only() -> None:
    metrics, view, other = Metrics("m"), ConsoleView("fleet"), ConsoleView("map")
    watcher = Watcher(metrics)
    for number in range(1000):
        watcher.put(view, b"%d," % number)
    watcher.put(other, b"map")
    assert await watcher.take() == b"999,map"
    assert metrics.console_frames_dropped._value.get() == 999
    watcher.close()
    assert await watcher.take() == b""


async def test_consoles_end_when_the_gateway_stops(scheduler: FakeScheduler) -> None:
    async with aiohttp.ClientSession() as http:
        async with serving(scheduler) as server:
            response = await http.get(f"{server.url}/console/stream")
            await events(response, 5)
        async with asyncio.timeout(10):
            await response.content.read()
