"""Storage in a server that speaks the Redis protocol: one in Python always, and the real one where it is installed."""

import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fakeredis")
import redis
from pagewise_executor.tiers import redis as redis_module
from pagewise_executor.tiers.redis import RedisTier
from pagewise_shared import start_checks
from pagewise_shared.block_hash import root_hash
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import REDIS, Copied, Found, LookUp, pack_int32s

from benchmarks.processes import free_port
from tests.executor.tiers.look_ups import check_look_ups
from tests.executor.tiers.names import BLOCK_BYTES, content, empty, name_of, prefix
from tests.redis_servers import SERVERS, Start, real_only, start_fake, start_real


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture(params=SERVERS)
def url(request: pytest.FixtureRequest, tmp_path: Path, port: int) -> Iterator[str]:
    stop = request.param(tmp_path, port)
    yield f"redis://127.0.0.1:{port}/0"
    stop()


def open_store(url: str, content: str = "x", expire: int | None = None) -> RedisTier:
    return RedisTier(url, content, BLOCK_BYTES, expire)


def test_what_one_executor_writes_another_reads(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_module, "_PIECE_BYTES", 3 * BLOCK_BYTES)  # several questions for one list
    one, other = open_store(url), open_store(url)
    assert one.identity == other.identity != open_store(url, "another model").identity
    names = prefix("a", 7)
    assert one.contains(names) == [False] * 7
    assert one.store(names, content(names)) == [True] * 7
    asked = [*names[::-1], name_of("b")]
    rows = empty(8)
    assert other.contains(asked) == other.load(asked, rows) == [True] * 7 + [False]
    assert (rows[:7] == content(names[::-1])).all()
    assert open_store(url, "another model").contains(names) == [False] * 7
    assert one.num_errors == other.num_errors == 0
    one.close()
    other.close()


def test_what_is_not_as_it_was_written_is_not_read_and_goes(url: str) -> None:
    store = open_store(url)
    names = prefix("a", 4)
    store.store(names, content(names))
    client: Any = redis.Redis.from_url(url)
    keys = [store._key(name) for name in names]
    data = bytearray(client.get(keys[1]))
    data[-1] ^= 1
    client.set(keys[0], client.get(keys[2]))
    client.set(keys[1], bytes(data))
    client.set(keys[2], b"short")
    rows = empty(4)
    assert store.load(names, rows) == [False, False, False, True]
    assert (rows[3] == content(names)[3]).all()
    assert store.num_errors == 3
    assert store.contains(names) == [False, False, False, True]
    store.close()


def test_a_look_up_finds_where_a_sequence_of_several_groups_can_begin(url: str) -> None:
    store = open_store(url)
    check_look_ups(store)
    store.close()


def test_blocks_may_expire(url: str) -> None:
    store = open_store(url, expire=100)
    (name,) = prefix("a", 1)
    store.store([name], content([name]))
    client: Any = redis.Redis.from_url(url)
    assert 90 < client.ttl(store._key(name)) <= 100
    store.close()


@pytest.mark.parametrize("start", SERVERS)
def test_a_server_that_goes_costs_little_time_and_one_that_comes_back_is_used(
    tmp_path: Path, port: int, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "_REST_SECONDS", 0.3)
    stop = start(tmp_path, port)
    store = open_store(f"redis://127.0.0.1:{port}/0")
    names = prefix("a", 3)
    store.store(names, content(names))
    stop()
    store._client.connection_pool.disconnect()  # the server in Python still answers connected clients
    began = time.monotonic()
    for _ in range(20):
        assert store.contains(names) == [False] * 3
        assert store.load(names, empty(3)) == [False] * 3
        assert store.store(names, content(names)) == [False] * 3
    assert time.monotonic() - began < 3.0
    assert 1 <= store.num_errors <= 12, "it is left alone for a while"
    stop = start(tmp_path, port)
    time.sleep(0.35)
    assert store.store(names, content(names)) == [True] * 3
    rows = empty(3)
    assert store.load(names, rows) == [True] * 3
    assert (rows == content(names)).all()
    stop()


def store_without_server(tmp_path: Path) -> tuple[RedisTier, int]:
    """Return a store whose server has ended and which has no connection any more, and the port of that server."""
    port = free_port()
    stop = start_fake(tmp_path, port)
    store = open_store(f"redis://127.0.0.1:{port}/0")
    stop()
    store._client.connection_pool.disconnect()
    return store, port


def test_a_server_that_does_not_answer_is_asked_once_in_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_checks, "_ANSWER_SECONDS", 0.2)
    store, port = store_without_server(tmp_path)
    with socket.create_server(("127.0.0.1", port)):  # takes connections, and answers nothing
        began = time.monotonic()
        for _ in range(50):
            assert store.contains(prefix("a", 2)) == [False, False]
        assert time.monotonic() - began < 2.0
        assert store.num_errors == 1


def test_a_question_ends_before_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_checks, "_ANSWER_SECONDS", 0.4)
    store, port = store_without_server(tmp_path)
    found: queue.SimpleQueue[Copied | Found] = queue.SimpleQueue()
    store.report = found.put
    with socket.create_server(("127.0.0.1", port)) as server:
        store.look_up(LookUp(1, 5, REDIS, root_hash("model"), pack_int32s(range(8))), 4)
        connection, _ = server.accept()
        with connection:
            store.close()
            assert found.get(timeout=10) == Found(1, 5, 0)
    assert store.num_errors == 1
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@real_only
def test_a_server_that_is_full_takes_no_more_and_is_asked_all_the_same(tmp_path: Path, port: int) -> None:
    stop = start_real(tmp_path, port, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    store = open_store(f"redis://127.0.0.1:{port}/0")
    written: list[bool] = []
    for number in range(60):
        names = prefix(f"{number}", 10)
        written += store.store(names, content(names))
    assert written[0]
    # A small rest may find room again where the server has freed a buffer.
    assert sum(written[-100:]) < 50
    assert store.contains(prefix("0", 10)) == written[:10]
    assert store.num_errors > 0
    stop()


@real_only
def test_a_server_that_forgets_by_itself_keeps_what_is_used(tmp_path: Path, port: int) -> None:
    stop = start_real(tmp_path, port, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    store = open_store(f"redis://127.0.0.1:{port}/0")
    kept = prefix("kept", 20)
    store.store(kept, content(kept))
    for number in range(60):
        names = prefix(f"{number}", 10)
        assert all(store.store(names, content(names)))
        if number % 4 == 0:
            time.sleep(1.05 if number in (8, 24) else 0.0)  # its clock of uses has seconds
            store.contains(kept)
    assert sum(store.contains(kept)) >= 15
    assert sum(store.contains(prefix("0", 10))) <= 5
    stop()


def test_a_store_that_cannot_be_reached_is_told_at_the_start_without_its_password() -> None:
    with pytest.raises(ConfigError, match=r"--store: .*onnect") as raised:
        open_store(f"redis://:secret@127.0.0.1:{free_port()}/0")
    assert "secret" not in str(raised.value)
    with pytest.raises(ConfigError, match="--store: Redis URL must specify one of"):
        open_store("http://127.0.0.1")
