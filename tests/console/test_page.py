"""The console's page in a real browser, over executors that are made up."""

import pytest
from playwright.async_api import Browser, expect

from tests.console.chromium import NARROW, VIEWS, WIDE, console
from tests.console.fake_gateway import FakeGateway

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

FIRST = "0" * 32
"""The id of the first request that runs."""


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_every_view_is_accessible(
    browser: Browser, gateway: FakeGateway, url: str, scheme: str, width: int
) -> None:
    gateway.load(24)
    async with console(browser, url, width, scheme=scheme) as page:
        for view, title in VIEWS.items():
            await page.show(view, **({"id": FIRST} if view == "requests" else {}))
            await expect(page.page).to_have_title(f"{title} · Pagewise console")
            await page.page.wait_for_timeout(400)
            if view == "try":
                await page.page.get_by_role("button", name="Send").click()
                await expect(page.page.locator(".answer")).to_have_text("def read_file")
            # Folded parts are checked too.
            await page.page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
            await page.check_accessible()
            await page.check_fits()
            await page.screenshot(f"fake-{view}-{scheme}-{width}")


async def test_the_map_changes_when_load_comes(browser: Browser, gateway: FakeGateway, url: str) -> None:
    async with console(browser, url) as page:
        await page.show("memory")
        await expect(page.page.locator(".caption .title")).to_have_text("Idle: no request runs")
        empty = await page.picture()
        assert await page.picture() == empty
        gateway.load(24)
        await expect(page.page.locator(".caption .title")).to_contain_text("24 requests run on 2 executors")
        assert await page.picture() != empty
        summary = page.page.get_by_role("application").first
        assert "executor-0, device: 480 blocks; " in (await summary.get_attribute("aria-label") or "")


async def test_what_presses_and_who_is_gone_is_said(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(24)
    async with console(browser, url) as page:
        title = page.page.locator(".caption .title")
        await page.show("memory")
        gateway.executors["executor-0"].demoting = True
        await expect(title).to_contain_text("blocks demoted to host in the last minute", timeout=10_000)
        gateway.kill("executor-1")
        await expect(title).to_have_text("executor-1 is gone: 12 requests moved to executor-0", timeout=10_000)
        await expect(page.page.get_by_role("article", name="executor-1 is gone")).to_be_visible()
        await page.show("fleet")
        await expect(page.page.get_by_role("article", name="executor-1 is gone")).to_be_visible()


async def test_everything_is_reached_with_keys(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(4)
    async with console(browser, url) as page:
        keyboard = page.page.keyboard
        await page.show("memory")
        await keyboard.press("Tab")
        await expect(page.page.get_by_text("Skip to the content")).to_be_focused()
        for _ in range(30):
            if await page.page.evaluate("document.activeElement.getAttribute('role')") == "application":
                break
            await keyboard.press("Tab")
        details = page.page.get_by_role("region", name="The block that is pointed at")
        await expect(details.get_by_role("heading")).to_have_text("executor-0, device: block 0")
        await keyboard.press("ArrowRight")
        await expect(details.get_by_role("heading")).to_have_text("executor-0, device: block 1")
        await expect(details).to_contain_text("executor-9 host 12")
        await keyboard.press("+")
        await expect(page.page.locator(".map-title").first).to_contain_text("of 480")
        assert "executor=executor-0" in page.page.url
        # The map was drawn anew for one executor, and keeps the focus.
        await keyboard.press("0")
        await expect(page.page.locator(".map-title")).to_contain_text("480 blocks")
        await keyboard.press("ArrowDown")
        await keyboard.press("Enter")
        await expect(details).to_contain_text("Kept in view")
        await keyboard.press("Escape")
        await expect(details).not_to_contain_text("Kept in view")
        await keyboard.press("Escape")
        await expect(page.page.locator("canvas")).to_have_count(2)


async def test_a_large_pool_is_zoomed_with_the_wheel_and_dragged(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    gateway.load(24)
    async with console(browser, url) as page:
        await page.show("memory", executor="executor-1")
        canvas = page.page.locator("canvas")
        await canvas.hover(position={"x": 300, "y": 200})
        for _ in range(4):
            await page.page.mouse.wheel(0, -300)
        title = page.page.locator(".map-title")
        await expect(title).to_contain_text("of 1,600")
        before = page.page.url
        await page.page.mouse.down()
        await page.page.mouse.move(600, 700, steps=4)
        await page.page.mouse.up()
        assert page.page.url != before
        await page.page.get_by_role("button", name="Whole pool").click()
        await expect(title).to_contain_text("1,600 blocks")


async def test_a_key_is_asked_for_and_kept_for_the_tab(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.key = "secret"
    async with console(browser, url, errors=True) as page:
        await page.page.goto(f"{url}/console")
        field = page.page.get_by_label("API key of an operator")
        await field.fill("wrong")
        await page.check_accessible()
        await field.press("Enter")
        await expect(page.page.get_by_role("alert")).to_have_text("this key is not known")
        await field.fill("secret")
        await field.press("Enter")
        await expect(page.page.locator(".connection")).to_have_text("live")
        await page.page.reload()
        await expect(page.page.locator(".connection")).to_have_text("live")
        await page.page.get_by_role("button", name="Forget key").click()
        await expect(field).to_be_visible()


async def test_a_broken_stream_is_said_and_opened_again(browser: Browser, gateway: FakeGateway, url: str) -> None:
    async with console(browser, url, errors=True) as page:
        await page.show("memory")
        gateway.down = True
        gateway.cut()
        await expect(page.page.get_by_role("alert")).to_contain_text("Disconnected")
        await page.check_accessible()
        await page.screenshot("fake-disconnected")
        gateway.down = False
        await expect(page.page.locator(".connection")).to_have_text("live", timeout=15_000)
        await expect(page.page.get_by_role("alert")).to_have_count(0)


async def test_a_request_is_found_explained_and_aborted(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(3)
    async with console(browser, url, errors=True) as page:
        await page.show("requests")
        search = page.page.get_by_label("Find a request")
        await search.fill("unknown")
        await search.press("Enter")
        await expect(page.page.get_by_role("alert")).to_have_text("no request unknown is known")
        await search.fill(FIRST)
        await search.press("Enter")
        found = page.page.get_by_role("article", name="The request that was found")
        await expect(found).to_contain_text("because other sequences had all rows of the executor")
        await expect(found).to_contain_text(
            "240 were loaded from where they lay on the host, which took 4 ms (3 ms had been predicted)"
        )
        await expect(found).to_contain_text("it let go of 19 blocks")
        await found.get_by_role("button", name="Abort…").click()
        await expect(found).to_contain_text("Its client gets what was generated so far, with the finish reason abort")
        await found.get_by_role("button", name="Abort it").click()
        await expect(found).to_contain_text("It is being aborted.")
        assert gateway.aborted == [FIRST]
        await expect(page.page.locator(f"tr a[href$='{FIRST}']")).to_have_count(0)


async def test_a_chat_shows_probabilities_and_what_was_cached(browser: Browser, gateway: FakeGateway, url: str) -> None:
    async with console(browser, url) as page:
        await page.show("try")
        await page.page.get_by_role("button", name="Send").click()
        await expect(page.page.locator(".prompt summary")).to_have_text("Prompt: 3 tokens, 1 of them from the cache")
        await expect(page.page.locator(".prompt mark")).to_contain_text("<|user|>")
        answer = page.page.locator(".answer")
        await answer.focus()
        await page.page.keyboard.press("ArrowRight")
        await page.page.keyboard.press("ArrowRight")
        await expect(page.page.locator(".alternatives")).to_contain_text("Log-probability -0.900")
        await expect(page.page.locator(".alternatives .this")).to_contain_text("41%")


async def test_the_theme_is_chosen_and_kept(browser: Browser, gateway: FakeGateway, url: str) -> None:
    async with console(browser, url) as page:
        await page.show("memory")
        html = page.page.locator("html")
        await expect(html).to_have_attribute("data-theme", "light")
        button = page.page.get_by_role("button", name="Theme")
        await button.click()
        await button.click()
        await expect(html).to_have_attribute("data-theme", "dark")
        await page.page.reload()
        await expect(html).to_have_attribute("data-theme", "dark")


async def test_nothing_grows_and_nothing_is_drawn_without_change(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    """Some thousand updates, as of half an hour."""
    gateway.load(24)
    gateway.pause = 0.01
    async with console(browser, url) as page:
        await page.show("memory")
        session = await page.page.context.new_cdp_session(page.page)
        await session.send("Performance.enable")

        async def memory() -> tuple[float, float]:
            await session.send("HeapProfiler.collectGarbage")
            metrics = (await session.send("Performance.getMetrics"))["metrics"]
            values = {each["name"]: each["value"] for each in metrics}
            return values["JSHeapUsedSize"], values["Nodes"]

        await page.page.wait_for_timeout(4_000)
        grown = True
        for _ in range(3):  # a leak grows in every round, and a slow start only in the first
            if grown:
                heap, nodes = await memory()
                for _ in range(6):
                    gateway.load(24)
                    await page.page.wait_for_timeout(2_000)
                later_heap, later_nodes = await memory()
                grown = later_heap >= heap + 1_000_000 or later_nodes >= nodes + 200
        assert not grown
        gateway.still = True
        gateway.pause = 0.1
        await page.page.wait_for_timeout(2_000)
        await page.page.evaluate(
            """() => {
                const draw = CanvasRenderingContext2D.prototype.drawImage;
                globalThis.drawn = 0;
                CanvasRenderingContext2D.prototype.drawImage = function (...all) {
                    globalThis.drawn += 1;
                    return draw.apply(this, all);
                };
            }"""
        )
        drawn = 1
        for _ in range(8):  # updates that a busy machine still has to draw are drawn first
            if drawn:
                await page.page.evaluate("drawn = 0")
                await page.page.wait_for_timeout(1_500)
                drawn = await page.page.evaluate("drawn")
        assert drawn == 0


async def test_blocks_that_copies_have_filled_are_not_called_released(browser: Browser, url: str) -> None:
    changes = [("free", "cached"), ("copying", "cached"), ("in use", "cached"), ("cached", "free"), ("free", "in use")]
    async with console(browser, url) as page:
        await page.show("memory")
        kinds = await page.page.evaluate(
            "async (changes) => {"
            "  const { changeKind } = await import('/console/assets/map_layout.js');"
            "  return changes.map(([before, after]) => changeKind(before, after));"
            "}",
            changes,
        )
    assert kinds == ["arrived", "arrived", "released", "evicted", "taken"]
