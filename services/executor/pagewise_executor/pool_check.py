"""Whether a KV pool is large enough to be of use."""

from pagewise_shared.config import size_text
from pagewise_shared.errors import ModelError

_USEFUL_TOKENS = 256


def check_pool(num_blocks: int, block_size: int, block_bytes: int, max_model_len: int) -> None:
    """Check that a pool holds one sequence of useful length: 256 tokens, or ``max_model_len`` if that is less.

    ``block_size``: tokens per block. ``block_bytes``: bytes per block; 0 if no memory is taken.

    Raises:
        ModelError: it does not; the text says what fits, and what would be needed.
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
