"""Processes in each of which a thread of another kind ends by an exception, while another thread waits for its work.

python -m tests.executor.broken_threads prints a line of JSON for each kind: its name, the exit code, and the log of the
process. One process imports torch for all of them, and is forked before it has other threads.
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
from typing import NoReturn
from unittest import mock

import numpy as np
import torch
import zmq
from pagewise_executor.adapters.adapters import Adapters
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.process_end import end_with_threads
from pagewise_executor.tiers.block_server import BlockServer
from pagewise_executor.tiers.device import BlockHashes, DeviceTier
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.host import HostTier
from pagewise_executor.tiers.host_loads import HostLoads
from pagewise_executor.tiers.host_memory import HostMemory
from pagewise_executor.tiers.peers import Peers
from pagewise_executor.tiers.tier import Tier
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


class _BrokenDisk(DiskTier):
    contains = load = store = _break  # type: ignore[assignment]


class _Parts:
    """A device, a host, and a disk that is broken."""

    def __init__(self) -> None:
        self.pool = KVPool([(1, 4)], 8, 4, torch.float32, torch.device("cpu"))
        self.device = DeviceTier(self.pool, BlockHashes(8, 4))
        self.host = HostTier(self.pool, HostMemory(8, self.pool.bytes_per_block, cuda=False))

    def copy(self, tier: Tier, source: int, target: int, peer: RemoteTier | None = None) -> None:
        names = [BlockName(BlockHash(bytes(32)), BlockHash(bytes(32)))]
        tier.begin(CopyJob(0, 1, source, target, np.zeros((1, 2), np.int32), peer, names), self.device)


def _host(direction: str) -> None:
    parts = _Parts()
    with mock.patch.object(HostTier, "_store", _break), mock.patch.object(HostLoads, "_issue", _break):
        parts.copy(parts.host, *((DEVICE, HOST) if direction == "store" else (HOST, DEVICE)))
        _wait()


def _before_the_first_job() -> None:
    """As with a device that cannot be made the thread's own."""
    with mock.patch("pagewise_executor.tiers.host.queue", SimpleQueue=lambda: mock.Mock(get=_break)):
        _Parts().host.reset(2, keep=False)  # waits for the copies that have begun


def _storage(what: str) -> None:
    parts = _Parts()
    with tempfile.TemporaryDirectory() as folder:
        disk = _BrokenDisk(Path(folder), "x", parts.pool.bytes_per_block, 2**20)
        if what == "look up":
            disk.look_up(LookUp(1, 1, DISK, bytes(32), np.zeros(4, np.int32).tobytes()), 4)
        else:
            parts.copy(disk, *((DEVICE, DISK) if what == "store" else (DISK, DEVICE)))
        _wait()


def _fetch() -> None:
    parts = _Parts()
    with tempfile.TemporaryDirectory() as folder, mock.patch("pagewise_executor.tiers.peers._Link._do", _break):
        peers = Peers({}, parts.pool.bytes_per_block, f"ipc://{folder}/blocks", "")
        parts.copy(peers, DEVICE, DEVICE, RemoteTier("ipc:///nobody", 1, 1))
        _wait()


def _serve() -> None:
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(BlockServer, "_receive", _break):
        server = BlockServer({}, 1, f"ipc://{folder}/blocks", "", begun=lambda: (0, 0))
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
    """Run one kind in a process of its own; return its exit code and its log."""
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
