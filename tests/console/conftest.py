"""One browser for the tests of a file, and for each test a gateway that is made up."""

from collections.abc import AsyncIterator

import pytest_asyncio
from playwright.async_api import Browser

from tests.console.chromium import chromium
from tests.console.fake_gateway import FakeGateway, serving_console


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Browser]:
    async with chromium() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def gateway() -> FakeGateway:
    return FakeGateway()


@pytest_asyncio.fixture(loop_scope="module")
async def url(gateway: FakeGateway) -> AsyncIterator[str]:
    async with serving_console(gateway) as address:
        yield address
