"""Pins: references that keep blocks on the device for a time, by a client's advice."""

from collections.abc import Sequence
from dataclasses import dataclass

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.windows import WindowGroup

PIN_SHARE, _MOST_SHARE = 0.1, 0.5
"""The largest shares of the device that pins of one API key hold, and pins of all keys."""
MOST_SECONDS = 3600.0


@dataclass(slots=True, eq=False)
class _Pin:
    """``nodes``: its blocks, in order. ``windows``: the blocks of windows and states at their end, by the group.
    ``size``: blocks of the device, or pages if several groups of layers share it."""

    key: str
    nodes: list[CachedBlock]
    blocks: list[int]
    windows: list[tuple[WindowGroup, list[int]]]
    size: int
    until: float


class Pins:
    """The pins of one executor. They give way when sequences cannot go on without their blocks.

    Where layers are in several groups, a pin ends at the last place behind which a sequence can begin, and keeps the
    windows and states there.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._pins: list[_Pin] = []

    def hold(self, key: str, path: Sequence[CachedBlock], seconds: float, now: float) -> tuple[int, float, str]:
        """Pin the blocks at the beginning of ``path`` that are on the device, as many as the key may.

        Returns their number, the seconds, and why these are less than asked for. A pin of the same beginning is
        replaced. ``seconds``: negative: as long as possible.
        """
        self.release(key, path)
        of_key = int(PIN_SHARE * self._kv.num_total) - sum(one.size for one in self._pins if one.key == key)
        room = min(of_key, int(_MOST_SHARE * self._kv.num_total) - self.size)
        nodes = [node for node in path if node.block >= 0]
        held, windows, size = self._longest(nodes, room)
        reasons = []
        if len(nodes) < len(path):
            reasons.append("a part is not on the device" if nodes else "nothing of it is on the device")
        if len(held) < len(nodes):
            if len(held) < len(self._longest(nodes, self._kv.num_total)[0]):
                reasons.append(
                    "an API key pins at most a tenth of the device"
                    if room == of_key
                    else "all API keys together pin at most half of the device"
                )
            elif not held:
                reasons.append("the device has no windows or states with which a sequence begins")
        if seconds > MOST_SECONDS:
            reasons.append("a pin lasts an hour at most")
        seconds = MOST_SECONDS if seconds < 0 else min(seconds, MOST_SECONDS)
        if held:
            blocks = [node.block for node in held]
            self._kv.pool.pin(blocks)
            for group, some in windows:
                group.pin(some)
            self._pins.append(_Pin(key, held, blocks, windows, size, now + seconds))
        return len(held), seconds, "; ".join(reasons)

    def _longest(
        self, nodes: list[CachedBlock], room: int
    ) -> tuple[list[CachedBlock], list[tuple[WindowGroup, list[int]]], int]:
        """The longest beginning of ``nodes`` with which a sequence can begin and that fits into ``room``, the blocks of
        windows and states at its end, and the size of both."""
        kv = self._kv
        for end in range(min(len(nodes), room // kv.pages_per_block), 0, -1):
            node = nodes[end - 1]
            if not kv.can_begin(node, device_only=True):
                continue
            # All blocks of a snapshot, because one without users would let the snapshot be evicted.
            found = [(group, [*one.blocks]) for group in kv.windows if (one := group.at.get(node)) is not None]
            size = end * kv.pages_per_block + sum(len(some) * group.pages_per_block for group, some in found)
            if size <= room:
                return nodes[:end], found, size
        return [], [], 0

    @property
    def size(self) -> int:
        """The number of pinned blocks of the device, or pages. A block with several pins counts once for each pin."""
        return sum(one.size for one in self._pins)

    @property
    def ends(self) -> set[CachedBlock]:
        """The last blocks of all pins."""
        return {one.nodes[-1] for one in self._pins}

    def release(self, key: str, path: Sequence[CachedBlock]) -> int:
        """Release the pins of a key that end on ``path``; returns the number of their blocks."""
        on_path = set(path)
        return self._release([one for one in self._pins if one.key == key and one.nodes[-1] in on_path])

    def any_expired(self, now: float) -> bool:
        """Return whether a pin that is still held has expired."""
        return any(one.until <= now for one in self._pins)

    def expire(self, now: float) -> None:
        """Release the pins whose time is over."""
        self._release([one for one in self._pins if one.until <= now])

    def release_all(self) -> bool:
        """Release all pins; returns whether there were any."""
        return self._release(list(self._pins)) > 0

    def _release(self, pins: list[_Pin]) -> int:
        for pin in pins:
            self._pins.remove(pin)
            for group, some in pin.windows:
                group.release(some)
            self._kv.pool.release(reversed(pin.blocks))
        return sum(len(one.blocks) for one in pins)
