"""The process that ``LLM`` starts: ``pagewise serve`` with options from standard input, as JSON.

It is killed with the process that started it, and so are the services, its children.
"""

import asyncio
import json
import os
import sys

from pagewise_shared.config import ServeConfig, build_config
from pagewise_shared.errors import ConfigError
from pagewise_shared.logs import configure_logging
from pagewise_shared.service_process import die_with_parent, warn_of_variables

from pagewise.serve import serve, url_of, wait_until_ready


def main() -> int:
    """Run the services until SIGTERM; returns the exit code."""
    die_with_parent()
    given = json.loads(sys.stdin.readline())
    if os.getppid() != given["parent"]:  # the parent ended before die_with_parent
        return 1
    try:
        config = build_config(ServeConfig, given["options"], os.environ)
    except ConfigError as error:
        print(f"pagewise: {error}", file=sys.stderr)
        return 2
    configure_logging(config.scheduler.log_level, "serve", config.scheduler.log_format)
    warn_of_variables()
    return asyncio.run(serve(config, _print_url))


async def _print_url(config: ServeConfig) -> None:
    await wait_until_ready(config)
    print(json.dumps({"url": url_of(config.gateway)}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
