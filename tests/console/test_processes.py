"""The console's page over real processes: what a person sees while they have nothing to do, much to do, or die."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from playwright.async_api import Browser, expect

from benchmarks.processes import EXECUTOR, Served, serving
from tests.console.chromium import VIEWS, Console, console

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

BEGINNING = (
    "import os\n\n\nclass Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n\n" * 4
)
"""What all prompts share."""

WAIT = 60_000
"""ms in which what is expected has to be seen, on a machine that has other work."""


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
    """Wait until the first caption, or one of the others, says something."""
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
