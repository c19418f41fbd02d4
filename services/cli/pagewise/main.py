"""``pagewise``: the command line."""

import asyncio
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from functools import partial

from pagewise_shared.config import GatewaysConfig, ServeConfig, misspelt_variables, parse_config
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import warn_of_variables
from pagewise_shared.version import package_version

from pagewise.cache import cache
from pagewise.chat import chat
from pagewise.client import CommandError
from pagewise.cluster import commands as cluster
from pagewise.doctor.command import doctor
from pagewise.explain import explain
from pagewise.keys import keys
from pagewise.memory import pmap, vmstat
from pagewise.serve import gateways, serve

USAGE = """usage: pagewise COMMAND [OPTIONS]

commands:
  serve [MODEL]     start a scheduler, gateways and executors on this machine and serve MODEL over HTTP
  gateways [MODEL]  start gateways alone, on one port, for a scheduler that runs already
  up [MODEL]        start a scheduler, gateways and executors on a Ray cluster, or change those that run there
  status            print the processes of a Ray cluster and their nodes
  logs [PROCESS]    print their log lines
  down              end them
  vmstat [S]        print statistics of KV memory every S seconds
  chat              talk to a model that is served
  top               show executors, memory and requests full-screen
  pmap REQUEST      print the blocks of a request and their history
  cache VERB        list cached prefixes, or release them
  explain REQUEST   say where the time of a request went, and where its cached prefix was lost
  doctor [URL]      check this machine, and print a text for a bug report
  keys VERB         make, list and revoke the keys of the scheduler, its executors and its gateways
  wipe              delete the KV of requests with one cache salt from a disk cache or a store
  size MODEL        print the GPU memory that a model takes, and the tokens of KV that fit beside it
  replay TRACE      run a request trace through the scheduler under a virtual clock
  segments TRACE    print repeats in the prompts of a trace that prefix caching does not reach
  completion SHELL  print a script that lets bash, zsh or fish complete these commands and their options

`pagewise COMMAND --help` lists the options of a command. `pagewise --version` prints the version."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the process's exit code."""
    if "_ARGCOMPLETE" in os.environ:
        from pagewise.completion import complete

        complete(COMMANDS)
    arguments = list(sys.argv[1:] if argv is None else argv)
    name = next(iter(arguments), "")
    if name in ("", "-h", "--help", "--version"):
        print(f"pagewise {package_version()}" if name == "--version" else USAGE)
        return 2 * (not name)
    command = COMMANDS.get(name)
    if command is None:
        print(f"pagewise: no command {name!r}\n\n{USAGE}", file=sys.stderr)
        return 2
    if command not in (_serve, _gateways, cluster.up):  # these log
        for warning in misspelt_variables(os.environ):
            print(f"pagewise {name}: {warning}", file=sys.stderr)
    return _exit_code(name, command, arguments[1:])


def _exit_code(name: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command; a ``CommandError``, a closed pipe and Ctrl-C become exit codes."""
    try:
        try:
            return command(arguments)
        finally:
            sys.stdout.flush()
    except CommandError as error:
        print(f"pagewise {name}: {error}", file=sys.stderr)
        return 1
    except (
        BrokenPipeError
    ):  # `pagewise ... | head`: the reader has ended, and Python would print an error when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):  # the second: Ctrl-C while a model is downloaded
        return 130


def _serve(arguments: Sequence[str]) -> int:
    config = parse_config(
        ServeConfig,
        arguments,
        prog="pagewise serve",
        description="Start a scheduler, gateways and executors as separate processes, and serve a model over HTTP.",
    )
    configure_logging(config.scheduler.log_level, "serve", config.scheduler.log_format)
    warn_of_variables()
    return asyncio.run(serve(config))


def _gateways(arguments: Sequence[str]) -> int:
    config = parse_config(
        GatewaysConfig,
        arguments,
        prog="pagewise gateways",
        description="Start gateways that serve HTTP on one port, for a scheduler that runs already.",
    )
    configure_logging(config.gateway.log_level, "gateways", config.gateway.log_format)
    warn_of_variables()
    return asyncio.run(gateways(config))


def _top(arguments: Sequence[str]) -> int:
    from pagewise.top.command import top  # other commands need not load it

    return top(arguments)


def _run(module: str, arguments: Sequence[str]) -> int:
    """Run a service's own command by its module's name: the service may not be installed."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def _completion(arguments: Sequence[str]) -> int:
    from pagewise.completion import completion  # as above

    return completion(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "gateways": _gateways,
    "up": cluster.up,
    "status": cluster.status,
    "logs": cluster.logs,
    "down": cluster.down,
    "cache": cache,
    "vmstat": vmstat,
    "pmap": pmap,
    "explain": explain,
    "chat": chat,
    "doctor": doctor,
    "keys": keys,
    "replay": partial(_run, "pagewise_scheduler.replay.main"),
    "segments": partial(_run, "pagewise_gateway.segment_report"),
    "top": _top,
    "wipe": partial(_run, "pagewise_executor.tiers.wipe"),
    "size": partial(_run, "pagewise_executor.sizing"),
    "completion": _completion,
}

if __name__ == "__main__":
    sys.exit(main())
