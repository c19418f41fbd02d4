"""The actor that holds one process: starts it, starts it again when it ends, passes its lines on, and ends it.

Ray is imported where it is needed: all but the place of the actor and its GPUs works without.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins
from msgspec.structs import asdict
from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.service_status import ServiceStatus, write_status
from pagewise_shared.version import package_version

from pagewise.cluster.plan import ProcessPlan
from pagewise.cluster.private_folder import PrivateFolder
from pagewise.cluster.rank_actor import FOLDER, Ranks, block_options, in_brackets, key_option, place
from pagewise.cluster.reconcile import State
from pagewise.probe import text_of
from pagewise.process import Restarts, Service

_HOPELESS_SECONDS = 60.0
"""Until a process that cannot start is tried again."""
_EARLY_ENDS = 2
"""How often in a row a process may end before it is ready until its description has a problem."""
_STATUS = "services.json"
_LINES_KEPT = 1000
_LINE_CHARACTERS = 2000
_RANK_SECONDS = 5.0
"""How long rank 0 may go on when another rank has ended: it notices by itself."""


class Description(Struct, frozen=True, kw_only=True):
    """What a process actor says of its process. It may be of another version, so every field has a default.

    Fields:
        listening: the addresses that it has printed: of a scheduler those for gateways and executors, of a gateway its
            URL.
        scheduler: where it was told that the scheduler is.
        problem: why it does not start; empty if it does.
    """

    digest: str = ""
    version: str = ""
    state: State = "starting"
    node: str = ""
    address: str = ""
    pid: int | None = None
    since: float = 0.0
    restarts: int = 0
    listening: list[str] = []
    scheduler: str = ""
    problem: str = ""


def read_description(said: Any) -> Description:
    """Return what a process actor says. If that makes no sense here, it was started with options of before, and serves:
    so it is replaced like every other one of them."""
    try:
        return convert(said, Description)
    except ValidationError:
        return Description(state="ready")


class ProcessActor:
    """Holds one process. Made as a detached actor by the controller, under the name of the process."""

    def __init__(self, name: str, plan: ProcessPlan) -> None:
        self._name, self._plan = name, plan
        self._address, self._node = self._place()
        self._folder = PrivateFolder(FOLDER)
        self._lines: deque[str] = deque(maxlen=_LINES_KEPT)
        self._num_lines = 0
        self._listening: list[str] = []
        self._listened: list[str] = []
        self._scheduler = ""
        self._state: State = "starting"
        self._since = time.time()
        self._restarts = 0
        self._problem, self._problem_of_pointing = "", ""
        self._ends = Restarts()
        self._service: Service | None = None
        self._pointed, self._stopping = asyncio.Event(), asyncio.Event()
        self._running: asyncio.Task[None] | None = None
        self._ranks = Ranks(name, plan)
        self._ranks_running: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        """What Ray puts in front of lines."""
        return self._name

    async def start(self) -> None:
        """Begin to run the process, if it does not run; one other than a scheduler waits until it is pointed to one."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(self._end_if_failed)

    async def kept(self) -> dict[str, Any]:
        """Return what the next plan takes over from this process, as ``Controller.kept`` does for all of them."""
        return {"keys": self._plan.keys, "served": self._plan.served and asdict(self._plan.served)}

    async def metrics(self) -> str | None:
        """Return the metrics of this gateway; None if it does not answer.

        They are asked for here, on its own host, because the request carries an API key: that should not cross a
        network over http, nor over TLS to somebody whose certificate is not verified.
        """
        if not self._listening:
            return None
        return await asyncio.to_thread(text_of, f"{self._listening[0]}/metrics", self._plan.metrics_key)

    async def point(self, scheduler: str) -> None:
        """Say where the scheduler is now. A process that runs notices by itself."""
        try:
            self._write_scheduler(scheduler)
        except OSError as error:  # the controller asks again
            self._problem_of_pointing = f"the scheduler's address cannot be written: {error}"
            return
        self._scheduler, self._problem_of_pointing = scheduler, ""
        self._pointed.set()

    async def report(self, services: dict[str, dict[str, Any]]) -> None:
        """Take the ``ServiceStatus`` of every process, by name, for the scheduler that runs here."""
        with contextlib.suppress(OSError):  # the controller reports again when something changes
            write_status(self._folder.path() / _STATUS, convert(services, dict[str, ServiceStatus]))

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
        self._folder.remove()

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
            problem=self._problem or self._problem_of_pointing,
        )
        return dict(to_builtins(description))

    async def lines(self, after: int) -> tuple[int, list[str]]:
        """Return what it has logged behind the first ``after`` lines, as far as it is kept, and the number of lines."""
        count = min(len(self._lines), max(0, self._num_lines - after))
        return self._num_lines, list(self._lines)[len(self._lines) - count :]

    async def said_by_rank(self, rank: int, line: str) -> None:
        """Note what the process of another rank has logged."""
        self._said(f"rank {rank} | {line}")

    async def _run(self) -> None:
        if self._plan.kind != "scheduler":
            await self._pointed.wait()
        variables = self._plan.variables | await self._ranks.take_places()
        while not self._stopping.is_set():
            began, lines_before = time.time(), self._num_lines
            self._since = began
            try:
                argv = self._argv()
                self._service = Service(self._name, self._plan.module, argv, self._printed, variables, self._said)
                code = await self._service.run()
            except OSError as error:
                self._said(f"cannot be started: {error}")
                code = CANNOT_START
            self._listening, self._service = [], None
            await self._ranks.end()
            if self._stopping.is_set():
                break
            pause = self._ends.ended(time.time() - began, ready=self._state == "ready")
            self._state, self._restarts = "starting", self._restarts + 1
            if code == CANNOT_START:
                if self._plan.kind == "scheduler" and self._listened:
                    self._listened, pause = [], 0.0  # its last ports are taken: others will do
                else:
                    self._problem, pause = self._last_line(lines_before), _HOPELESS_SECONDS
            elif self._ends.early_ends > _EARLY_ENDS:
                self._problem = (
                    f"it has ended {self._ends.early_ends} times before it was ready, now with exit code {code}; its "
                    f"last line: {self._last_line(lines_before)}"
                )
            text = f"ended with exit code {code}, starting it again in {pause:g} s"
            print(f"{self._name:<10} | {text}", file=sys.stderr, flush=True)
            self._said(text)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        await self._ranks.close()

    def _argv(self) -> list[str]:
        """Return its arguments on this node."""
        host = in_brackets(self._address)
        given = [*self._plan.argv, *key_option(self._folder, self._plan.keys)]
        if self._plan.kind == "scheduler":
            # The same ports as before, if it has had some: whoever is connected need not be told.
            gateways, executors = self._listened or [f"tcp://{host}:*"] * 2
            status = f"--service-status={self._folder.path() / _STATUS}"
            return [*given, f"--listen={executors}", f"--listen-gateways={gateways}", status]
        given.append(f"--scheduler=file:{self._write_scheduler(self._scheduler)}")
        if self._plan.kind == "gateway":
            return [*given, f"--host={self._address}", "--reuse-port", f"--gateway-id={self._name}"]
        return [
            *given,
            *block_options(self._address),
            *self._ranks.options(self._address),
            f"--executor-id={self._name}",
        ]

    def _write_scheduler(self, scheduler: str) -> Path:
        """Write where the scheduler is, and return the file.

        Raises:
            OSError: it cannot be written.
        """
        file = self._folder.path() / "scheduler"
        unfinished = file.with_suffix(".new")
        unfinished.write_text(scheduler)
        unfinished.replace(file)
        return file

    @staticmethod
    def _place() -> tuple[str, str]:
        """Return the address of this node, and Ray's id of it."""
        return place()

    async def _run_ranks(self, endpoint: str) -> None:
        """Run the processes of the other ranks while rank 0's runs, which ends when one of them does."""
        service = self._service
        try:
            rank, code = await self._ranks.run(endpoint)
        except Exception as error:
            if self._stopping.is_set():
                return
            # With a new group of places, which only a new actor gets, ranks may find room elsewhere.
            print(f"{self._name:<10} | a rank is lost: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        await asyncio.sleep(_RANK_SECONDS)
        if service is not None and service is self._service and service.pid is not None:
            self._said(f"rank {rank} has ended with exit code {code}, so all have to")
            service.kill()

    def _printed(self, line: str) -> None:
        if line.startswith("listening "):
            self._listening = line.split()[1:]
            self._listened = self._listening
            self._is_ready()
        elif line.startswith("joined "):
            self._is_ready()
        elif line.startswith("ranks "):
            self._ranks_running = asyncio.ensure_future(self._run_ranks(line.split()[1]))

    def _said(self, line: str) -> None:
        self._lines.append(line[:_LINE_CHARACTERS])
        self._num_lines += 1

    def _last_line(self, before: int) -> str:
        """Return the last line behind the first ``before`` of them."""
        return self._lines[-1] if self._num_lines > before else "it has said nothing"

    def _is_ready(self) -> None:
        if self._state == "starting":
            self._state, self._problem = "ready", ""

    def _end_if_failed(self, run: "asyncio.Task[None]") -> None:
        """End this actor, and with it the process, if what holds the process has failed: the controller starts another.

        This happens if the actor loses a place of its group: with a new group, others are found.
        """
        if not run.cancelled() and (error := run.exception()) is not None:
            print(f"{self._name:<10} | {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
            os._exit(1)
