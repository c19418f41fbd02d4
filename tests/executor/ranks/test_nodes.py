"""Nodes of one executor find each other, pass frames on, and notice each other's end; without models."""

import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import zmq
from pagewise.keys import keys as make_keys
from pagewise_executor.ranks import host
from pagewise_executor.ranks import node as node_module
from pagewise_executor.ranks.host import host_identity, interface_of
from pagewise_executor.ranks.messages import Admitted, Ended, Heartbeat, Join, Rejected, decode_to_node
from pagewise_executor.ranks.node import Node, _Link
from pagewise_executor.ranks.nodes import Nodes
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.curve import Keys
from pagewise_shared.errors import ConfigError, RefusedError
from pagewise_shared.protocol import encode
from pagewise_shared.version import package_version

from benchmarks.processes import free_port
from tests.free_cores import FreeCores

CONFIG = {"tensor_parallel": 4, "nnodes": 2, "num_blocks": 10}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "_ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(node_module, "_PAUSE_SECONDS", 0.1)


def config_of(port: int, node: int, **options: Any) -> ExecutorConfig:
    return ExecutorConfig(master_port=port, node_rank=node, **(CONFIG | options))


def keys_of(folder: Path, name: str = "executor") -> Keys:
    if not folder.exists():
        assert make_keys(["--keys", str(folder), "init"]) == 0
        assert make_keys(["--keys", str(folder), "add", "gpu-7"]) == 0
    return Keys(folder, name)


class Group:
    """Node 0, and its messages."""

    def __init__(self, keys: Keys | None = None, **options: Any) -> None:
        self.port = free_port()
        self.lost: list[str] = []
        self.nodes = Nodes(config_of(self.port, 0, **options), keys)
        self.pool = ThreadPoolExecutor(8)

    def join(self, keys: Keys | None = None, seconds: float = 20.0, **options: Any) -> Any:
        """A node that joins, in a thread."""
        node = Node(config_of(self.port, options.pop("node_rank", 1), **options), keys, seconds)
        return self.pool.submit(node._join)

    def gather(self, seconds: float = 20.0) -> None:
        self.nodes.gather(seconds)

    def admit(self) -> dict[int, Any]:
        return dict(self.nodes.admit(lambda reason, code: self.lost.append(reason)))

    def close(self) -> None:
        self.nodes.close()
        self.nodes.listener.close()
        self.pool.shutdown()


@pytest.fixture
def made() -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def make(*arguments: Any, **options: Any) -> Group:
        groups.append(Group(*arguments, **options))
        return groups[-1]

    yield make
    for group in groups:
        group.close()


def test_frames_of_ranks_go_both_ways_and_the_end_of_a_node_is_noticed_soon(
    made: Callable[..., Group], tmp_path: Path
) -> None:
    keys = keys_of(tmp_path / "keys")
    group = made(keys)
    joining = group.join(keys)
    group.gather()
    assert group.nodes.on_host == 4, "both nodes are on this machine"
    links = group.admit()
    link, admitted = joining.result()
    assert admitted == Admitted(f"127.0.0.1:{group.nodes.listener.getsockname()[1]}", 4)
    assert sorted(links) == [2, 3]
    links[3].send_bytes(b"a plan")
    assert _of_ranks(link) == [b"\x03", b"a plan"]
    large = bytes(3_000_000)
    sending = threading.Thread(target=links[2].send_bytes, args=(large,))
    sending.start()
    assert _of_ranks(link) == [b"\x02", large]
    sending.join()
    link.send(b"\x02", b"its result")
    link.send(b"\x01", b"a rank of node 0 itself")
    link.send(b"\x02", b"the next one")
    assert [links[2].recv_bytes() for _ in range(2)] == [b"its result", b"the next one"]
    link.send(b"", encode(Ended(3)))
    with pytest.raises(EOFError):
        links[3].recv_bytes()
    began, cores = time.monotonic(), FreeCores()
    link.close()
    with pytest.raises(EOFError):
        links[2].recv_bytes()
    assert group.lost == ["node 1 has ended, or cannot be reached"]
    assert (time.monotonic() - began) * cores.share() < 3.0
    for one in links.values():
        one.close()


def _of_ranks(link: _Link) -> list[bytes]:
    """The next frame for a rank, behind heartbeats of node 0."""
    while (parts := link.socket.recv_multipart())[0] == b"":
        pass
    return parts


def test_a_node_ends_soon_after_node_0(
    made: Callable[..., Group], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = made()
    node = Node(config_of(group.port, 1), None, 20.0)
    monkeypatch.setattr(node_module.signal, "signal", lambda *_: None)
    command = [sys.executable, "-c", "import sys, os; os.read(int(sys.argv[1]), 10**6); os.read(int(sys.argv[1]), 1)"]

    def start_rank(*_: object) -> Any:
        import subprocess
        from multiprocessing.connection import Connection

        own, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen([*command, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        return Connection(own.detach()), process

    monkeypatch.setattr(node_module, "start_rank", start_rank)
    running = group.pool.submit(node.run)
    group.gather()
    links = group.admit()
    while len(node._processes) < 2:
        time.sleep(0.01)
    group.nodes.close()
    assert running.result(20) == 1
    assert "this node ends: node 0 at tcp://127.0.0.1" in caplog.text
    assert [process.poll() is not None for process in node._processes.values()] == [True, True]
    for link in links.values():
        link.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kv_dtype": "fp8"}, "need the same options: --kv-dtype is fp8 on node 1 and auto on node 0"),
        ({"tensor_parallel": 8}, "--tensor-parallel is 8 on node 1 and 4 on node 0"),
        ({"disk_cache": "/cache"}, "--disk-cache is True on node 1 and False on node 0"),
        ({"nnodes": 4, "node_rank": 3}, "--node-rank 3 is not one of the 2 nodes"),
    ],
)
def test_a_node_with_other_options_is_turned_away_by_name(
    options: dict[str, Any], reason: str, made: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = made()
    joining = group.join(**options)
    with pytest.raises(TimeoutError, match=r"nodes have not joined within 1.5 s: 1"):
        group.gather(1.5)
    with pytest.raises(RefusedError) as refused:
        joining.result(5)
    assert reason in str(refused.value)
    assert reason in caplog.text, "node 0 says it as well"


def test_options_of_one_host_may_differ(made: Callable[..., Group]) -> None:
    group = made(log_level="warning", disk_cache="/here")
    joining = group.join(threads=3, model="/models/here", disk_cache="/there", scheduler="ipc://nowhere")
    group.gather()
    group.admit()
    joining.result()[0].close()


def test_another_version_is_turned_away(made: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    group = made()
    monkeypatch.setattr(node_module, "package_version", lambda: "0.0.1")
    joining = group.join()
    with pytest.raises(TimeoutError):
        group.gather(1.5)
    with pytest.raises(RefusedError, match=f"it has Pagewise 0.0.1, node 0 has {package_version()}"):
        joining.result(5)


def test_a_second_node_of_a_number_waits_for_the_end_of_the_first(
    made: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    group = made(nnodes=4)
    first = group.join(nnodes=4, seconds=2.0)
    second = group.join(nnodes=4)
    third, fourth = (group.pool.submit(_join_late, group, number) for number in (2, 3))
    group.gather()
    group.admit()
    joined = [found.result()[0] for found in (second, third, fourth)]
    assert first.result() is None, "it has given up"
    assert "there is a node 1 already" in caplog.text
    for link in joined:
        link.close()


def test_a_node_that_has_given_up_before_it_was_heard_is_waited_for_again(made: Callable[..., Group]) -> None:
    """Node 0 is slow: its first message comes from an attempt that is over."""
    group = made()
    settings = group.nodes._settings
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.IDENTITY, b"first attempt")
        dealer.connect(group.nodes.endpoint)
        dealer.send_multipart([b"", encode(Join(1, package_version(), host_identity(), settings))])
        assert group.nodes._socket.poll(5000)
    while group.nodes._answer(b"first attempt", Heartbeat()):
        time.sleep(0.01)
    joining = group.join()
    group.gather()
    links = group.admit()
    link, _ = joining.result()
    link.send(b"\x02", b"a result")
    assert links[2].recv_bytes() == b"a result"
    assert not group.lost
    link.close()


def _join_late(group: Group, number: int) -> Any:
    time.sleep(4.0)
    return group.join(nnodes=4, node_rank=number).result()


@pytest.mark.parametrize(
    ("node_0", "node_1"),
    [("a", "b"), ("a", None), (None, "a")],
    ids=["other keys", "keys at node 0 alone", "keys at node 1 alone"],
)
def test_a_node_with_a_wrong_key_or_none_waits_in_vain(
    node_0: str | None, node_1: str | None, made: Callable[..., Group], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (None if name is None else keys_of(tmp_path / name) for name in (node_0, node_1))
    group = made(first)
    joining = group.join(second, seconds=2.0)
    with pytest.raises(TimeoutError):
        group.gather(2.0)
    assert joining.result(30) is None
    assert "handshake" in caplog.text or "does not answer yet" in caplog.text


def test_the_key_of_another_executor_is_not_that_of_this_one(made: Callable[..., Group], tmp_path: Path) -> None:
    """A process with a key on the allow-list, and the public key of node 0, completes the handshake."""
    group = made(keys_of(tmp_path / "keys"))
    other = keys_of(tmp_path / "keys", "gpu-7")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        other.secure_client(dealer, keys_of(tmp_path / "keys").public)
        dealer.connect(group.nodes.endpoint)
        settings = group.nodes._settings
        dealer.send_multipart([b"", encode(Join(1, package_version(), host_identity(), settings))])
        with pytest.raises(TimeoutError):
            group.gather(1.5)
        said = decode_to_node.decode(dealer.recv_multipart()[1])
    assert isinstance(said, Rejected)
    assert "its key is another one than that of node 0" in said.reason


def test_who_speaks_nonsense_where_nodes_join_is_not_listened_to(
    made: Callable[..., Group], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    group = made()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(group.nodes.endpoint)
        for parts in ([b"x"], [b"", b"\xff"], [b"\x02", b"a result"], [b"", b"", b""], [b"", encode(Ended(2))]):
            dealer.send_multipart(parts)
        joining = group.join()
        group.gather()
        links = group.admit()
        dealer.send_multipart([b"\x02", b"a result"])
        dealer.send_multipart([b"", encode(Ended(2))])
        link = joining.result()[0]
        link.send(b"\x02", b"its own result")
        assert links[2].recv_bytes() == b"its own result"
        assert "dropped a message of 2 parts" in caplog.text
        link.close()


def test_a_port_that_is_taken_is_named(made: Callable[..., Group]) -> None:
    group = made()
    with pytest.raises(ConfigError, match=f"--master-port {group.port}: node 0 cannot listen on 127.0.0.1"):
        Nodes(config_of(group.port, 0))


class Names:
    """The addresses of names; unpublished names have none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.published: set[str] = set()
        self._resolve = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, *arguments: Any, **options: Any) -> Any:
        if host.startswith("node-0."):
            if host not in self.published:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            host = "127.0.0.1"
        return self._resolve(host, *arguments, **options)


UNRESOLVED = "--master-addr node-0.svc does not resolve: Name or service not known"


def test_a_name_that_resolves_later_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    names = Names(monkeypatch)
    monkeypatch.setattr(host, "_PAUSE_SECONDS", 0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.own_address, "node-0.svc", 20.0)
        while not caplog.records:
            time.sleep(0.01)
        names.published.add("node-0.svc")
        assert waiting.result(20) == "127.0.0.1"
    (said,) = (record.getMessage() for record in caplog.records if record.name.endswith("ranks.host"))
    assert re.fullmatch(rf"{UNRESOLVED}; trying again for up to \d+ s \(attempt 1\)", said), "at once, and once"


def test_a_name_that_never_resolves_is_named_in_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Names(monkeypatch)
    monkeypatch.setattr(host, "_PAUSE_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match=rf"{UNRESOLVED} \(after \d attempts in 0.3 s\)"):
        host.own_address("node-0.svc", 0.3)
    assert Node(config_of(free_port(), 1, master_addr="node-0.svc"), None, 0.3)._join() is None
    first, last = (record.getMessage() for record in caplog.records if record.name.endswith("ranks.node"))
    assert first == f"{UNRESOLVED}; trying again for up to 0 s (attempt 1)"
    assert re.fullmatch(rf"not all nodes have come together within 0.3 s \(\d attempts\): {UNRESOLVED}", last)


@pytest.mark.skipif(sys.platform != "linux", reason="the name of the loopback interface")
def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.1.7") == "lo"
    assert interface_of("192.0.2.1") is None
