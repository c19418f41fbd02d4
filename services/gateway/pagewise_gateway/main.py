"""``pagewise-gateway``: starts the gateway service."""

import sys
from collections.abc import Sequence

from pagewise_shared.config import GatewayConfig, parse_config
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import exit_code_of, run_event_loop, tune_allocator, warn_of_variables

from pagewise_gateway.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        GatewayConfig,
        argv,
        prog="pagewise-gateway",
        description="Serve an OpenAI-compatible HTTP endpoint, and have a pagewise-scheduler run what clients ask for.",
    )
    configure_logging(config.log_level, "gateway", config.log_format)
    warn_of_variables()
    tune_allocator()
    return exit_code_of(lambda: run_event_loop(serve(config)))


if __name__ == "__main__":
    sys.exit(main())
