"""Logging: one line per event on standard error."""

import logging
import sys


def configure_logging(level: str, service: str) -> None:
    """Log to standard error as ``time level service module: text``; ``level`` is a ``--log-level``."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {service} %(name)s: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "transformers", "huggingface_hub", "asyncio"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
