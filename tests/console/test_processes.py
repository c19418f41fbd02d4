"""The console's page over real processes: its content while they have nothing to do, much to do, or die."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Browser, Locator, expect

from benchmarks.processes import EXECUTOR, Cluster, Served, running, serving
from tests.console.chromium import VIEWS, Console, console

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

BEGINNING = (
    "import os\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n\n" * 4
)
"""The shared beginning of all prompts."""

WAIT = 60_000
"""ms in which an expected text has to appear, on a machine that has other work."""


@contextlib.asynccontextmanager
async def streams(server: Served, count: int, prefix: str = BEGINNING) -> AsyncIterator[None]:
    """Keep so many requests running that share a prefix; each begins anew when it has ended."""

    async def again_and_again(client: aiohttp.ClientSession, number: int) -> None:
        turn = 0
        while True:
            prompt = f"{prefix}# part {number}.{turn % 5}\n" + f"def method_{number}_{turn % 5}(self):\n" * 6
            body = {"model": "pagewise-demo", "prompt": prompt, "max_tokens": 150, "ignore_eos": True, "seed": turn}
            async with client.post(f"{server.url}/v1/completions", json=body) as answer:
                await answer.read()
            turn += 1

    no_limit: Any = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=no_limit, timeout=aiohttp.ClientTimeout(300)) as client:
        tasks = [asyncio.create_task(again_and_again(client, number)) for number in range(count)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def title(page: Console, pattern: str) -> None:
    """Wait until the first caption, or one of the others, has some text."""
    captions = page.page.get_by_role("region", name="What happens")
    await expect(captions).to_contain_text(re.compile(pattern), timeout=WAIT)


async def test_idle_load_pressure_and_an_executor_that_is_killed(browser: Browser) -> None:
    with serving("--executors", "2", "--num-blocks", "700", "--host-memory", "32MiB") as server:
        async with console(browser, server.url, scheme="dark") as page:
            await page.show("memory")
            await expect(page.page.locator("canvas")).to_have_count(2, timeout=WAIT)
            await title(page, "Idle: no request runs")
            await page.screenshot("idle")
            idle = await page.picture()
            async with streams(server, 64):
                await title(page, r"requests run on 2 executors.*it saves [\d,]+ blocks")
                await page.page.wait_for_timeout(6_000)
                assert await page.picture() != idle
                await page.screenshot("64-streams")
                for view in VIEWS:
                    await page.show(view)
                    await page.page.wait_for_timeout(2_500)
                    await page.check_accessible()
                    await page.screenshot(f"64-streams-{view}")
                await page.show("memory")
                os.kill(server.pids(EXECUTOR)[0], signal.SIGKILL)
                await title(page, r"executor-\d is gone")
                await page.page.wait_for_timeout(1_500)
                await page.screenshot("executor-killed")


async def test_memory_pressure_demotes_blocks_to_the_host(browser: Browser) -> None:
    with serving("--num-blocks", "160", "--host-memory", "32MiB") as server:
        async with console(browser, server.url) as page, streams(server, 16, ""):
            await page.show("memory", executor="executor-0", tier="device,host")
            await title(page, r"Memory pressure: [\d,]+ blocks? demoted to host in the last minute")
            await expect(page.page.locator("canvas")).to_have_count(2, timeout=WAIT)
            await page.page.wait_for_timeout(4_000)
            await page.screenshot("memory-pressure")


PROMPT = (
    "import os\nimport sys\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n"
)


async def complete(url: str, **fields: Any) -> Any:
    """The answer to a prompt of several blocks."""
    body = {"model": "pagewise-demo", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, **fields}
    async with aiohttp.ClientSession() as client, client.post(f"{url}/v1/completions", json=body) as answer:
        return await answer.json()


async def cached_block(page: Console, executor: str) -> Locator:
    """The details of a block whose content is known, below the mouse."""
    async with aiohttp.ClientSession() as client:
        for block in range(400):
            async with client.get(f"{page.url}/console/block?executor={executor}&block={block}") as answer:
                if "hash" in await answer.json():
                    break
    await page.show("memory", executor=executor, first=str(block), count="16")
    await page.page.locator("canvas").hover(position={"x": 5, "y": 5})
    details = page.page.get_by_role("region", name="The block that is pointed at")
    await expect(details.get_by_role("heading").first).to_have_text(f"{executor}, device: block {block}")
    await expect(details).to_contain_text("Tokens16")
    return details


async def test_a_chat_shows_probabilities_the_cache_and_the_text_of_blocks(browser: Browser) -> None:
    with serving("--num-blocks", "400", "--console-shows-text") as server:
        async with console(browser, server.url) as page:
            await page.show("try")
            send, message = page.page.get_by_role("button", name="Send"), page.page.get_by_label("Message")
            for again in (False, True):
                await message.fill(
                    "Write a class named Point with the methods area, move, scale, rotate and read_file."
                )
                await page.page.get_by_label("Most tokens").fill("12")
                await send.click()
                cached = r"[1-9]\d*" if again else "0"
                summary = re.compile(rf"Prompt: \d+ tokens, {cached} of them from the cache")
                await expect(page.page.locator(".prompt summary")).to_have_text(summary, timeout=WAIT)
                await expect(page.page.locator(".prompt mark")).to_have_count(int(again))
                await expect(page.page.locator(".answer .token")).not_to_have_count(0)
                await page.page.locator(".answer").focus()
                await page.page.keyboard.press("ArrowRight")
                alternatives = page.page.locator(".alternatives")
                await expect(alternatives).to_contain_text(re.compile(r"Log-probability -?\d+\.\d{3}"))
                await expect(alternatives.get_by_role("listitem")).not_to_have_count(0)
                await expect(send).to_be_enabled(timeout=WAIT)
                if not again:
                    await page.page.get_by_role("button", name="New chat").click()
            await complete(server.url)
            details = await cached_block(page, "executor-0")
            await expect(details.locator(".block-text")).not_to_be_empty()
            await page.show("prefixes")
            await page.page.get_by_text("The tree as a table").click(timeout=WAIT)
            await expect(page.page.get_by_role("columnheader", name="Text")).to_be_visible()
            await expect(page.page.locator("td.text").filter(has_text="import os")).not_to_have_count(0)
            await page.check_accessible()


@pytest.fixture
def two_simulated(tmp_path: Path) -> Iterator[Cluster]:
    with running(Cluster(tmp_path, simulate=0.05), 2) as cluster:
        yield cluster


async def test_texts_are_not_shown_unless_asked_for(browser: Browser, two_simulated: Cluster) -> None:
    answer = await complete(two_simulated.url)
    assert answer["usage"]["prompt_tokens"] > 16
    async with console(browser, two_simulated.url) as page:
        await page.show("requests")
        row = page.page.get_by_role("row").filter(has_text="ended: length")
        executor = await row.get_by_role("cell").nth(1).inner_text(timeout=WAIT)
        details = await cached_block(page, executor)
        await expect(details.locator(".block-text")).to_have_count(0)
        await page.show("prefixes")
        await page.page.get_by_text("The tree as a table").first.click(timeout=WAIT)
        await expect(page.page.get_by_role("columnheader", name="Blocks")).to_have_count(1)
        await expect(page.page.get_by_role("columnheader", name="Text")).to_have_count(0)
        for text in ("import os", "Point"):
            assert text not in await page.page.content()
        for colour, label in (("Prefix", "prefix of block"), ("Age", "used last"), ("Tier", "device")):
            await page.show("memory", executor=executor)
            await page.page.locator(".choice label").get_by_text(colour, exact=True).click()
            legend = page.page.get_by_role("region", name="Legend")
            await expect(legend).to_contain_text(label, timeout=WAIT)


async def test_a_request_is_shown_as_moved_when_its_executor_is_stopped(
    browser: Browser, two_simulated: Cluster
) -> None:
    running_on = {process.name: process for process in two_simulated.executors}
    request = asyncio.create_task(complete(two_simulated.url, max_tokens=600))
    async with console(browser, two_simulated.url) as page:
        await page.show("requests")
        row = page.page.get_by_role("row").filter(has_text="first-")
        place = row.get_by_role("cell").nth(1)
        executor = await place.inner_text(timeout=WAIT)
        (other,) = running_on.keys() - {executor}
        running_on[executor].signal(signal.SIGTERM)
        await expect(place).to_have_text(f"{other} moved from {executor}", timeout=WAIT)
        await row.get_by_role("link").click()
        found = page.page.get_by_role("article", name="The request that was found")
        await expect(found).to_contain_text(
            re.compile(rf"on {executor} after .*, then on {other} after "), timeout=WAIT
        )
        await expect(found).to_contain_text(f"because the executor {executor} was stopped", timeout=WAIT)
        await expect(found.locator(".places .place")).to_have_count(2)
        assert (await request)["usage"]["completion_tokens"] == 600
        await expect(page.page.get_by_role("row").filter(has_text="ended: length")).to_have_count(1, timeout=WAIT)
