"""The command itself: options, what is missing, and where results go."""

import asyncio
import contextlib
import gc
import importlib.util
import resource
import sys
from collections.abc import Callable, Sequence

from pagewise.bench.options import parse
from pagewise.bench.servers import BenchError
from pagewise.bench.workloads import WorkloadError, plan

_PACKAGES = ("aiohttp", "tqdm", "matplotlib")


def bench(arguments: Sequence[str]) -> int:
    """Run ``pagewise bench``; returns the process's exit code: 1 if nothing was measured, or no request succeeded."""
    options = parse(arguments)
    needed = _PACKAGES if options.plot is not None else _PACKAGES[:2]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        return _fail(f"it needs {' and '.join(missing)}: pip install 'pagewise[bench]'")
    from pagewise.bench import report
    from pagewise.bench.run import file_name, run

    _allow_connections()
    try:
        workload = plan(options)
        gc.freeze()  # what is planned stays; collecting it again and again would stop the clock
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            result, outcomes = runner.run(run(options, workload, arguments))
    except (BenchError, WorkloadError) as error:
        return _fail(str(error))
    print(report.tables(result))
    if options.save_result or options.result_filename:
        path = options.result_dir / (options.result_filename or file_name())
        report.write(path, result)
        print(f"\nWritten to {path}")
    if options.plot is not None:
        from pagewise.bench.plot import plot

        plot(result, outcomes, options, options.plot)
        print(f"Drawn in {options.plot}")
    return 0 if all(one["completed"] for server in result["servers"] for one in server["rounds"]) else 1


def _fail(text: str) -> int:
    print(f"pagewise bench: {text}", file=sys.stderr)
    return 1


def _allow_connections() -> None:
    """Raise the limit of open files as far as it goes: every request at once has a connection."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes event loops: uvloop's, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
