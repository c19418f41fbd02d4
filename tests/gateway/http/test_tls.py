"""HTTPS: a certificate is used, and replaced without a restart."""

import asyncio
import contextlib
import os
import shutil
import ssl
from pathlib import Path

import aiohttp
import pytest
from pagewise_gateway.http import credentials, load_certificate
from pagewise_gateway.metrics import Metrics
from pagewise_shared.errors import ConfigError

from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.http.certificates import write_certificate
from tests.gateway.server import MODEL, Server, serving

BODY = {"model": MODEL, "prompt": "the fox", "max_tokens": 4, "stream": True}


def trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


async def name_of(server: Server) -> str:
    """The common name in the certificate that a new connection gets to see."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", server.port, ssl=context)
    data = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return "second" if b"second" in data else "first"


async def test_a_stream_over_https(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    async with serving(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        assert server.url.startswith("https://")
        async with server.http.post(server.url + "/v1/completions", json=BODY, ssl=trusting(certificate)) as response:
            assert response.status == 200
            assert (await response.text()).endswith("data: [DONE]\n\n")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await server.http.get(server.url + "/version")


async def test_certificates_are_replaced_while_streams_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "CHECK_SECONDS", 0.0)
    used = tuple(map(str, (tmp_path / "used.pem", tmp_path / "used.key")))
    first, second = write_certificate(tmp_path, "first"), write_certificate(tmp_path, "second")
    for source, target in zip(first, used, strict=True):
        shutil.copy(source, target)
    scheduler = FakeScheduler(step_seconds=0.01)
    async with serving(scheduler, ssl_certfile=used[0], ssl_keyfile=used[1]) as server:
        body = {**BODY, "max_tokens": 100}
        async with server.http.post(server.url + "/v1/completions", json=body, ssl=trusting(first[0])) as response:
            await response.content.readuntil(b"\n\n")
            assert await name_of(server) == "first"
            shutil.copy(second[0], used[0])  # the key does not fit yet
            assert await name_of(server) == "first"
            shutil.copy(second[1], used[1])
            assert await name_of(server) == "second"
            shutil.copy(__file__, used[0])
            assert await name_of(server) == "second"
            os.unlink(used[1])
            assert await name_of(server) == "second"
            assert (await response.text()).endswith("data: [DONE]\n\n")
        shown = server.shown()
    assert 'certificate_reloads_total{model_name="fake/model",outcome="done"} 1.0' in shown
    assert 'certificate_reloads_total{model_name="fake/model",outcome="failed"} 3.0' in shown


async def test_plain_http_to_an_https_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    async with serving(ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in await reader.read(1000)
        writer.close()
        assert await name_of(server) == "first"
    assert [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")] == []


async def test_connections_over_the_limit_are_turned_away_in_https_too(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    options = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with serving(max_connections=1, **options) as server, aiohttp.ClientSession() as other:
        async with server.http.get(server.url + "/version", ssl=trusting(certificate)) as response:
            assert response.status == 200
            await response.read()
        async with other.get(server.url + "/version", ssl=trusting(certificate)) as refused:
            assert (refused.status, refused.headers["Retry-After"]) == (503, "2")


async def test_a_handshake_that_never_comes_ends(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    options = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    async with serving(keepalive_timeout=0.3, **options) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


def test_certificates_that_cannot_be_used(tmp_path: Path) -> None:
    certificate, key = write_certificate(tmp_path, "first")
    other, _ = write_certificate(tmp_path, "second")
    metrics = Metrics("m")
    assert load_certificate(None, None, metrics) is None
    for certfile, keyfile, named in (
        (None, str(key), "--ssl-certfile"),
        ("/nowhere", str(key), "/nowhere"),
        (str(certificate), None, "first.pem"),
        (str(other), str(key), "second.pem"),
        (str(key), str(certificate), "first.key"),
    ):
        with pytest.raises(ConfigError, match=named):
            load_certificate(certfile, keyfile, metrics)
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    assert load_certificate(str(both), None, metrics) is not None
