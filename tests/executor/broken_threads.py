"""Processes in each of which a thread of another kind ends by an exception, while another thread waits for its work.

python -m tests.executor.broken_threads prints a line of JSON for each kind: its name, the exit code, and what the
process has logged. One process imports torch for all of them, and is forked before it has other threads.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import numpy as np
import torch
import zmq
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.block_server import BlockServer
from pagewise_executor.kv.block_store import BlockStore
from pagewise_executor.kv.host_loads import HostLoads
from pagewise_executor.kv.host_memory import AnonymousMemory
from pagewise_executor.kv.host_tier import HostTier
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.kv.peers import PeerLinks
from pagewise_executor.lora.adapters import Adapters
from pagewise_executor.process_end import end_with_threads
from pagewise_executor.storage.link import StorageLink
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.logs import configure_logging
from pagewise_shared.protocol import DEVICE, DISK, HOST, Adapter, LoadAdapter, LookUp, RemoteTier

_SECONDS = 30
"""After which a process ends that waits for its broken thread."""


class _Fault(BaseException):
    """Nothing that copies handles it."""


def _break(*_: object, **__: object) -> NoReturn:
    raise _Fault("the device is on fire\nand more")


def _wait() -> NoReturn:
    threading.Event().wait()
    raise AssertionError


class _Parts:
    """A pool, its store, and a storage that is broken."""

    def __init__(self) -> None:
        self.pool = KVPool([(1, 4)], 8, 4, torch.float32, torch.device("cpu"))
        self.store = BlockStore(self.pool, {})
        broken: Any = mock.Mock(contains=_break, read=_break, write=_break)
        broken.name = "disk"
        self.link = StorageLink(broken, self.store, 4)
        self.host = HostTier(self.pool, AnonymousMemory(8, self.pool.bytes_per_block, cuda=False))

    def copy(self, copier: Any, source: int, target: int, peer: RemoteTier | None = None) -> None:
        names = [BlockName(BlockHash(bytes(32)), BlockHash(bytes(32)))]
        copier.begin(CopyJob(0, 1, source, target, np.zeros((1, 2), np.int32), peer, [None], names))


def _host(direction: str) -> None:
    parts = _Parts()
    with mock.patch.object(HostTier, "_store", _break), mock.patch.object(HostLoads, "_issue", _break):
        parts.copy(parts.host, *((DEVICE, HOST) if direction == "store" else (HOST, DEVICE)))
        _wait()


def _before_the_first_job() -> None:
    """As with a device that cannot be made the thread's own."""
    with mock.patch("pagewise_executor.kv.host_tier.queue", SimpleQueue=lambda: mock.Mock(get=_break)):
        _Parts().host.reset(2)  # waits for the copies that have begun


def _storage(what: str) -> None:
    parts = _Parts()
    if what == "look up":
        parts.link.look_up(LookUp(1, 1, DISK, bytes(32), np.zeros(4, np.int32).tobytes()))
    else:
        parts.copy(parts.link, *((DEVICE, DISK) if what == "store" else (DISK, DEVICE)))
    _wait()


def _fetch() -> None:
    parts = _Parts()
    links = PeerLinks(parts.store)
    with mock.patch("pagewise_executor.kv.peers._Link._do", _break):
        parts.copy(links, DEVICE, DEVICE, RemoteTier("ipc:///nobody", 1, 1))
        links.reset()  # waits for the copies that have begun


def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(BlockServer, "_receive", _break):
        server = BlockServer(_Parts().store, f"ipc://{folder}/blocks", "")
        asker = zmq.Context.instance().socket(zmq.DEALER)
        asker.connect(server.endpoint)
        asker.send(b"")
        asker.recv()


def _adapters() -> None:
    adapters = Adapters(mock.Mock(get=_break), mock.Mock())
    adapters.load(LoadAdapter(1, 1, Adapter("a", "/nowhere", bytes(32), 1, 1, 0), 0))
    _wait()


def _other_package() -> None:
    """Of a thread that is not ours only Python's own report is seen."""
    thread = threading.Thread(target=_break)
    thread.start()
    thread.join()
    os._exit(7)


KINDS: dict[str, Callable[[], None]] = {
    "store": lambda: _host("store"),
    "load": lambda: _host("load"),
    "begin": _before_the_first_job,
    "store disk": lambda: _storage("store"),
    "load disk": lambda: _storage("load"),
    "look up disk": lambda: _storage("look up"),
    "fetch ipc:///nobody": _fetch,
    "block server": _serve,
    "adapters": _adapters,
    "other": _other_package,
}


def _run(kind: Callable[[], None]) -> tuple[int, str]:
    """Run one kind in a process of its own; return its exit code and what it has logged."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writing, 2)
        signal.alarm(_SECONDS)
        configure_logging("info", "executor", "text")
        end_with_threads()
        kind()
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as log:
        text = log.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def outcomes() -> dict[str, tuple[int, str]]:
    """Exit code and log by kind."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.executor.broken_threads"],
        cwd=Path(__file__).parents[2], check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {name: (code, log) for name, code, log in map(json.loads, done.stdout.splitlines())}


if __name__ == "__main__":
    for name, kind in KINDS.items():
        print(json.dumps([name, *_run(kind)]), flush=True)
