"""Copies of blocks in fewer bits, which tiers below the device hold with ``--tier-dtype``.

A copy is made smaller when it leaves the device, and comes back as numbers of the model's type. KV that is computed
behind such a block depends on its error, so no block of an executor with smaller copies counts as exact: the format of
its blocks, which names them for peers, stores and the next process, has the type and the bound of the copies
(``name``).
"""

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pagewise_kernels.cpu.library import LibraryMissingError
from pagewise_kernels.cpu.small_blocks import SmallBlocks
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from pagewise_executor.kv.kv_pool import KVPool, KVShape
from pagewise_executor.tiers.tier import Rows

log = logging.getLogger(__name__)

_BITS: dict[str, Literal[8, 4]] = {"int8": 8, "int4": 4}


class SmallCopies:
    """Makes copies smaller, unless that changes them by more than ``bound``.

    ``bound``: of the root mean square of the differences of a block, relative to that of its numbers. ``num_bytes``: of
    a smaller copy. ``name``: of the format. ``num_copies``, ``num_exact``: blocks that have left the device so far, and
    the ones of these whose copies stay exact.
    """

    def __init__(self, blocks: SmallBlocks, dtype: str, bound: float) -> None:
        self._blocks, self._bound = blocks, bound
        self.name = f"tiers {dtype} {bound:g}"
        self.num_bytes, self.exact_bytes = blocks.num_bytes, blocks.bytes_per_block
        self.num_copies = self.num_exact = 0

    def shrink(self, rows: Rows, small: Rows) -> list[int]:
        """Write smaller copies of ``rows`` [n, exact_bytes] into ``small`` [n, num_bytes].

        Returns the indices of the blocks that differ by more than the bound, or are no numbers.
        """
        errors = self._blocks.shrink(rows, small)
        above: list[int] = np.flatnonzero(~(errors <= self._bound)).tolist()
        if above and not self.num_exact:
            log.warning(
                "a KV block would change by %.3g of its size in fewer bits, and --tier-error-bound is %g: such blocks "
                "stay exact", errors[above[0]], self._bound,
            )  # fmt: skip
        self.num_copies += len(rows)
        self.num_exact += len(above)
        return above

    def widen(self, small: Rows, rows: Rows) -> None:
        """Write smaller copies [n, num_bytes] back, into ``rows`` [n, exact_bytes]."""
        self._blocks.widen(small, rows)

    def stored(self, row: Rows) -> Rows:
        """Return the copy of one block: smaller, or ``row`` itself if that would differ too much."""
        small = np.empty((1, self.num_bytes), np.uint8)
        return row if self.shrink(row[None], small) else small[0]


def small_copies(
    config: ExecutorConfig, pool: KVPool, shapes: Sequence[KVShape], *, has_states: bool
) -> SmallCopies | None:
    """Return how copies become smaller as ``--tier-dtype`` asks for; None: they stay as they are.

    ``shapes``: of the layers of ``pool``. ``has_states``: blocks of recurrent layers share the pool.

    Raises:
        ModelError: copies of this model cannot be made smaller, or not here.
    """
    if config.tier_dtype == "auto":
        return None
    asked, sizes = f"--tier-dtype {config.tier_dtype}", {shape[1] for shape in shapes}
    if config.kv_dtype != "auto":
        raise ModelError(f"{asked}: --kv-dtype {config.kv_dtype} has made KV smaller already, and copies of it stay so")
    if has_states:
        raise ModelError(f"{asked}: the states of recurrent layers are kept as they are, and share pages with KV")
    if len(sizes) > 1:
        raise ModelError(f"{asked}: heads of {', '.join(map(str, sorted(sizes)))} numbers share blocks")
    if pool.device.type == "cuda" and config.host_memory is not None:
        raise ModelError(
            f"{asked}: on a GPU, --host-memory holds exact copies only; a disk cache and a store may differ"
        )
    dtype: torch.dtype = pool.layers[0].dtype
    try:
        blocks = SmallBlocks(pool.bytes_per_block, sizes.pop(), dtype, _BITS[config.tier_dtype])
    except (ValueError, LibraryMissingError) as error:
        raise ModelError(f"{asked}: {error}") from error
    log.info("tiers below the device: %.2f of the bytes", blocks.num_bytes / blocks.bytes_per_block)
    return SmallCopies(blocks, config.tier_dtype, config.tier_error_bound)
