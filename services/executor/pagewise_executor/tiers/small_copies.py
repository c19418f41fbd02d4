"""Copies of blocks in fewer bits, which tiers below the device hold with ``--tier-dtype``.

A copy is made smaller when it leaves the device, and comes back as numbers of the model's type. KV that is computed
behind such a block depends on its error, so no block of an executor with smaller copies counts as exact: the format of
its blocks, which names them for peers, stores and the next process, has the type and the bound of the copies
(``name``). This holds if a tier's copies are exact because they take less time (``copy_choice``), too: executors with
the same type and bound share their blocks, in whichever size each of them writes them.
"""

import logging
import math
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
_CHOICE = "auto:"


class SmallCopies:
    """Makes copies smaller, unless that changes them by more than ``bound``.

    ``bound``: of the root mean square of the differences of a block, relative to that of its numbers. ``chooses``: a
    tier holds smaller copies only if they take less time. ``num_bytes``: of a smaller copy. ``name``: of the format.
    """

    def __init__(self, blocks: SmallBlocks, dtype: str, bound: float, *, chooses: bool = False) -> None:
        self._blocks, self._bound, self._warned = blocks, bound, False
        self.dtype, self.chooses, self.name = dtype, chooses, f"tiers {dtype} {bound:g}"
        self.num_bytes, self.exact_bytes = blocks.num_bytes, blocks.bytes_per_block

    def sample(self, count: int) -> Rows:
        """Return the content of so many blocks of random numbers, to measure times: [count, exact_bytes]."""
        return self._blocks.random(count)

    def unbounded(self) -> "SmallCopies":
        """Return the same without a bound, to measure times."""
        return SmallCopies(self._blocks, self.dtype, math.inf)

    def shrink(self, rows: Rows, small: Rows) -> list[int]:
        """Write smaller copies of ``rows`` [n, exact_bytes] into ``small`` [n, num_bytes].

        Returns the indices of the blocks that differ by more than the bound, or are no numbers.
        """
        errors = self._blocks.shrink(rows, small)
        above: list[int] = np.flatnonzero(~(errors <= self._bound)).tolist()
        if above and not self._warned:
            self._warned = True
            log.warning(
                "a KV block would change by %.3g of its size in fewer bits, and --tier-error-bound is %g: such blocks "
                "stay exact", errors[above[0]], self._bound,
            )  # fmt: skip
        return above

    def widen(self, small: Rows, rows: Rows) -> None:
        """Write smaller copies [n, num_bytes] back, into ``rows`` [n, exact_bytes]."""
        self._blocks.widen(small, rows)


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
    if has_states:
        raise ModelError(f"{asked}: the states of recurrent layers are kept as they are, and share pages with KV")
    if len(sizes) > 1:
        raise ModelError(f"{asked}: heads of {', '.join(map(str, sorted(sizes)))} numbers share blocks")
    kind = config.tier_dtype.removeprefix(_CHOICE)
    chooses = kind != config.tier_dtype
    if pool.device.type == "cuda" and config.host_memory is not None and not chooses:
        raise ModelError(
            f"{asked}: on a GPU, --host-memory holds exact copies only; a disk cache and a store may differ"
        )
    dtype: torch.dtype = pool.layers[0].dtype
    try:
        blocks = SmallBlocks(pool.bytes_per_block, sizes.pop(), dtype, _BITS[kind])
    except (ValueError, LibraryMissingError) as error:
        raise ModelError(f"{asked}: {error}") from error
    log.info("tiers below the device: %.2f of the bytes", blocks.num_bytes / blocks.bytes_per_block)
    return SmallCopies(blocks, kind, config.tier_error_bound, chooses=chooses)
