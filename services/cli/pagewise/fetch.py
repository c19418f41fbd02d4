"""Downloads a model before any service starts: ``python -m pagewise.fetch MODEL``, which ``pagewise serve`` runs.

It is a process of its own, because the hub's client takes memory that the supervisor would keep, and because Ctrl-C
then ends a download at once. It draws progress bars on the terminal, to which no other process writes yet. Standard
output gets the error, in one sentence.
"""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence

from pagewise_shared.config import ServeConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.logs import configure_logging
from pagewise_shared.model_files import fetch_model, local_model
from pagewise_shared.service_process import CANNOT_START, die_with_parent

from pagewise.supervisor import StartError


async def fetch(config: ServeConfig) -> None:
    """Download the model into the hub's cache, if it is not on this machine.

    Raises:
        StartError: there is no such model, or it cannot be downloaded.
    """
    gateway, executor = config.gateway, config.executor
    try:
        if (folder := local_model(gateway.model)) is not None and folder.is_dir():
            return
    except ModelError as error:
        raise StartError(str(error)) from error
    argv = [gateway.model, f"--log-level={config.scheduler.log_level}", f"--log-format={config.scheduler.log_format}"]
    argv += [f"--revision={gateway.revision}"] if gateway.revision else []
    argv += ["--tokenizer-only"] if executor.simulate or not config.executors else []
    argv += ["--remote-code"] if executor.trust_remote_code else []
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pagewise.fetch", *argv, stdout=asyncio.subprocess.PIPE, preexec_fn=die_with_parent
    )
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    # The kernel may hand Ctrl-C to the thread that waits for the child's end. asyncio.run()'s own handler would then
    # not run before something else wakes the event loop. The loop's handlers wake it.
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        await process.wait()
        raise
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if process.returncode:
        raise StartError(output.decode(errors="replace").strip() or f"{gateway.model} cannot be downloaded")


def main(argv: Sequence[str] | None = None) -> int:
    """Download a model; returns the exit code."""
    parser = argparse.ArgumentParser(prog="pagewise.fetch", description="Download a model from the hub.")
    parser.add_argument("model")
    parser.add_argument("--revision")
    parser.add_argument("--tokenizer-only", action="store_true")
    parser.add_argument("--remote-code", action="store_true")
    parser.add_argument("--log-level", default="info")
    parser.add_argument("--log-format", default="text")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))  # threads of the client would go on
    configure_logging(options.log_level, "fetch", options.log_format)
    try:
        fetch_model(
            options.model,
            options.revision,
            tokenizer_only=options.tokenizer_only,
            remote_code=options.remote_code,
            bars=options.log_format == "text" and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb",
        )
    except ModelError as error:
        print(error)
        return CANNOT_START
    return 0


if __name__ == "__main__":
    sys.exit(main())
