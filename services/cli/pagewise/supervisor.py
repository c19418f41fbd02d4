"""Supervises the processes of one command: restarts those that die, and stops all of them in order."""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from pagewise_shared.service_process import CANNOT_START

from pagewise.process import STOP_SECONDS, Service

log = logging.getLogger(__name__)

_RESTART_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
_SETTLED_SECONDS = 30.0
_INTERRUPTED = 130


class StartError(Exception):
    """A service cannot be started; the text says which."""


class Group(NamedTuple):
    """Services that stop together: by which signal, and after how many seconds they are killed."""

    services: Sequence[Service]
    signal: signal.Signals
    seconds: float = STOP_SECONDS


class Supervisor:
    """Runs groups of services, and stops them one group after the other."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._services = [service for group in groups for service in group.services]
        self._stopping = asyncio.Event()
        self._killed = False

    async def run(self, announcement: Coroutine[None, None, None]) -> int:
        """Run until Ctrl-C or SIGTERM, or until a service cannot start; returns the exit code.

        ``announcement`` runs beside the services and may end at any time. A second signal kills everything at once.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        stop: asyncio.Task[Any] = asyncio.create_task(self._stopping.wait())
        beside = asyncio.create_task(announcement)
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
            await self._stop()
            beside.cancel()
            await asyncio.gather(stop, beside, *runs, return_exceptions=True)
        if failure is not None:
            log.error(
                "%s", failure
            )  # after what the services have said while they stopped, so that it is the last line
            return 1
        return _INTERRUPTED if self._killed else 0

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
        """Run a service, and start it again whenever it ends, after longer and longer pauses if it ends soon.

        Raises:
            StartError: the service cannot start, or has ended too often in a row.
        """
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            code = await service.run()
            if self._stopping.is_set():
                return
            if code == CANNOT_START:
                raise StartError(f"{service.name} cannot start: {service.reason or 'its last log lines say why'}")
            failures = 0 if time.monotonic() - began > _SETTLED_SECONDS else failures + 1
            if failures > len(_RESTART_PAUSES):
                raise StartError(
                    f"{service.name} ended {failures} times in a row right after its start, the last time with exit "
                    f"code {code}{_meaning(code)}"
                )
            pause = _RESTART_PAUSES[max(0, failures - 1)]
            log.warning(
                "%s ended with exit code %d, starting it again in %g s%s", service.name, code, pause, _meaning(code)
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), pause)


def _meaning(code: int) -> str:
    """Return what an exit code may mean that nobody explains: from here the kernel's killer looks like anybody's."""
    return " (killed: if nobody did it, memory ran out, and `dmesg` says so)" if code == -signal.SIGKILL else ""
