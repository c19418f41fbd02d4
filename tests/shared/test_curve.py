"""Keys and the gate on real sockets: who gets in, who does not, and that changes count at once."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from pagewise_shared.connections import Connections, HandshakeFailure
from pagewise_shared.curve import KINDS, Authenticator, Keys, Kind, leaves_host, load_keys, public_file, secret_file
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import BoundedLog, printable
from pagewise_shared.scheduler_connection import (
    SchedulerAddress,
    asks_for_key,
    make_dealer,
    watch_connection,
)

from tests.shared.key_pairs import make_key_pairs, owner


@pytest.mark.parametrize(
    ("endpoint", "leaves"),
    [
        ("ipc:///tmp/x", False),
        ("tcp://127.0.0.1:5757", False),
        ("tcp://127.3.2.1:5757", False),
        ("tcp://localhost:5757", False),
        ("tcp://[::1]:5757", False),
        ("tcp://lo:5757", False),
        ("tcp://0.0.0.0:5757", True),
        ("tcp://*:5757", True),
        ("tcp://[::]:5757", True),
        ("tcp://eth0:5757", True),
        ("tcp://scheduler:5757", True),
        ("tcp://192.0.2.1:5757", True),
        ("tcp://192.0.2.1:0;127.0.0.1:5757", True),
    ],
)
def test_which_endpoints_leave_the_host(endpoint: str, leaves: bool) -> None:
    assert leaves_host(endpoint) is leaves


def test_plain_text_leaves_the_host_only_if_asked_to(caplog: pytest.LogCaptureFixture) -> None:
    assert load_keys(None, "executor", "ipc:///x", plaintext=False) is None
    with pytest.raises(ConfigError, match="leaves this machine and there are no keys"):
        load_keys(None, "executor", "tcp://scheduler:5757", plaintext=False)
    assert not caplog.records
    assert load_keys(None, "executor", "tcp://scheduler:5757", plaintext=True) is None
    assert "is plain text" in caplog.text


def test_keys_that_are_missing_or_broken_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"no key of 'executor'.*executor/executor.key_secret"):
        Keys(tmp_path, "executor")
    make_key_pairs(tmp_path, "executor")
    with pytest.raises(ConfigError, match=r"public/scheduler.key"):
        Keys(tmp_path, "executor")
    make_key_pairs(tmp_path, "scheduler")
    assert not caplog.records
    secret_file(tmp_path, "executor").chmod(0o644)
    Keys(tmp_path, "executor")
    assert "can be read by everybody" in caplog.text
    secret_file(tmp_path, "executor").write_text('public-key = "short"\n')
    with pytest.raises(ConfigError, match="holds no CURVE key"):
        Keys(tmp_path, "executor")


def test_the_allow_list_follows_its_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keys = Keys(make_key_pairs(tmp_path, "scheduler", "one"), "scheduler")
    one, scheduler = Keys(tmp_path, "one").public.decode(), keys.public.decode()
    assert owner(keys, one) == "one"
    assert owner(keys, scheduler) is None, "the scheduler is no executor"
    two = Keys(make_key_pairs(tmp_path, "two"), "two").public.decode()
    assert dict(keys.allowed()) == {one: "one", two: "two"}
    # Another key under an old name.
    public_file(tmp_path, "one").write_bytes(public_file(tmp_path, "two").read_bytes())
    public_file(tmp_path, "two").unlink()
    assert (owner(keys, one), owner(keys, two)) == (None, "one")
    public_file(tmp_path, "one").write_text("nothing\n")
    assert owner(keys, two) is None
    assert "not on the allow-list" in caplog.text
    # A folder that is missing for a moment ends no connection.
    two = Keys(make_key_pairs(tmp_path, "three"), "three").public.decode()
    assert owner(keys, two) == "three"
    (tmp_path / "public").rename(tmp_path / "away")
    assert owner(keys, two) == "three"
    assert "stay as they were" in caplog.text


def test_a_key_is_an_executor_s_or_a_gateway_s(tmp_path: Path) -> None:
    keys = Keys(make_key_pairs(tmp_path, "scheduler", "one"), "scheduler")
    one, scheduler = Keys(tmp_path, "one").public.decode(), keys.public.decode()
    assert (keys.kind(one), keys.kind(scheduler), keys.kind("nobody's")) == ("executor", None, None)
    gateway = Keys(make_key_pairs(tmp_path, "gateway", kind="gateway"), "gateway").public.decode()
    assert (keys.kind(gateway), owner(keys, gateway)) == ("gateway", "gateway")
    assert (dict(keys.allowed()), dict(keys.allowed("gateway"))) == ({one: "one"}, {gateway: "gateway"})
    public_file(tmp_path, "gateway", "gateway").unlink()
    assert keys.kind(gateway) is None


class Refused:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0
        self.happened = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.happened.set()


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    with zmq.Context() as context:
        yield context


def served(
    context: "zmq.Context[zmq.Socket[bytes]]",
    server: Keys,
    client: Keys | None,
    server_key: bytes | None = None,
    kind: Kind = "executor",
) -> tuple[bytes | None, str, int]:
    """The message that a ROUTER for this kind got from a client, the sender's User-Id, and the number of refusals."""
    refused = Refused()
    gate = Authenticator(context, server, refused)
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        try:
            for socket in (router, dealer):
                socket.linger = 0
            gate.secure_server(router, kind)
            port = router.bind_to_random_port("tcp://127.0.0.1")
            if client is not None:
                client.secure_client(dealer, server_key)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            with suppress(zmq.Again):  # it was refused before it could send
                dealer.send(b"hello", zmq.DONTWAIT)
            deadline = time.monotonic() + (5.0 if client is not None else 0.5)
            while not router.poll(50) and not refused.count and time.monotonic() < deadline:
                pass
            if not router.poll(0):
                return None, "", refused.count
            frame = router.recv_multipart(copy=False)[-1]
            return frame.bytes, str(frame.get("User-Id")), refused.count
        finally:
            gate.close()


def test_an_executor_may_be_a_server_for_executors(tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    make_key_pairs(tmp_path, "scheduler", "one", "two")
    one, two = Keys(tmp_path, "one"), Keys(tmp_path, "two")
    assert served(context, one, two, one.public) == (b"hello", two.public.decode(), 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", KINDS)
def test_a_key_opens_only_the_socket_of_its_kind(
    tmp_path: Path,
    context: "zmq.Context[zmq.Socket[bytes]]",
    kind: Kind,
    name: Kind,
    caplog: pytest.LogCaptureFixture,
) -> None:
    make_key_pairs(tmp_path, "scheduler", "executor")
    make_key_pairs(tmp_path, "gateway", kind="gateway")
    scheduler, client = Keys(tmp_path, "scheduler"), Keys(tmp_path, name)
    found = served(context, scheduler, client, kind=kind)
    if kind == name:
        assert found == (b"hello", client.public.decode(), 0)
    else:
        assert found == (None, "", 1)
        assert f"wrong kind ({name}, not {kind})" in caplog.text


def test_a_client_without_keys_is_not_heard(tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    make_key_pairs(tmp_path, "scheduler")
    assert served(context, Keys(tmp_path, "scheduler"), None) == (None, "", 0)


def test_without_its_gate_a_secured_socket_accepts_nobody(
    tmp_path: Path, context: "zmq.Context[zmq.Socket[bytes]]"
) -> None:
    make_key_pairs(tmp_path, "scheduler", "one")
    gate = Authenticator(context, Keys(tmp_path, "scheduler"), Refused())
    gate.close()
    with context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as dealer:
        for socket in (router, dealer):
            socket.linger = 0
        gate.secure_server(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        Keys(tmp_path, "one").secure_client(dealer)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        assert not router.poll(500)


async def test_unknown_keys_and_wrong_servers_are_told_apart(tmp_path: Path) -> None:
    make_key_pairs(tmp_path, "scheduler", "one", "gone")
    server, one, gone = (Keys(tmp_path, name) for name in ("scheduler", "one", "gone"))
    public_file(tmp_path, "gone").unlink()
    refused = Refused()
    with zmq.asyncio.Context() as context:
        gate = Authenticator(context, server, refused)
        router = context.socket(zmq.ROUTER)
        gate.secure_server(router)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def failure(client: Keys | None, server_key: bytes | None) -> tuple[bool, bool]:
            dealer = context.socket(zmq.DEALER)
            dealer.linger = 0
            if client is not None:
                client.secure_client(dealer, server_key)
            connections = Connections(dealer)
            dealer.connect(f"tcp://127.0.0.1:{port}")
            async with asyncio.timeout(10):
                while not isinstance(found := await connections.next(), HandshakeFailure):
                    pass
            connections.close()
            dealer.close()
            return found.refused, found.no_common_mechanism

        try:
            assert await failure(gone, None) == (True, False)
            assert refused.count == 1
            assert await failure(one, one.public) == (False, False)
            assert await failure(None, None) == (False, True)
            assert refused.count == 1
        finally:
            gate.close()
            router.close()


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "ipc://{folder}/socket"])
async def test_a_listener_tells_whether_it_asks_for_a_key(tmp_path: Path, endpoint: str) -> None:
    make_key_pairs(tmp_path, "scheduler", "one")
    with zmq.asyncio.Context() as context:
        gate = Authenticator(context, Keys(tmp_path, "scheduler"), Refused())
        try:
            for secured in (True, False):
                router = context.socket(zmq.ROUTER)
                if secured:
                    gate.secure_server(router)
                router.bind(endpoint.format(folder=tmp_path))
                bound = router.getsockopt_string(zmq.LAST_ENDPOINT)
                assert await asks_for_key(bound) is secured
                router.close()
            assert not await asks_for_key("tcp://127.0.0.1:9")
            assert not await asks_for_key("ipc:///nowhere")
        finally:
            gate.close()


async def test_without_a_key_one_that_is_cut_off_in_the_handshake_asks_why(tmp_path: Path) -> None:
    """A scheduler with keys that is slow: the whole greeting of its peer is there before it has answered."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"\xff" + bytes(8) + b"\x7f")
        await reader.readexactly(11)
        with contextlib.suppress(TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(0.3):
                await reader.readexactly(53)
                writer.close()
                return
        writer.write(b"\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        await writer.drain()
        writer.close()

    path = tmp_path / "socket"
    async with await asyncio.start_unix_server(greet, path):
        with zmq.asyncio.Context() as context:
            dealer = make_dealer(context, None, 1024)
            dealer.linger = 0
            connections = Connections(dealer)
            dealer.connect(f"ipc://{path}")
            try:
                with pytest.raises(ConfigError, match="asks for a key and there is none"):
                    async with asyncio.timeout(10):
                        await watch_connection(
                            connections, dealer, SchedulerAddress(f"ipc://{path}"), None, lambda: None
                        )
            finally:
                connections.close()
                dealer.close()


async def test_with_a_key_a_scheduler_that_has_none_is_tried_until_it_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One whose greeting comes first, so that it never sees that the two have no mechanism in common."""
    monkeypatch.setattr("pagewise_shared.scheduler_connection._RETRY_SECONDS", 0.05)
    make_key_pairs(tmp_path, "scheduler", "one")
    path, greeted = tmp_path / "socket", 0

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal greeted
        greeted += 1
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32))
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    with zmq.asyncio.Context() as context:
        gate = Authenticator(context, Keys(tmp_path, "scheduler"), lambda: None)
        router = context.socket(zmq.ROUTER)
        gate.secure_server(router)
        client = Keys(tmp_path, "one")
        dealer = make_dealer(context, client, 1024)
        dealer.linger = 0
        connections = Connections(dealer)
        watch = asyncio.create_task(
            watch_connection(connections, dealer, SchedulerAddress(f"ipc://{path}"), client, lambda: None)
        )
        try:
            async with asyncio.timeout(10):
                async with await asyncio.start_unix_server(greet, path):
                    dealer.connect(f"ipc://{path}")
                    while greeted < 3:
                        await asyncio.sleep(0.01)
                assert sum("no handshake with the scheduler" in record.getMessage() for record in caplog.records) == 1
                path.unlink(missing_ok=True)
                router.bind(f"ipc://{path}")
                await dealer.send(b"let in")
                assert (await router.recv_multipart())[1] == b"let in"
        finally:
            watch.cancel()
            connections.close()
            dealer.close()
            gate.close()
            router.close()


async def test_a_key_that_is_accepted_later_connects_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewise_shared.scheduler_connection._RETRY_SECONDS", 0.2)
    make_key_pairs(tmp_path, "scheduler", "one")
    server, client, refused, broken = Keys(tmp_path, "scheduler"), Keys(tmp_path, "one"), Refused(), []
    card = public_file(tmp_path, "one").read_bytes()
    public_file(tmp_path, "one").unlink()
    with zmq.asyncio.Context() as context:
        gate = Authenticator(context, server, refused)
        router = context.socket(zmq.ROUTER)
        gate.secure_server(router)
        endpoint = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        dealer = make_dealer(context, client, 1024)
        dealer.linger = 0
        connections = Connections(dealer)
        dealer.connect(endpoint)
        watch = asyncio.create_task(
            watch_connection(connections, dealer, SchedulerAddress(endpoint), client, lambda: broken.append(True))
        )
        try:
            async with asyncio.timeout(10):
                while not refused.count:
                    await asyncio.sleep(0.01)
                public_file(tmp_path, "one").write_bytes(card)
                await dealer.send(b"let in")
                assert (await router.recv_multipart())[1] == b"let in"
            # The refused connection is closed only now, which is reported as a broken one.
            await asyncio.sleep(0.3)
            assert not broken
        finally:
            watch.cancel()
            connections.close()
            dealer.close()
            gate.close()
            router.close()


def test_warnings_that_others_cause_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    bounded = BoundedLog(logging.getLogger("x"), burst=2, seconds=0.2)
    for number in range(10):
        bounded.warning("line %d", number)
    assert [record.getMessage() for record in caplog.records] == ["line 0", "line 1"]
    threading.Event().wait(0.3)
    bounded.warning("later")
    assert [record.getMessage() for record in caplog.records][2:] == [
        "8 warnings like the next one were left out",
        "later",
    ]


def test_text_of_others_fits_into_a_line() -> None:
    assert printable("a\nb\x1b[31mc") == "a?b?[31mc"
    assert printable("x" * 1000, 3) == "xxx"


@pytest.mark.parametrize("what", [".", "public", "public/scheduler.key", "scheduler", "scheduler/scheduler.key_secret"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_keys_that_others_can_change_are_refused(tmp_path: Path, what: str, mode: int) -> None:
    make_key_pairs(tmp_path, "scheduler", "one")
    path = tmp_path / what
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(
        ConfigError, match=r"would not be safe: (its group|every user of this machine) can change .*chmod"
    ):
        Keys(tmp_path, "scheduler")


def test_a_key_that_others_can_change_is_not_on_the_allow_list(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = Keys(make_key_pairs(tmp_path, "scheduler", "one", "two"), "scheduler")
    assert set(keys.allowed().values()) == {"one", "two"}
    public_file(tmp_path, "one").chmod(0o666)
    public_file(tmp_path, "one").write_bytes(public_file(tmp_path, "one").read_bytes() + b"\n")
    assert set(keys.allowed().values()) == {"two"}
    assert "every user of this machine can change" in caplog.text
    # An attacker's key in a folder that others can write to changes nothing: the list stays as it was.
    make_key_pairs(tmp_path, "attacker")
    (tmp_path / "public").chmod(0o777)
    assert set(keys.allowed().values()) == {"two"}
