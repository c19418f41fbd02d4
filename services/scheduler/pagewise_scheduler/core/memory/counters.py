"""What has happened to blocks since the executor joined."""

from collections import Counter
from dataclasses import dataclass, field

from pagewise_shared.protocol import POOL_TIERS, TIER_NAMES


@dataclass(slots=True)
class MemoryCounters:
    """Blocks, counted up only.

    Fields:
        evicted: lost their place on the device to others. demoted: those of them that went to a tier below;
            dropped: those that went nowhere, and would have to be computed again. The rest had a copy there already.
        lower_evicted: lost their place in a tier below the device to others, by the number of the tier.
        stored, loaded: copies to and from such tiers that were confirmed.
        corrupt: came back from there with another content than was stored; they are computed again.
        fetched: came from other executors. fetch_failed: did not come, or not whole; they are computed.
        recalled: came from tiers without ids. recall_failed: were not there any more, or not whole; they are computed.
        written: went to such tiers. not_written: were to go there, but were evicted before, not worth it, or not taken.
        copied: copied on the device because somebody had to write into a shared block.
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

    def by_name(self) -> dict[str, int]:
        """All of them by what people call them: what the host has evicted is "host_evicted"."""
        counts = {name: getattr(self, name) for name in self.__slots__ if name != "lower_evicted"}
        for name in POOL_TIERS[1:]:
            counts[f"{name}_evicted"] = self.lower_evicted[TIER_NAMES.index(name)]
        return counts
