"""``pagewise-scheduler``: starts the scheduler service."""

import sys
from collections.abc import Sequence

from pagewise_shared.config import SchedulerConfig, parse_config
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import exit_code_of, run_event_loop, tune_allocator, warn_of_variables

from pagewise_scheduler.service import serve


def main(argv: Sequence[str] | None = None) -> int:
    """Run the service; returns the process's exit code."""
    config = parse_config(
        SchedulerConfig,
        argv,
        prog="pagewise-scheduler",
        description="Schedule the requests of gateways over executors.",
    )
    configure_logging(config.log_level, "scheduler", config.log_format)
    warn_of_variables()
    tune_allocator()
    return exit_code_of(lambda: run_event_loop(serve(config)))


if __name__ == "__main__":
    sys.exit(main())
