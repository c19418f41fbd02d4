"""The copies of a plan: each list copies blocks from one tier to another, or from another executor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from pagewise_shared.block_hash import BlockHash, BlockName
from pagewise_shared.protocol import CancelCopies, Copied, RemoteTier, StepError, pack_int32s

Pairs = npt.NDArray[np.int32]
"""Source block and target block of each copy [n, 2]."""


@dataclass(slots=True)
class CopyJob:
    """One list of a step's copies, which has been checked.

    ``pairs``: if a target is named more than once, the last of its sources counts. A block of a tier without ids is an
    index in ``names``. ``peer``: the executor whose tier ``source`` is; None for a tier of this executor. ``group``: of
    layers. ``salts``: the ``salt_tags`` of first blocks in ``names``, by their hashes.
    """

    epoch: int
    step: int
    source: int
    target: int
    pairs: Pairs
    peer: RemoteTier | None = None
    names: Sequence[BlockName] = ()
    group: int = 0
    salts: Mapping[BlockHash, bytes] = field(default_factory=dict)

    def is_of(self, cancelled: CancelCopies) -> bool:
        """Return whether ``cancelled`` means these copies."""
        of_step = (self.epoch, self.step) == (cancelled.epoch, cancelled.step)
        if self.peer is not None:
            return of_step and self.peer.endpoint == cancelled.peer
        return of_step and not cancelled.peer and cancelled.tier in (self.source, self.target)

    def confirmed(self, seconds: float, bad: Iterable[int] = (), error: StepError | None = None) -> Copied:
        """Return the message that confirms the job. ``bad``: target blocks whose content is missing or corrupt."""
        return Copied(
            self.epoch,
            self.step,
            self.source,
            self.target,
            peer=self.peer.endpoint if self.peer is not None else "",
            elapsed_us=int(seconds * 1e6),
            bad=pack_int32s(bad),
            error=error,
            group=self.group,
        )


@dataclass(slots=True)
class PageCopyJob(CopyJob):
    """A list of copies of blocks that is made page by page: ``pairs`` and ``names`` are of pages.

    ``targets`` [blocks]: the target blocks, whose pages follow each other in ``pairs``. If the source is a peer's, its
    pages are numbers that the peer knows: block times pages per block, plus the index of the page in the block.
    """

    targets: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def confirmed(self, seconds: float, bad: Iterable[int] = (), error: StepError | None = None) -> Copied:
        """Return the message that confirms the job. ``bad``: target pages whose content is missing or corrupt."""
        spoiled = np.isin(self.pairs[:, 1], list(bad)).reshape(len(self.targets), -1).any(axis=1)
        return CopyJob.confirmed(self, seconds, self.targets[spoiled].tolist(), error)
