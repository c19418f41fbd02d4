"""``pagewise-scheduler``: starts the scheduler service."""

import logging
import sys
from collections.abc import Sequence

import zmq
from pagewise_shared.config import SchedulerConfig, parse_config
from pagewise_shared.errors import PagewiseError
from pagewise_shared.logs import configure_logging

from pagewise_scheduler.service import run

log = logging.getLogger(__name__)

_CANNOT_START = (PagewiseError, OSError, zmq.ZMQError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        SchedulerConfig,
        argv,
        prog="pagewise-scheduler",
        description="Schedule the requests of gateways over executors.",
    )
    configure_logging(config.log_level, "scheduler")
    try:
        run(config)
    except _CANNOT_START as error:
        log.error("cannot start: %s", error)
        return 2
    except ExceptionGroup as group:
        expected, unexpected = group.split(_CANNOT_START)
        if unexpected is not None:
            raise
        for leaf in _leaves(expected):
            log.error("cannot go on: %s", leaf)
        return 2
    return 0


def _leaves(error: BaseException | None) -> list[BaseException]:
    """The errors that a group is made of, however deep."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [] if error is None else [error]


if __name__ == "__main__":
    sys.exit(main())
