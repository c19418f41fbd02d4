"""``pagewise-gateway``: starts the gateway service."""

import logging
import sys
from collections.abc import Sequence

import zmq
from pagewise_shared.config import GatewayConfig, parse_config
from pagewise_shared.errors import PagewiseError
from pagewise_shared.logs import configure_logging

from pagewise_gateway.link import RefusedError
from pagewise_gateway.service import run

log = logging.getLogger(__name__)

CANNOT_START = 2
"""Exit code when starting again would fail the same way."""

_EXPECTED = (PagewiseError, RefusedError, OSError, zmq.ZMQError)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        GatewayConfig,
        argv,
        prog="pagewise-gateway",
        description="Serve an OpenAI-compatible HTTP endpoint, and have a pagewise-scheduler run what clients ask for.",
    )
    configure_logging(config.log_level, "gateway")
    try:
        run(config)
    except _EXPECTED as error:
        log.error("cannot start: %s", error)
        return CANNOT_START
    except ExceptionGroup as group:
        expected, unexpected = group.split(_EXPECTED)
        if unexpected is not None:
            raise
        for leaf in _leaves(expected):
            if isinstance(leaf, RefusedError):
                log.error("the scheduler at %s refused this gateway: %s", config.scheduler, leaf)
            else:
                log.error("cannot go on: %s", leaf)
        return CANNOT_START
    return 0


def _leaves(error: BaseException | None) -> list[BaseException]:
    """The errors that a group is made of, however deep."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [] if error is None else [error]


if __name__ == "__main__":
    sys.exit(main())
