"""The actor that holds one process: it starts and restarts the process, keeps its log lines, and ends it.

Ray is imported inside of functions: only the address of the node and the GPUs come from Ray.
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
from pagewise.ports import text_of
from pagewise.process import Restarts, Service

_HOPELESS_SECONDS = 60.0
"""Until a process that cannot start is restarted."""
_EARLY_ENDS = 2
"""How often in a row a process may end before it is ready until its description has a problem."""
_STATUS = "services.json"
_LINES_KEPT = 1000
_LINE_CHARACTERS = 2000
_RANK_SECONDS = 5.0
"""How long rank 0 may go on after the end of another rank, which it should notice by itself."""


class Description(Struct, frozen=True, kw_only=True):
    """The state of an actor's process. The actor may be of another version, so every field has a default.

    Fields:
        since: time of the last start, seconds since 1970.
        listening: the printed addresses: a scheduler's endpoints for gateways and executors, a gateway's URL.
        scheduler: the address of the scheduler that the controller has sent.
        problem: the reason why the process does not start; empty if it does.
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


def read_description(answer: Any) -> Description:
    """Return the description in an actor's answer.

    An answer that cannot be read comes from another version. It counts as ready and without a digest, so that the
    actor is replaced like any other one with old options.
    """
    try:
        return convert(answer, Description)
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
        """Return the name, which Ray puts in front of lines."""
        return self._name

    async def start(self) -> None:
        """Run the process, if it does not run. A gateway or executor waits for the address of the scheduler."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(self._end_if_failed)

    async def kept(self) -> dict[str, Any]:
        """Return the keys and options that the next plan keeps, as ``Controller.kept`` does for all processes."""
        return {"keys": self._plan.keys, "served": self._plan.served and asdict(self._plan.served)}

    async def metrics(self) -> str | None:
        """Return the metrics of this gateway; None if it does not answer.

        The request carries an API key, so it is sent on the gateway's own host: the key must not cross a network by
        HTTP, nor by TLS without a verified certificate.
        """
        if not self._listening:
            return None
        return await asyncio.to_thread(text_of, f"{self._listening[0]}/metrics", self._plan.metrics_key)

    async def point(self, scheduler: str) -> None:
        """Set the address of the scheduler. A running process follows the file with it."""
        try:
            self._write_scheduler(scheduler)
        except OSError as error:  # the controller asks again
            self._problem_of_pointing = f"the scheduler's address cannot be written: {error}"
            return
        self._scheduler, self._problem_of_pointing = scheduler, ""
        self._pointed.set()

    async def report(self, services: dict[str, dict[str, Any]]) -> None:
        """Write the ``ServiceStatus`` of every process, by name, for the scheduler that runs here."""
        with contextlib.suppress(OSError):  # the controller reports again after any change
            write_status(self._folder.path() / _STATUS, convert(services, dict[str, ServiceStatus]))

    async def stop(self, drain: bool) -> None:
        """End the process, gracefully or at once. The controller then ends this actor."""
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
        """Return the number of logged lines, and the kept ones after the first ``after`` of them."""
        count = min(len(self._lines), max(0, self._num_lines - after))
        return self._num_lines, list(self._lines)[len(self._lines) - count :]

    async def log_of_rank(self, rank: int, line: str) -> None:
        """Keep a line that the process of another rank has logged."""
        self._keep(f"rank {rank} | {line}")

    async def _run(self) -> None:
        if self._plan.kind != "scheduler":
            await self._pointed.wait()
        variables = self._plan.variables | await self._ranks.take_places()
        while not self._stopping.is_set():
            began, lines_before = time.time(), self._num_lines
            self._since = began
            try:
                argv = self._argv()
                self._service = Service(self._name, self._plan.module, argv, self._take_line, variables, self._keep)
                code = await self._service.run()
            except OSError as error:
                self._keep(f"cannot be started: {error}")
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
            self._keep(text)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)
        await self._ranks.close()

    def _argv(self) -> list[str]:
        host = in_brackets(self._address)
        given = [*self._plan.argv, *key_option(self._folder, self._plan.keys)]
        if self._plan.kind == "scheduler":
            # The ports of the last process, if there was one: connected processes find the next one there.
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
        """Write the address of the scheduler, and return the file."""
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
            # With a new placement group, which only a new actor gets, ranks may find room elsewhere.
            print(f"{self._name:<10} | a rank is lost: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        # Rank 0 usually ends by itself. If a collective operation blocks it, it is killed; unless it was restarted in
        # the meantime, when ``_service`` is another one.
        await asyncio.sleep(_RANK_SECONDS)
        if service is not None and service is self._service and service.pid is not None:
            self._keep(f"rank {rank} has ended with exit code {code}, so all have to")
            service.kill()

    def _take_line(self, line: str) -> None:
        if line.startswith("listening "):
            self._listening = line.split()[1:]
            self._listened = self._listening
            self._is_ready()
        elif line.startswith("joined "):
            self._is_ready()
        elif line.startswith("ranks "):
            self._ranks_running = asyncio.ensure_future(self._run_ranks(line.split()[1]))

    def _keep(self, line: str) -> None:
        self._lines.append(line[:_LINE_CHARACTERS])
        self._num_lines += 1

    def _last_line(self, before: int) -> str:
        return self._lines[-1] if self._num_lines > before else "it has logged nothing"

    def _is_ready(self) -> None:
        if self._state == "starting":
            self._state, self._problem = "ready", ""

    def _end_if_failed(self, run: "asyncio.Task[None]") -> None:
        """End this actor and its process after an error in ``_run``; the controller starts another actor.

        An actor that loses a place of its placement group fails so: only a new actor gets a new group.
        """
        if not run.cancelled() and (error := run.exception()) is not None:
            print(f"{self._name:<10} | {''.join(traceback.format_exception(error))}", file=sys.stderr, flush=True)
            os._exit(1)
