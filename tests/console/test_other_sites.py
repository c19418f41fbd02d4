"""Requests that a page of another site can send, in a real browser, to a server here that has no API keys."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from playwright.async_api import async_playwright

from tests.console.chromium import chromium_path
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.server import MODEL, serving

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

ATTACK = """
async (server) => {
  const untyped = (body) => new Blob([JSON.stringify(body)]);
  const abort = "/console/requests/one/abort";
  const completion = {model: "MODEL", prompt: "hi", max_tokens: 1};
  const attempts = [
    ["/v1/completions", {method: "POST", mode: "no-cors", body: untyped(completion)}],
    ["/v1/completions", {method: "POST", mode: "no-cors", body: JSON.stringify(completion)}],
    ["/v1/unload_lora_adapter", {method: "POST", mode: "no-cors", body: untyped({lora_name: "sql"})}],
    [abort, {method: "POST", mode: "no-cors"}],
    [abort, {method: "POST", mode: "no-cors", referrerPolicy: "no-referrer", body: untyped({})}],
    ["/console/stream", {mode: "no-cors"}],
  ];
  for (const [path, options] of attempts) await fetch(server + path, options).catch(() => null);
  const form = document.createElement("form");
  Object.assign(form, {method: "POST", action: server + "/console/requests/one/abort", target: "frame"});
  const frame = Object.assign(document.createElement("iframe"), {name: "frame"});
  document.body.append(frame, form);
  const loaded = new Promise((resolve) => { frame.onload = resolve; });
  form.submit();
  await Promise.race([loaded, new Promise((resolve) => setTimeout(resolve, 3000))]);
}
""".replace("MODEL", MODEL)


@asynccontextmanager
async def other_site() -> AsyncIterator[int]:
    """The port of a web server with an empty page."""

    async def page(_: web.Request) -> web.Response:
        return web.Response(text="<!doctype html><title>another site</title>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def test_a_page_of_another_site_changes_nothing_and_reads_nothing() -> None:
    scheduler = FakeScheduler()
    scheduler.endable = {"one"}
    rules = "--host-resolver-rules=MAP *.example 127.0.0.1"
    async with other_site() as port, serving(scheduler) as server, async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium_path(), args=["--no-sandbox", rules])
        try:
            page = await browser.new_page()
            for origin in (f"http://evil.example:{port}", f"http://localhost:{port}"):
                await page.goto(origin)
                await page.evaluate(ATTACK, f"http://127.0.0.1:{server.port}")
            await asyncio.sleep(0.2)
            assert not scheduler.submits
            assert scheduler.endable == {"one"}
            # The name leads to this server after the page was loaded: to the browser, it is the page's own server.
            for path in ("/console", "/console/stream", "/v1/models"):
                answer = await page.goto(f"http://rebound.example:{server.port}{path}")
                assert answer is not None
                assert answer.status == 403
            answer = await page.goto(f"http://localhost:{server.port}/console")
            assert answer is not None
            assert answer.status == 200
            ended = (
                "fetch('/console/requests/one/abort', {method: 'POST', headers: {'Content-Type': 'application/json'}})"
            )
            assert await page.evaluate(f"{ended}.then((answer) => answer.status)") == 204
        finally:
            await browser.close()
