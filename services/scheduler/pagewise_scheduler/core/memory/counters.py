"""Counts of events of blocks since the executor joined."""

from collections import Counter
from dataclasses import dataclass, field

from pagewise_shared.protocol import POOL_TIERS, TIER_NAMES


@dataclass(slots=True)
class MemoryCounters:
    """Blocks, counted up only.

    Fields:
        evicted: left the device to make room. demoted: evicted ones that were copied to a tier below;
            dropped: evicted ones of which no copy exists. The other evicted blocks had a copy below already.
        lower_evicted: left a tier below the device to make room, by the number of the tier.
        stored, loaded: copies to and from such tiers that were confirmed.
        corrupt: were loaded from such a tier with a wrong content; they are computed again.
        fetched: came from other executors. fetch_failed: did not come, or not whole; they are computed.
        recalled: came from tiers without ids. recall_failed: were not there any more, or not whole; they are computed.
        written: went to such tiers. not_written: were to go there, but were evicted before, not worth it, or not taken.
        copied: copied on write: a sequence had to write into a shared block.
        snapshots_taken: snapshots of windows or states that were made on the device. snapshots_used: sequences that
            began with one. snapshots_unused: were lost before any sequence began with them: no tier kept them, or the
            blocks before them.
            snapshots_skipped: places of prompts at which none was taken because other memory was
            worth more.
            snapshots_demoted: went to host memory when the device evicted them. snapshots_loaded: with which sequences
            began that had to bring them from another tier or executor.
    """

    evicted: int = 0
    demoted: int = 0
    dropped: int = 0
    lower_evicted: Counter[int] = field(default_factory=Counter)
    stored: int = 0
    loaded: int = 0
    corrupt: int = 0
    fetched: int = 0
    fetch_failed: int = 0
    copied: int = 0
    recalled: int = 0
    recall_failed: int = 0
    written: int = 0
    not_written: int = 0
    snapshots_taken: int = 0
    snapshots_used: int = 0
    snapshots_unused: int = 0
    snapshots_skipped: int = 0
    snapshots_demoted: int = 0
    snapshots_loaded: int = 0

    def by_name(self) -> dict[str, int]:
        """All counts by their names in metrics: the host's evicted blocks are "host_evicted"."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "lower_evicted"}
        for name in POOL_TIERS[1:]:
            counts[f"{name}_evicted"] = self.lower_evicted[TIER_NAMES.index(name)]
        return counts
