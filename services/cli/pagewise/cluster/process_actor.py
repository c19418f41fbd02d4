"""The actor that holds one process: starts it, starts it again when it ends, passes its lines on, and ends it."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray
from msgspec import Struct, to_builtins
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.version import package_version
from ray.util.placement_group import get_current_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pagewise.cluster.plan import ProcessPlan
from pagewise.cluster.reconcile import State
from pagewise.process import Service

_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0, 60.0)
"""Seconds before a process that ended soon is started again; the last pause is repeated."""
_SETTLED_SECONDS = 30.0
_LINES_KEPT = 1000
_LINE_CHARACTERS = 2000
_FOLDER = "pagewise-process-"
"""What the names of folders with keys begin with; the process id of the actor follows."""


class Description(Struct, frozen=True, kw_only=True):
    """What a process actor says of its process.

    Fields:
        listening: the addresses that it has printed: of a scheduler those for gateways and executors, of a gateway its
            URL.
        scheduler: where it was told that the scheduler is.
        problem: why it could not start, its last line; empty if it could.
    """

    digest: str
    version: str
    state: State
    node: str
    address: str
    pid: int | None
    since: float
    restarts: int
    listening: list[str]
    scheduler: str
    problem: str


class ProcessActor:
    """Holds one process. Made as a detached actor by the controller, under the name of the process."""

    def __init__(self, name: str, plan: ProcessPlan) -> None:
        self._name, self._plan = name, plan
        self._address = ray.util.get_node_ip_address()
        self._node = ray.get_runtime_context().get_node_id()
        _remove_folders_of_the_dead()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))  # its user's alone
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._num_lines = 0
        self._listening: list[str] = []
        self._listened: list[str] = []
        self._scheduler = ""
        self._state: State = "starting"
        self._since = time.time()
        self._restarts = 0
        self._problem = ""
        self._service: Service | None = None
        self._pointed, self._stopping = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """What Ray puts in front of lines."""
        return self._name

    async def start(self) -> None:
        """Begin to run the process, if it does not run; one other than a scheduler waits until it is pointed to one."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())

    async def point(self, scheduler: str) -> None:
        """Say where the scheduler is now. A process that runs notices by itself."""
        unfinished = self._folder / "scheduler.new"
        unfinished.write_text(scheduler)
        unfinished.replace(self._folder / "scheduler")
        self._scheduler = scheduler
        self._pointed.set()

    async def stop(self, drain: bool) -> None:
        """End the process, in good order or at once; to be followed by the end of this actor."""
        self._state = "stopping"
        self._stopping.set()
        self._pointed.set()
        if self._service is not None:
            plan = self._plan
            # An executor is not drained by SIGINT, and ends at once.
            number = signal.SIGTERM if drain or plan.kind != "executor" else signal.SIGINT
            await self._service.stop(number, plan.drain_seconds if drain else plan.end_seconds)
        if self._running is not None:
            await self._running
        self._state = "stopped"
        shutil.rmtree(self._folder, ignore_errors=True)

    async def describe(self) -> dict[str, Any]:
        """Return a ``Description`` as a dictionary: the controller may be of another version."""
        description = Description(
            digest=self._plan.digest,
            version=package_version(),
            state=self._state,
            node=self._node,
            address=self._address,
            pid=self._service.pid if self._service is not None else None,
            since=self._since,
            restarts=self._restarts,
            listening=self._listening,
            scheduler=self._scheduler,
            problem=self._problem,
        )
        return dict(to_builtins(description))

    async def lines(self, after: int) -> tuple[int, list[str]]:
        """Return what it has logged behind the first ``after`` lines, as far as it is kept, and the number of lines."""
        count = min(len(self._lines), max(0, self._num_lines - after))
        return self._num_lines, list(self._lines)[len(self._lines) - count :]

    async def _run(self) -> None:
        if self._plan.kind != "scheduler":
            await self._pointed.wait()
        try:
            variables = self._plan.variables | await self._devices()
        except ray.exceptions.RayError as error:
            # The others of the group are on this node, so this actor will not live long either.
            self._said(f"the group has lost a rank: {error}")
            os._exit(1)
        failures = 0
        while not self._stopping.is_set():
            began = self._since = time.time()
            self._service = Service(self._name, self._plan.module, self._argv(), self._printed, variables, self._said)
            try:
                code = await self._service.run()
            except OSError as error:
                self._said(f"cannot be started: {error}")
                code = CANNOT_START
            self._listening, self._service = [], None
            if self._stopping.is_set():
                break
            self._state, self._restarts = "starting", self._restarts + 1
            failures = 0 if time.time() - began > _SETTLED_SECONDS else failures + 1
            pause = _PAUSES[min(max(0, failures - 1), len(_PAUSES) - 1)]
            if code == CANNOT_START:
                if self._plan.kind == "scheduler" and self._listened:
                    self._listened, pause = [], 0.0  # its last ports are taken: others will do
                else:
                    self._problem, pause = self._lines[-1] if self._lines else "it has said nothing", _PAUSES[-1]
            text = f"ended with exit code {code}, starting it again in {pause:g} s"
            print(f"{self._name:<10} | {text}", file=sys.stderr, flush=True)
            self._said(text)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _argv(self) -> list[str]:
        """Return its arguments on this node."""
        host = f"[{self._address}]" if ":" in self._address else self._address
        given = list(self._plan.argv)
        if self._plan.keys:
            folder = self._folder / "keys"
            _write(folder, self._plan.keys)
            given.append(f"--keys={folder}")
        if self._plan.kind == "scheduler":
            # The same ports as before, if it has had some: whoever is connected need not be told.
            gateways, executors = self._listened or [f"tcp://{host}:*"] * 2
            return [*given, f"--listen={executors}", f"--listen-gateways={gateways}"]
        given.append(f"--scheduler=file:{self._folder / 'scheduler'}")
        if self._plan.kind == "gateway":
            return [*given, f"--host={self._address}", "--reuse-port", f"--gateway-id={self._name}"]
        return [
            *given,
            f"--block-listen=tcp://{host}:*",
            f"--advertise={self._address}",
            f"--executor-id={self._name}",
        ]

    async def _devices(self) -> dict[str, str]:
        """Return the variables that show the process the GPUs of all ranks; the other ranks' are held by seats."""
        if not self._plan.gpus or self._plan.ranks == 1:
            return {}  # Ray has set them for this actor, and the process inherits them
        group = get_current_placement_group()
        self._seats = [
            ray.remote(Seat)
            .options(
                num_cpus=self._plan.cpus,
                num_gpus=self._plan.gpus,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            .remote()
            for rank in range(1, self._plan.ranks)
        ]
        others = [await seat.gpus.remote() for seat in self._seats]
        return {"CUDA_VISIBLE_DEVICES": ",".join(gpu for some in [_own_gpus(), *others] for gpu in some)}

    def _printed(self, line: str) -> None:
        if line.startswith("listening "):
            self._listening = line.split()[1:]
            self._listened = self._listening
            self._is_ready()

    def _said(self, line: str) -> None:
        self._lines.append(line[:_LINE_CHARACTERS])
        self._num_lines += 1
        if self._plan.kind == "executor" and "joined the scheduler at" in line:
            self._is_ready()

    def _is_ready(self) -> None:
        if self._state == "starting":
            self._state, self._problem = "ready", ""


class Seat:
    """Holds the GPU of a rank whose process another actor starts. It ends with that actor, which owns it."""

    async def gpus(self) -> list[str]:
        """Return the GPUs of this seat."""
        return _own_gpus()


def _own_gpus() -> list[str]:
    ids: dict[str, list[Any]] = ray.get_runtime_context().get_accelerator_ids()
    return [str(each) for each in ids.get("GPU", [])]


def _remove_folders_of_the_dead() -> None:
    """Remove what process actors that were killed on this host have left."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        if not Path("/proc", folder.name.removeprefix(_FOLDER).split("-")[0]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, files: dict[str, bytes]) -> None:
    """Write files that their owner alone can read."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
