"""``pagewise serve``: one scheduler and its executors on this machine, started, watched and stopped together."""

import asyncio
import json
import logging
import os
import shutil
import signal
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
from pagewise_shared.config import ExecutorConfig, SchedulerConfig, ServeConfig, secret_variables, to_argv

from pagewise.process import Service

log = logging.getLogger(__name__)

CANNOT_START = 2
"""A service's exit code when starting it again would fail the same way."""

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_RESTART_PAUSES = (0.5, 1.0, 2.0, 5.0, 10.0)
_SETTLED_SECONDS = 30.0
_PROGRESS_SECONDS = 5.0


class StartError(Exception):
    """A service cannot be started; the text says which."""


async def serve(config: ServeConfig) -> int:
    """Run until Ctrl-C or SIGTERM, or until the scheduler ends; returns the exit code."""
    try:
        gpus = gpu_variables(config, visible_gpus())
    except StartError as error:
        log.error("%s", error)
        return 1
    directory = Path(tempfile.mkdtemp(prefix="pagewise-"))
    endpoint = config.listen or f"ipc://{directory}/scheduler.sock"
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    fleet = _Fleet(config, endpoint, gpus)
    running = asyncio.create_task(fleet.run())
    stopping = asyncio.create_task(stop.wait())
    code = 0
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            code = _exit_code(running)
        else:
            log.info("stopping")
    finally:
        await fleet.stop()
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)
        shutil.rmtree(directory, ignore_errors=True)
    return code


def visible_gpus() -> list[str]:
    """The GPUs that executors may use, as CUDA_VISIBLE_DEVICES names them: all of the machine unless it is set."""
    named = os.environ.get(_VISIBLE)
    if named is None:
        # This process does without torch, which could tell; CUDA counts from 0 whatever the device files are called.
        return [str(number) for number, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]
    return [name for name in named.replace(" ", "").split(",") if name not in ("", "-1")]


def gpu_variables(config: ServeConfig, gpus: list[str]) -> list[dict[str, str]]:
    """What each executor finds in its environment, so that each has a GPU of its own as far as there are enough.

    Raises:
        StartError: several would take most of the same GPU's memory, each for itself.
    """
    count = config.executors
    if count < 2 or not gpus or config.device == "cpu" or config.simulate:
        return [{}] * count
    if count > len(gpus) and config.kv_memory is None and config.num_blocks is None:
        said = (
            f"{count} executors share {len(gpus)} GPUs: say how much memory each KV pool gets with --kv-memory, "
            "or each takes most of what is free"
        )
        if config.device == "cuda":
            raise StartError(said)
        log.warning("%s", said)  # they may turn out to use the CPU
    return [{_VISIBLE: gpus[number % len(gpus)]} for number in range(count)]


def _exit_code(running: "asyncio.Task[None]") -> int:
    error = running.exception()
    if isinstance(error, StartError):
        log.error("%s", error)
        return 1
    if error is not None:
        raise error
    return 0


class _Fleet:
    """The processes of one ``pagewise serve``. ``gpus``: variables of each executor."""

    def __init__(self, config: ServeConfig, endpoint: str, gpus: list[dict[str, str]]) -> None:
        self._config, self._endpoint = config, endpoint
        scheduler = to_argv(config, SchedulerConfig)
        self._scheduler = Service(
            "scheduler",
            "pagewise_scheduler.main",
            [*_without(scheduler, "listen"), f"--listen={endpoint}"],
            self._hear,
            secret_variables(config, SchedulerConfig),
        )
        threads = config.threads or max(1, len(os.sched_getaffinity(0)) // max(1, config.executors))
        if config.threads is None and config.executors > 1:
            config = msgspec.structs.replace(config, threads=threads)
        self._executors = [
            Service(
                f"executor-{number}",
                "pagewise_executor.main",
                [*to_argv(config, ExecutorConfig), f"--scheduler={endpoint}", f"--executor-id=executor-{number}"],
                lambda line: None,
                variables,
            )
            for number, variables in enumerate(gpus)
        ]
        self._url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Start everything and keep it running.

        Raises:
            StartError: the scheduler ended, or an executor cannot start.
        """
        self._tasks = [asyncio.create_task(self._keep_scheduler()), asyncio.create_task(self._announce())]
        self._tasks += [asyncio.create_task(self._keep_executor(service)) for service in self._executors]
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """Stop all processes: executors first, so that they can say Goodbye."""
        for task in self._tasks:
            task.cancel()
        # Not SIGTERM, which would have them moved to one another first.
        await asyncio.gather(*(service.stop(signal.SIGINT) for service in self._executors))
        await self._scheduler.stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _hear(self, line: str) -> None:
        if line.startswith("listening ") and not self._url.done():
            self._url.set_result(line.removeprefix("listening "))

    async def _keep_scheduler(self) -> None:
        code = await self._scheduler.run()
        raise StartError(f"the scheduler ended with code {code}: stopping")

    async def _keep_executor(self, service: Service) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            code = await service.run()
            if code == CANNOT_START:
                raise StartError(f"{service.name} cannot start, its last lines say why: stopping")
            failures = 0 if time.monotonic() - began > _SETTLED_SECONDS else failures + 1
            if failures > len(_RESTART_PAUSES):
                raise StartError(f"{service.name} ended {failures} times in a row right after its start: stopping")
            pause = _RESTART_PAUSES[max(0, failures - 1)]
            log.warning("%s ended with code %d, starting it again in %g s", service.name, code, pause)
            await asyncio.sleep(pause)

    async def _announce(self) -> None:
        """Wait for the first executor, then say how to use what is there."""
        url = await self._url
        if not self._config.executors:
            log.info("%s is up; pagewise-executor --scheduler=%s joins it", url, self._endpoint)
        began = told = time.monotonic()
        while not await asyncio.to_thread(_healthy, url):
            await asyncio.sleep(0.1)
            if time.monotonic() - told > _PROGRESS_SECONDS:
                told = time.monotonic()
                waiting = "loading the model" if self._config.executors else "waiting for executors"
                log.info("%s, %.0f s so far", waiting, told - began)
        name = self._config.served_model_name or self._config.model
        body = json.dumps(
            {"model": name, "prompt": "class Point:\n    def __init__(self", "max_tokens": 64, "stream": True}
        )
        keys = self._config.api_keys or self._config.api_keys_file
        key = '-H "Authorization: Bearer $PAGEWISE_API_KEY" ' if keys else ""
        print(
            f"\nServing {name} at {url} (ready after {time.monotonic() - began:.1f} s). Try:\n\n"
            f"  curl -N {url}/v1/completions {key}-H 'Content-Type: application/json' -d '{body}'\n",
            flush=True,
        )
        await asyncio.Event().wait()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:  # noqa: S310  # nosec B310 # our own server
            return bool(answer.status == 200)
    except OSError:  # not there yet, or 503: URLError and HTTPError are OSErrors
        return False


def _without(argv: list[str], name: str) -> list[str]:
    return [argument for argument in argv if not argument.startswith(f"--{name}=")]
