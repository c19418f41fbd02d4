"""Supervises the processes of one command: restarts dead ones, and stops all of them in order."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pagewise_shared.service_process import CANNOT_START
from pagewise_shared.service_status import ServiceStatus, write_status

from pagewise.process import STOP_SECONDS, Restarts, Service

log = logging.getLogger(__name__)

_MOST_EARLY_ENDS = 5
"""Ends in a row soon after the start that are an error, while nothing has served yet."""
_PROBLEM_ENDS = 3
"""Ends in a row before a process is ready that ``/health`` reports as a problem."""
_INTERRUPTED = 130


class StartError(Exception):
    """A service cannot be started; the text names it and the reason."""


class Group(NamedTuple):
    """Services that stop together: by ``signal``, and by SIGKILL after ``seconds``."""

    services: Sequence[Service]
    signal: signal.Signals
    seconds: float = STOP_SECONDS


class Supervisor:
    """Runs groups of services, and stops them one group after the other.

    A service that cannot start, or ends again and again, is an error that stops all of them before the announcement.
    After it the others have clients, so the service is restarted after growing pauses, and its problem is written to
    ``status``. ``exit_on_failure``: stop all of them then too.
    """

    def __init__(self, groups: Sequence[Group], status: Path | None = None, *, exit_on_failure: bool = False) -> None:
        self._groups = groups
        self._status, self._exit_on_failure = status, exit_on_failure
        self._served = False
        self._statuses: dict[str, ServiceStatus] = {}
        self._services = [service for group in groups for service in group.services]
        self._stopping = asyncio.Event()
        self._killed = False

    async def run(self, announcement: Coroutine[None, None, None]) -> int:
        """Run until Ctrl-C or SIGTERM, or until a service cannot start; returns the exit code.

        ``announcement`` runs beside the services, and ends when they serve. A second signal kills everything at once.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        stop: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        beside = asyncio.create_task(self._announce(announcement))
        runs = [asyncio.create_task(self._keep(service)) for service in self._services]
        tasks = {stop, beside, *runs}
        failure: StartError | None = None
        try:
            while not stop.done():
                done, tasks = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            log.info("stopping")
        except StartError as error:
            failure = error
            log.info("stopping all services")
        finally:
            # The tasks in ``runs`` are not cancelled, because they relay the last lines of their services. Each ends
            # when its service has, so the services stop first.
            await self._stop()
            beside.cancel()
            await asyncio.gather(stop, beside, *runs, return_exceptions=True)
        if failure is not None:
            log.error("%s", failure)  # after all lines of the services, so that it is the last one
            return 1
        return _INTERRUPTED if self._killed else 0

    async def _announce(self, announcement: Coroutine[None, None, None]) -> None:
        await announcement
        self._served = True

    def _interrupt(self) -> None:
        """Stop the groups in order at the first signal, and kill all services at the second."""
        if not self._stopping.is_set():
            self._stopping.set()
            return
        self._killed = True
        for service in self._services:
            service.kill()

    async def _stop(self) -> None:
        self._stopping.set()
        for group in self._groups:
            await asyncio.gather(*(service.stop(group.signal, group.seconds) for service in group.services))

    async def _keep(self, service: Service) -> None:
        """Run a service, and restart it whenever it ends, after growing pauses if it ends soon.

        Raises:
            StartError: the service cannot start, or has ended too often in a row, so that all of them have to stop.
        """
        service.on_ready = lambda: self._note(service)
        restarts = Restarts()
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await service.run()
            if self._stopping.is_set():
                return
            pause = restarts.ended(time.monotonic() - began, ready=service.ready)
            problem = _problem(service, code, restarts.failures)
            if self._gives_up(code, restarts.failures):
                raise StartError(f"{service.name} {problem}")
            failing = code == CANNOT_START or restarts.early_ends >= _PROBLEM_ENDS
            self._note(service, problem if failing else "", restarts=1)
            if code:
                log.warning(
                    "%s ended with exit code %d, starting it again in %g s%s", service.name, code, pause, _meaning(code)
                )
            else:
                # An operator sent SIGTERM to have another process, or fewer of them, which is not done here.
                option = "--executors" if service.name.startswith("executor-") else "--gateways"
                fewer = f"; for fewer, restart with a lower {option}" if service.name != "scheduler" else ""
                log.info("%s was stopped, starting it again in %g s%s", service.name, pause, fewer)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)

    def _gives_up(self, code: int, failures: int) -> bool:
        """Return whether all services have to stop: one has ended ``failures`` times in a row, now with ``code``."""
        hopeless = code == CANNOT_START or failures > _MOST_EARLY_ENDS
        return hopeless and (self._exit_on_failure or not self._served)

    def _note(self, service: Service, problem: str = "", restarts: int = 0) -> None:
        """Update the status of a service: it is ready, was restarted, or has a problem."""
        before = self._statuses.get(service.name, ServiceStatus())
        status = ServiceStatus(before.restarts + restarts, problem)
        if status == before:
            return
        self._statuses[service.name] = status
        if problem and not before.problem:
            log.error("%s %s; the other processes go on, and this one is tried again", service.name, problem)
        elif before.problem and not problem and not restarts:
            log.info("%s is ready again", service.name)
        if self._status is not None:
            try:
                write_status(self._status, self._statuses)
            except OSError as error:
                log.warning("the status of the services cannot be written: %s", error)


def _problem(service: Service, code: int, failures: int) -> str:
    """Return the problem of a service that has ended ``failures`` times in a row, now with ``code``."""
    if code == CANNOT_START:
        return f"cannot start: {service.reason or 'its last log lines say why'}"
    return f"ended {failures} times in a row right after its start, the last time with exit code {code}{_meaning(code)}"


def _meaning(code: int) -> str:
    """Return the likely cause of an exit code: from here, the kernel's out-of-memory killer looks like any other."""
    return (
        " (killed: if not by an operator, then by the kernel for lack of memory; see `dmesg`)"
        if code == -signal.SIGKILL
        else ""
    )
