"""What has happened to blocks since the executor joined."""

from dataclasses import dataclass


@dataclass(slots=True)
class MemoryCounters:
    """Blocks, counted up only.

    Fields:
        evicted: lost their place on the device to others. demoted: those of them that went to the host;
            dropped: those that went nowhere, and would have to be computed again. The rest had a copy there already.
        host_evicted: lost their place in a tier below the device.
        stored, loaded: copies to and from such tiers that were confirmed.
        spoiled: came back from there with another content than was stored; they are computed again.
        fetched: came from other executors. fetch_failed: did not come, or not whole; they are computed.
        copied: copied on the device because somebody had to write into a shared block.
    """

    evicted: int = 0
    demoted: int = 0
    dropped: int = 0
    host_evicted: int = 0
    stored: int = 0
    loaded: int = 0
    spoiled: int = 0
    fetched: int = 0
    fetch_failed: int = 0
    copied: int = 0
