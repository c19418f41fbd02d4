"""``pagewise wipe``: delete the KV of requests with one cache salt from a disk cache or a store."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import redis as redis_package

from pagewise_executor.tiers import disk, redis


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="pagewise wipe",
        description="Delete the KV of requests with one cache salt, of all models, from a disk cache or a store. "
        "Executors may be running; blocks that they compute from now on are written again.",
    )
    parser.add_argument(
        "--salt",
        required=True,
        help="key:NAME for requests with the API key NAME, group:NAME for those of keys that share their cache, "
        "all/SALT for requests without API keys; a request's own cache_salt follows after a slash (key:NAME/SALT)",
    )
    parser.add_argument("--disk-cache", type=Path, metavar="DIR", help="the folder that executors were given")
    parser.add_argument("--store", metavar="URL", help="the server that executors were given")
    given = parser.parse_args(argv)
    if given.disk_cache is None and given.store is None:
        parser.error("give --disk-cache, --store, or both")
    try:
        if given.disk_cache is not None:
            if not given.disk_cache.is_dir():
                parser.error(f"--disk-cache: {given.disk_cache} is no folder")
            print(f"{disk.wipe(given.disk_cache, given.salt)} blocks deleted from {given.disk_cache}")
        if given.store is not None:
            print(f"{redis.wipe(given.store, given.salt)} blocks deleted from the store")
    except (OSError, ValueError, redis_package.RedisError) as error:
        print(f"pagewise wipe: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
