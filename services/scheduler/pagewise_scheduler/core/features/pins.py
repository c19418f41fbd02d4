"""Pins: references that keep blocks on the device for a time, by a client's advice."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager

PIN_SHARE = 0.1
"""The largest share of the device that pins of one API key hold."""
MOST_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Pin:
    key: str
    nodes: list[CachedBlock]
    blocks: list[int]
    until: float


class Pins:
    """The pins of one executor. They give way when sequences cannot go on without their blocks."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._pins: list[_Pin] = []

    def hold(self, key: str, path: Sequence[CachedBlock], seconds: float, now: float) -> tuple[int, float, str]:
        """Pin the blocks at the beginning of ``path`` that are on the device, as many as the key may.

        Returns their number, the seconds, and why these are less than asked for. A pin of the same beginning is
        replaced. ``seconds``: negative: as long as possible.
        """
        self.release(key, path)
        room = int(PIN_SHARE * self._kv.num_total) - sum(len(one.blocks) for one in self._pins if one.key == key)
        nodes = [node for node in path if node.block >= 0]
        held = nodes[: max(0, room)]
        reasons = []
        if len(nodes) < len(path):
            reasons.append("a part is not on the device")
        if len(held) < len(nodes):
            reasons.append("an API key pins at most a tenth of the device")
        if seconds > MOST_SECONDS:
            reasons.append("a pin lasts an hour at most")
        seconds = MOST_SECONDS if seconds < 0 else min(seconds, MOST_SECONDS)
        if held:
            blocks = [node.block for node in held]
            self._kv.pool.pin(blocks)
            self._pins.append(_Pin(key, held, blocks, now + seconds))
        return len(held), seconds, "; ".join(reasons)

    def release(self, key: str, path: Sequence[CachedBlock]) -> int:
        """Release the pins of a key that end on ``path``; returns the number of their blocks."""
        on_path = set(path)
        return self._release([one for one in self._pins if one.key == key and one.nodes[-1] in on_path])

    def expire(self, now: float) -> None:
        """Release the pins whose time is over."""
        self._release([one for one in self._pins if one.until <= now])

    def release_all(self) -> bool:
        """Release all pins; returns whether there were any."""
        return self._release(list(self._pins)) > 0

    def _release(self, pins: list[_Pin]) -> int:
        for pin in pins:
            self._pins.remove(pin)
            self._kv.pool.release(reversed(pin.blocks))
        return sum(len(one.blocks) for one in pins)
