"""A headless Chromium, and the page operations of all tests of the console."""

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Browser, Page, async_playwright, expect

SCREENSHOTS = Path(__file__).parents[2] / "build" / "console-screenshots"
VIEWS = {"memory": "Memory map", "prefixes": "Prefix tree", "requests": "Requests", "fleet": "Fleet", "try": "Try it"}
WIDE, NARROW = 1280, 390


def chromium_path() -> str:
    """Where Debian's Chromium is. Without it a test is skipped, but not in CI."""
    path = shutil.which("chromium")
    if path is None and not os.environ.get("CI"):
        pytest.skip("there is no chromium: apt install chromium")
    assert path is not None, "there is no chromium: apt install chromium"
    return path


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    path = chromium_path()
    async with async_playwright() as playwright:
        # Its sandbox does not work for root, and in few containers.
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


class Console:
    """An open page. ``errors``: errors and warnings in its console, and exceptions."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.errors: list[str] = []
        page.on("console", self._listen)
        page.on("pageerror", lambda error: self.errors.append(str(error)))

    def _listen(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} ({message.location.get('url')})")

    async def show(self, view: str, **params: str) -> None:
        """Show a view by its address, and wait until the stream is live."""
        query = "&".join(f"{name}={value}" for name, value in params.items())
        await self.page.goto(f"{self.url}/console#/{view}{'?' if query else ''}{query}")
        await expect(self.page.locator(".connection")).to_have_text("live", timeout=15_000)

    async def picture(self) -> str:
        """The picture of the first map when nothing flashes: a text that is the same for the same picture."""
        await self.page.wait_for_timeout(1_000)
        canvas = self.page.locator("canvas").first
        return str(await canvas.evaluate("(canvas) => canvas.toDataURL()"))

    async def screenshot(self, name: str, whole: bool = True) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        path = SCREENSHOTS / f"{name}.png"
        await self.page.screenshot(path=path, full_page=whole)
        return path

    async def check_accessible(self) -> None:
        results = await Axe().run(self.page)
        found = {
            f"{each['id']} ({each['help']}) {node['target']} {node['failureSummary']}"
            for each in results.response["violations"]
            for node in each["nodes"]
        }
        assert not found, "\n".join(sorted(found)[:10])

    async def check_fits(self) -> None:
        """Nothing makes the page wider than the window."""
        too_wide = await self.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert too_wide <= 0, f"the page is {too_wide} pixels wider than the window"


@contextlib.asynccontextmanager
async def console(
    browser: Browser, url: str, width: int = WIDE, height: int = 900, scheme: Any = "light", errors: bool = False
) -> AsyncIterator[Console]:
    """A new page. ``errors``: whether it may write to its console, since the server is made to fail."""
    page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
    opened = Console(page, url)
    try:
        yield opened
        assert errors or not opened.errors, opened.errors
    finally:
        await page.close()
