"""Checks of an executor's options that need no weights, made by ``pagewise serve`` and executors before they start."""

import json
from typing import TYPE_CHECKING

from pagewise_shared.config import ExecutorConfig, size_text
from pagewise_shared.errors import ConfigError, ModelError
from pagewise_shared.model_files import local_model

if TYPE_CHECKING:
    from redis import Redis

_USEFUL_TOKENS = 256
_CONNECT_SECONDS, _ANSWER_SECONDS = 1.0, 2.0


def check_start(config: ExecutorConfig) -> None:
    """Check the lengths and the number of blocks by the model's config.json, if it is on this machine, and the store.

    Raises:
        ModelError: ``--max-model-len`` is over the model's limit, or the pool of ``--num-blocks`` is too small.
        ConfigError: the server of ``--store`` does not answer.
    """
    asked, limit = config.max_model_len, 0 if config.simulate else _length_limit(config.model)
    if asked != "auto":  # the pool is then the limit
        if limit and (asked or 0) > limit:
            raise ModelError(f"--max-model-len {asked} is over the model's own limit of {limit}")
        length = asked or limit or (_USEFUL_TOKENS if config.simulate else 0)
        if config.num_blocks is not None and length:
            check_pool(config.num_blocks, config.block_size, 0, length)
    if config.store is not None and not config.simulate:
        import redis

        try:
            with connect_store(config.store) as client:
                client.ping()
        except (redis.RedisError, ValueError, OSError) as error:
            raise ConfigError(f"--store: {error}") from error


def check_pool(num_blocks: int, block_size: int, block_bytes: int, max_model_len: int) -> None:
    """Check that a pool holds one sequence of useful length: 256 tokens, or ``max_model_len`` if that is less.

    ``block_size``: tokens per block. ``block_bytes``: bytes per block; 0 if they are not known, or no memory is taken.

    Raises:
        ModelError: it does not; the text names the number of tokens that fit, and the memory that is needed.
    """
    length = min(max_model_len, _USEFUL_TOKENS)
    needed = -(-length // block_size)
    if num_blocks >= needed:
        return

    def pool(blocks: int) -> str:
        text = f"{blocks} block" + "s" * (blocks != 1)
        return f"{text}, {size_text(blocks * block_bytes)}" if block_bytes and blocks else text

    raise ModelError(
        f"the KV pool is too small: it would hold {num_blocks * block_size} tokens ({pool(num_blocks)}). One sequence "
        f"of {length} tokens, which is the least, needs {pool(needed)}: raise --kv-memory or --num-blocks"
    )


def connect_store(url: str) -> "Redis":
    """Return a client of the server at ``url``, such as redis://host:6379/0, or rediss:// with TLS.

    Raises:
        ValueError: it is no such URL.
    """
    # Not imported above: only executors with a store need it, and it takes a tenth of a second.
    from redis import Redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    return Redis.from_url(
        url,
        socket_connect_timeout=_CONNECT_SECONDS,
        socket_timeout=_ANSWER_SECONDS,
        retry=Retry(NoBackoff(), 1),  # a connection that the server has closed meanwhile
    )


def _length_limit(model: str) -> int:
    """Return the maximum tokens of a sequence by the model's config.json; 0 if that is not known before the start."""
    if (folder := local_model(model)) is None:
        return 0
    try:
        found = json.loads((folder / "config.json").read_text())
        found = found.get("text_config") or found
        limit = found.get("max_position_embeddings") or found.get("n_positions")
    except (OSError, ValueError, AttributeError):
        return 0  # the reader of the whole file reports the error
    return limit if type(limit) is int else 0
