"""The content of the console's views, in a real browser, over invented executors."""

import re
import time

import pytest
from pagewise_scheduler.core.requests.timeline import LENDER_GONE
from pagewise_shared.reports import GatewayState, GroupReport, KeyMemory, KeyState
from playwright.async_api import Browser, Locator, expect

from tests.console.chromium import Console, console
from tests.console.fake_fleet import TRUNK, WHY
from tests.console.fake_gateway import FakeGateway

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="module")]

GROUPS = [
    GroupReport("full", 0, 2, 60, 100, 0),
    GroupReport("window", 1024, 5, 30, 40, 3),
    GroupReport("state", 2, 7, 14, 70, 10),
]

FIRST, SECOND = f"{0:032x}", f"{1:032x}"
"""Ids of requests that run."""


def found(page: Console) -> Locator:
    """The request that is shown."""
    return page.page.get_by_role("article", name="The request that was found")


async def choose(page: Console, option: str) -> None:
    """Click the radio button of that name, as people do: on its text."""
    await page.page.locator(".choice label").get_by_text(option, exact=True).click()


# ---- memory ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("colour", "labels"),
    [
        ("Request", ["shared", FIRST, "cached", "free"]),
        ("Prefix", ["prefix of block 0", "prefix of block 7", "free"]),
        ("Age", ["used last", "unused for 8 or less", "unused for 512 or less", "in use"]),
        ("Tier", ["device", "device and host", "free"]),
    ],
)
async def test_a_radio_button_changes_what_colours_tell(
    browser: Browser, gateway: FakeGateway, url: str, colour: str, labels: list[str]
) -> None:
    gateway.load(4)
    for _ in range(20):
        gateway.executors["executor-0"].step()
    gateway.still = True
    async with console(browser, url) as page:
        await page.show("memory")
        await expect(page.page.locator("canvas")).to_have_count(2)
        legend = page.page.get_by_role("region", name="Legend")
        await expect(legend.get_by_role("heading")).to_have_text("Blocks by state")
        await page.page.get_by_role("combobox", name="Executor").select_option("executor-0")
        await expect(page.page.locator("canvas")).to_have_count(1)
        by_state = await page.picture()
        await choose(page, colour)
        await expect(legend.get_by_role("heading")).to_have_text(f"Blocks by {colour.lower()}")
        for label in labels:
            await expect(legend.get_by_text(label, exact=True)).to_be_visible()
        assert f"colour={colour.lower()}" in page.page.url
        assert await page.picture() != by_state
        await page.check_accessible()
        await choose(page, "State")
        await expect(legend.get_by_role("heading")).to_have_text("Blocks by state")
        assert await page.picture() == by_state


async def test_colours_other_than_states_are_of_one_executor(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(4)
    async with console(browser, url) as page:
        await page.show("memory")
        await choose(page, "Prefix")
        await expect(page.page.locator("canvas")).to_have_count(1)
        assert "executor=executor-0" in page.page.url


async def test_colours_of_ages_are_in_the_order_of_ages(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(4)
    gateway.still = True
    async with console(browser, url) as page:
        await page.show("memory", executor="executor-0", colour="age")
        rows = page.page.get_by_role("region", name="Legend").get_by_role("listitem")
        await expect(rows.filter(has_text="unused for 512 or less")).to_be_visible()
        names = await rows.locator(".name").all_inner_texts()
        ages = ["used last", *(f"unused for {number} or less" for number in (8, 32, 128, 512))]
        assert names[:5] == ages
        assert set(names[5:]) == {"in use", "free"}
        colours = await rows.locator(".swatch").evaluate_all("(all) => all.map((one) => one.style.background)")
        assert (colours[0], colours[4]) == ("rgb(253, 231, 37)", "rgb(68, 1, 84)"), "from yellow to violet"
        assert colours[names.index("in use")] == "rgb(224, 138, 0)", "what has no age has the colour of its state"


async def test_the_mouse_shows_the_block_below_it(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(8)
    gateway.still = True
    async with console(browser, url) as page:
        await page.show("memory", executor="executor-0")
        canvas = page.page.locator("canvas")
        details = page.page.get_by_role("region", name="The block that is pointed at")
        heading = details.get_by_role("heading").first
        await canvas.hover(position={"x": 5, "y": 5})
        await expect(heading).to_have_text("executor-0, device: block 0")
        await expect(details).to_contain_text("References4 (saves 3 blocks)")
        await expect(details).to_contain_text("Copies heredevice 0, host 7")
        await expect(details).to_contain_text("Elsewhereexecutor-9 host 12")
        await expect(details.get_by_role("link")).to_have_count(4)
        await expect(details.get_by_role("link").first).to_have_attribute("href", f"#/requests?id={FIRST}")
        for x in range(15, 800, 10):  # along the first row, to a block that is cached
            await canvas.hover(position={"x": x, "y": 5})
            if (await heading.inner_text()).endswith(f"block {TRUNK}"):
                break
        await expect(heading).to_have_text(f"executor-0, device: block {TRUNK}")
        await expect(details).to_contain_text("Statecached")
        await expect(details).to_contain_text(f"Not used for{40 + TRUNK} blocks that came in since")
        await expect(details).to_contain_text("Price of eviction0.000041")
        await expect(details).to_contain_text(WHY)
        await page.page.mouse.click(*(await _middle(page)))
        await expect(details).to_contain_text("Kept in view")
        await choose(page, "Host")
        await canvas.hover(position={"x": 5, "y": 5})
        await expect(heading).to_have_text("executor-0, host: block 0")
        await page.page.mouse.move(5, 5)
        await expect(details).to_contain_text("Point at a block")


async def _middle(page: Console) -> tuple[float, float]:
    box = await page.page.locator("canvas").bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


async def test_pages_and_snapshots_of_groups_of_layers(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(4)
    gateway.still = True
    async with console(browser, url) as page:
        await page.show("memory")
        layers = page.page.get_by_role("region", name="Pages by layers", exact=True)
        await expect(page.page.locator("canvas")).to_have_count(2)
        await expect(layers).to_have_count(0)
        gateway.executors["executor-0"].groups = GROUPS
        row = layers.get_by_role("row", name="executor-0")
        await expect(row).to_contain_text("full: 60, 100; window 1,024: 30, 40; state: 14, 70")
        await expect(row).to_contain_text("window 1,024: 3; state: 10")
        await expect(row.get_by_role("img")).to_have_attribute(
            "aria-label", re.compile("full in use 13%, full cached 21%")
        )
        await expect(layers).to_contain_text("Snapshots in the last minute")
        await page.page.get_by_role("combobox", name="Executor").select_option("executor-0")
        await choose(page, "Layers")
        legend = page.page.get_by_role("region", name="Legend")
        await expect(legend.get_by_role("heading")).to_have_text("Pages by layers")
        for label in ("full in use", "window 1024 cached", "state cached", "free"):
            await expect(legend.get_by_text(label, exact=True)).to_be_visible()
        await page.page.locator("canvas").hover(position={"x": 5, "y": 5})
        details = page.page.get_by_role("region", name="The block that is pointed at")
        await expect(details.get_by_role("heading").first).to_have_text("executor-0, device: page 0")
        await expect(details).to_contain_text("Pages are shown in the order of the legend")
        await page.check_accessible()
        await page.show("prefixes")
        tree = page.page.get_by_role("article", name="Prefix tree of executor-0")
        await expect(tree.locator("rect.snapshot")).to_have_count(2)
        await expect(tree.locator("rect.snapshot title").last).to_have_text(
            "snapshots behind block 16: state, device, used; 16: state, host"
        )
        await expect(tree).to_contain_text("snapshots: prompts can begin there")
        await tree.get_by_text("The tree as a table").click()
        await expect(tree.get_by_role("columnheader", name="Snapshots behind block")).to_be_visible()
        await expect(tree.get_by_role("cell", name="7: state, device; 16: state, device, used")).to_be_visible()
        await page.check_accessible()


# ---- prefixes --------------------------------------------------------------------------------------------


async def test_prefixes_tell_who_shares_what_that_saves_and_what_goes_next(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    async with console(browser, url) as page:
        await page.show("prefixes")
        shared = page.page.get_by_role("region", name="What is shared")
        await expect(shared).to_contain_text("No prefix is shared now")
        gateway.load(24)
        await expect(shared).to_contain_text("Sharing prefixes saves 216 blocks (6.8 MiB) now")
        await expect(shared).to_contain_text("The most shared prefix is held by 6 block tables at once.")
        tree = page.page.get_by_role("article", name="Prefix tree of executor-0")
        (first, second) = await tree.get_by_role("listitem").all_inner_texts()
        assert first == f"block 18 at depth 19, price 0.000041: {WHY}"
        assert second == f"block 25 at depth 25, price 0.000041: {WHY}"
        await expect(tree.locator("rect.s3 title")).to_contain_text("16 blocks at depth 1, held by 6 block tables")
        await expect(tree.locator("rect.s5 title")).to_contain_text("held by 0 block tables; host")
        await tree.get_by_text("The tree as a table").click()
        rows = tree.get_by_role("row")
        cells = [await row.get_by_role("cell").all_inner_texts() for row in await rows.all()]
        assert cells[1] == ["16", "6", "device", "", "\N{EN DASH}"]
        assert cells[4] == ["3", "0", "device", "1.", "0.00012"]
        assert cells[7] == ["6", "0", "host", "", "0.00025"]
        assert cells[10] == ["9", "0", "device", "2.", "0.00037"]
        assert await rows.count() == 11
        await tree.get_by_role("button", name="branches of").click()
        await expect(rows).to_have_count(2)
        assert "Text" not in await tree.inner_text()


# ---- fleet -----------------------------------------------------------------------------------------------


async def test_the_fleet_tells_links_hit_rates_and_predictions(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    gateway.load(24)
    async with console(browser, url) as page:
        await page.show("fleet")
        scheduler = page.page.get_by_role("region", name="Scheduler")
        await expect(scheduler).to_contain_text("device 50%, host 13%")
        bar = scheduler.get_by_role("img", name="Found in")
        await expect(bar).to_have_attribute("aria-label", "Found in: device 50%, host 13%, peer 0%, disk 0%, redis 0%")
        card = page.page.get_by_role("article", name="executor-0")
        await expect(card).to_contain_text("Prompt tokens from cachedevice 50%, host 13%")
        await expect(card).to_contain_text("Prediction error12%")
        await expect(card).to_contain_text("Requests12 running, 0 waiting")
        await expect(card).to_contain_text("Sharing saves108 blocks")
        links = page.page.get_by_role("region", name="Links").get_by_role("row")
        texts = [re.split(r"\s*\t\s*", await row.inner_text()) for row in await links.all()]
        assert texts[1:] == [
            ["host", "executor-0", "226 µs", "9 µs", "10%", "0"],
            ["executor-1", "executor-0", "1.4 ms", "52 µs", "25%", "3"],
            ["host", "executor-1", "226 µs", "9 µs", "10%", "0"],
            ["executor-0", "executor-1", "1.4 ms", "52 µs", "25%", "3"],
        ]
        gateway.load(0)
        await expect(card).to_contain_text("Prompt tokens from cachenone in the last minute")


async def test_budgets_of_keys_are_shown(browser: Browser, gateway: FakeGateway, url: str) -> None:
    use, unknown = KeyMemory(3 << 29, 1 << 30, 0, None), "\N{EN DASH}"
    gateway.keys = [KeyState("alice", {"device": use, "host": use}, 90), KeyState("bob", {}, 6)]
    async with console(browser, url) as page:
        await page.show("fleet")
        rows = page.page.get_by_role("region", name="API keys").get_by_role("row")
        await expect(rows).to_have_count(4)
        texts = [re.split(r"\s*\t\s*", await row.inner_text()) for row in await rows.all()]
        assert texts[1:] == [
            ["alice", "device", "1.5 GiB", "1 GiB", "0 bytes", unknown, "1.5 tokens/s"],
            ["alice", "host", "1.5 GiB", "1 GiB", "0 bytes", unknown, ""],
            ["bob", *[unknown] * 5, "0.1 tokens/s"],
        ]
        await page.check_accessible()


async def test_the_life_of_gateways_is_shown(browser: Browser, gateway: FakeGateway, url: str) -> None:
    async with console(browser, url) as page:
        await page.show("fleet")
        rows = page.page.get_by_role("region", name="Gateways").get_by_role("row")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(1)).to_contain_text("ready")
        gateway.gateways += [
            GatewayState("gateway-1", "silent", 3),
            GatewayState("gateway-2", "left", 0, "it left (stopped)"),
            GatewayState("gateway-3", "lost", 5, "no heartbeat for 10.1 s"),
        ]
        await expect(rows).to_have_count(5)
        await expect(rows.nth(2)).to_contain_text("silent")
        await expect(rows.nth(3)).to_contain_text("left it left (stopped)")
        await expect(rows.nth(4)).to_contain_text("lost no heartbeat for 10.1 s")
        await expect(rows.nth(4)).to_contain_text("5 ended")
        await page.check_accessible()
        await page.show("memory")
        await expect(page.page.locator(".caption .title")).to_have_text("The gateway gateway-3 is lost")
        happens = page.page.get_by_role("region", name="What happens")
        await expect(happens).to_contain_text("5 requests of its clients ended: no heartbeat for 10.1 s.")
        await expect(happens).to_contain_text("The gateway gateway-1 is silent")


# ---- requests --------------------------------------------------------------------------------------------


async def test_a_time_line_names_the_request_that_it_gave_way_to(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    gateway.load(4)
    async with console(browser, url) as page:
        await page.show("requests", id=FIRST)
        lost = "it let go of 19 blocks, of which 2 became free"
        event = found(page).get_by_role("listitem").filter(has_text="it was preempted")
        await expect(event).to_contain_text(
            f"500 ms after its arrival, it was preempted for request {SECOND} (decoding sequences need blocks): {lost}"
        )
        await expect(found(page).locator(".lane .preempted")).to_have_attribute("title", "preempted: 300 ms")
        chunks = found(page).locator(".lane .chunk")
        await expect(chunks.nth(0)).to_have_attribute("title", re.compile("chunk of 8 tokens: "))
        await expect(chunks.nth(1)).to_have_attribute("title", re.compile("chunk of 4 tokens: "))
        await event.get_by_role("link", name=SECOND).click()
        await expect(found(page)).to_contain_text(f"it started over ({LENDER_GONE}): {lost}")
        await expect(found(page)).not_to_contain_text("preempted")


async def test_sentences_follow_a_request_while_it_runs(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(2)
    async with console(browser, url) as page:
        await page.show("requests", id=FIRST)
        overview = found(page).locator(".why li").first
        await expect(overview).to_contain_text("so far")
        before = await overview.inner_text()
        await expect(overview).not_to_have_text(before, timeout=8_000)
        await expect(overview).to_contain_text("so far")
        gateway.end(FIRST)
        await expect(overview).not_to_contain_text("so far", timeout=8_000)


async def test_the_time_line_of_a_request_that_has_ended_ends_there(
    browser: Browser, gateway: FakeGateway, url: str
) -> None:
    gateway.load(2)
    async with console(browser, url) as page:
        gateway.began = time.monotonic() - 8.0
        gateway.end(FIRST)
        await page.page.wait_for_timeout(3_000)
        await page.show("requests", id=FIRST)
        heading = found(page).get_by_role("heading", name="Time line")
        await expect(heading).to_contain_text(re.compile(r"Time line 9\.[5-9] s from its arrival to its end"))
        await expect(found(page).locator(".axis span").last).to_have_text(re.compile(r"9\.[5-9] s"))
        await expect(found(page)).to_contain_text("It ended with the finish reason length.")
        await expect(page.page.get_by_role("row").filter(has_text="ended: length")).to_have_count(1)


async def test_the_list_says_from_where_requests_have_moved(browser: Browser, gateway: FakeGateway, url: str) -> None:
    gateway.load(2)
    async with console(browser, url) as page:
        await page.show("requests")
        rows = page.page.get_by_role("row")
        await expect(rows.filter(has_text="executor-1")).to_have_count(1)
        await expect(rows.filter(has_text="272")).to_have_count(2)
        gateway.kill("executor-1")
        await expect(rows.filter(has_text="executor-0 moved from executor-1")).to_have_count(1)
        await page.show("requests", id=SECOND)
        await expect(found(page)).to_contain_text(
            "It was placed on executor-1 after 50 ms, then on executor-0 after 900 ms."
        )
        await expect(found(page).locator(".places .place")).to_have_count(2)
