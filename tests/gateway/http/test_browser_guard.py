"""Requests that browsers send for web pages of other sites, to a server with and without API keys."""

from pathlib import Path
from typing import Any

import pytest
from pagewise_gateway.http.access import BrowserGuard
from pagewise_shared.config import GatewayConfig
from pagewise_shared.errors import ConfigError

from tests.gateway.server import MODEL, Server, serving

COMPLETION = "/v1/completions"
BODY = b'{"model": "fake/model", "prompt": "hi", "max_tokens": 1}'
JSON = {"Content-Type": "application/json"}


async def status(server: Server, path: str, headers: dict[str, str], body: bytes | None = None) -> int:
    """The status of an answer to exactly these headers."""
    method = "GET" if body is None else "POST"
    async with server.http.request(
        method, server.url + path, data=body, headers=headers, skip_auto_headers=("Content-Type", "User-Agent")
    ) as answer:
        return answer.status


FOREIGN: list[dict[str, str]] = [
    JSON | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    JSON | {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"},
    JSON | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    JSON | {"Origin": "https://evil.example"},
    JSON | {"Origin": "http://127.0.0.1:1"},
    JSON | {"Origin": "null"},
    JSON | {"Origin": "file://"},
    JSON | {"Origin": "http://[bad"},
    JSON | {"Host": "rebound.example:8000"},
    JSON | {"Host": "127.0.0.1.rebound.example"},
    JSON | {"Host": "localhost.rebound.example"},
    JSON | {"Host": "localhost@rebound.example"},
    JSON | {"Host": "localhost:80.rebound.example"},
    JSON | {"Host": "[::1].rebound.example"},
    JSON | {"Host": ":8000"},
    JSON | {"Host": "rebound.example", "Origin": "http://rebound.example", "Sec-Fetch-Site": "same-origin"},
]
FORMS: list[dict[str, str]] = [
    {},
    {"Content-Type": ""},
    {"Content-Type": "Text/Plain; charset=UTF-8"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": "multipart/form-data; boundary=x"},
]
PATHS = [COMPLETION, "/v1/unload_lora_adapter", "/console/requests/one/abort", "/tokenize"]


async def test_pages_of_other_sites_change_nothing_without_keys() -> None:
    """Headers as browsers send them."""
    async with serving() as server:
        server.scheduler.endable = {"one"}
        for path in PATHS:
            for headers in FOREIGN:
                assert await status(server, path, headers, BODY) == 403, headers
            for declared in FORMS:
                assert await status(server, path, declared, BODY) == 415
        assert server.scheduler.endable == {"one"}
        assert not server.scheduler.submits
        for headers in FOREIGN:
            if headers.get("Sec-Fetch-Mode") != "navigate":
                assert await status(server, "/console/stream", headers) == 403


async def test_usual_clients_need_nothing_else_without_keys() -> None:
    async with serving() as server:
        own = server.url.removeprefix("http://")
        usual: list[dict[str, str]] = [
            {},
            {"Host": "localhost"},
            {"Host": "LOCALHOST:8000"},
            {"Host": "app.localhost:1"},
            {"Host": "[::1]:8000"},
            {"Host": "10.2.3.4:8000"},  # a probe of Kubernetes
            {"Host": "gateway:8000"},  # a service of compose
            {"Host": own, "Origin": server.url, "Sec-Fetch-Site": "same-origin", "Sec-Fetch-Mode": "cors"},
            {"Host": "localhost", "Origin": "http://localhost:80"},
            # behind a proxy that ends TLS at another port or rewrites Host
            {"Host": "localhost", "Origin": "https://box.example:8443", "Sec-Fetch-Site": "same-origin"},
        ]
        for headers in usual:
            assert await status(server, COMPLETION, JSON | headers, BODY) == 200, headers
            assert await status(server, "/health", headers) == 200, headers
        link = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
        assert await status(server, "/console", link) == 200  # a user follows a link


async def test_keys_make_all_this_unnecessary(tmp_path: Path) -> None:
    async with serving(api_keys="sk-ops") as server:
        for headers in (*FOREIGN, {}):
            assert await status(server, COMPLETION, headers | {"Authorization": "Bearer sk-ops"}, BODY) == 200
            assert await status(server, COMPLETION, headers, BODY) == 401


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        ({}, ["localhost", "a.localhost"], ["example.com"]),
        ({"host": "::1"}, ["localhost"], ["example.com"]),
        ({"allowed_hosts": "llm.example.com, other.example"}, ["llm.example.com", "other.example"], ["example.com"]),
        ({"allowed_hosts": "*"}, ["example.com"], []),
        ({"host": "0.0.0.0"}, ["example.com"], []),
        ({"host": "0.0.0.0", "allowed_hosts": "a.example"}, ["a.example", "10.0.0.1", "gateway"], ["example.com"]),
        ({"host": "box.example.com", "allowed_hosts": "a.example"}, ["box.example.com"], ["b.example.com"]),
    ],
)
async def test_allowed_hosts(options: dict[str, Any], allowed: list[str], refused: list[str]) -> None:
    async with serving(**options) as server:
        for host in allowed:
            assert await status(server, "/version", {"Host": f"{host}:8000"}) == 200, host
        for host in refused:
            assert await status(server, "/version", {"Host": host}) == 403, host
            async with server.http.get(server.url + "/version", headers={"Host": host}) as answer:
                assert "--allowed-hosts" in (await answer.json())["error"]["message"]


@pytest.mark.parametrize("hosts", ["http://example.com", "example.com:8000", "a b"])
def test_names_that_are_none_are_refused(hosts: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        BrowserGuard(GatewayConfig(served_model_name=MODEL, allowed_hosts=hosts))
