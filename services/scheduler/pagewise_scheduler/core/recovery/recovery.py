"""Sequences that are getting their KV back, and the two pointers that bring it.

A sequence that begins with blocks on the host recovers them by one mechanism: computing from the front and loading from
the back, until the two meet. Loading alone and computing alone are its ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from pagewise_shared.protocol import Copied, unpack_int32s

from pagewise_scheduler.core.memory.kv_cache_manager import CachedPrefix, KVCacheManager
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.recovery.cost_model import SMALL_STEPS, CostModel, Estimate
from pagewise_scheduler.core.scheduling.request import Sequence

Method = Literal["device", "load", "recompute", "both"]
RecoveryMode = Literal["auto", "swap", "recompute", "both"]

_REPORTS_KEPT = 4096
_PIECE_BLOCKS = 256
_WORTH_BOTH = 0.9
_SMALL_PIECE = 8


@dataclass(slots=True, eq=False)
class Recovery:
    """One sequence's way back.

    Fields:
        method: what was chosen. "device": everything that is cached is still there.
        nodes: blocks that lay on the host when it began, in order; ``first``: the index of the first in the table.
        back: nodes from here on are loaded or asked for. loading: blocks asked for that have not arrived.
        device_tokens: tokens found on the device. estimate: what each way was predicted to cost, None if there was
            nothing on the host. resumed: it had run before.
        began, ended: when it was admitted, and when everything that the host could have given was there, loaded or
            computed; NaN until then, for good if it was preempted or aborted before.
        loaded_tokens: tokens that came from the host. link_seconds: what the link took for its transfers.
        behind_stores: copies to the host were under way when it began, which loads wait for.
    """

    sequence: Sequence
    method: Method
    nodes: list[CachedBlock]
    first: int
    back: int
    device_tokens: int
    estimate: Estimate | None
    resumed: bool
    began: float
    loading: int = 0
    ended: float = float("nan")
    loaded_tokens: int = 0
    link_seconds: float = 0.0
    behind_stores: bool = False

    @property
    def predicted(self) -> float:
        """Seconds the chosen way was predicted to take."""
        if self.estimate is None or self.method == "device":
            return 0.0
        return {"load": self.estimate.load, "recompute": self.estimate.recompute, "both": self.estimate.both}[
            self.method
        ]


@dataclass(slots=True)
class _Transfer:
    """Blocks of one step's load list: whose they are, their nodes, and the device blocks they come to."""

    parts: list[tuple[Recovery, list[CachedBlock], list[int]]] = field(default_factory=list)
    num_blocks: int = 0


class Recoveries:
    """All recoveries of one executor, and the loads that are under way for them.

    ``reports``: recoveries that have ended or needed nothing, for whoever logs and counts them.
    """

    def __init__(self, kv: KVCacheManager, costs: CostModel, mode: RecoveryMode = "auto") -> None:
        self.costs = costs
        self.mode = mode
        self.reports: deque[Recovery] = deque(maxlen=_REPORTS_KEPT)
        self._kv = kv
        self._active: dict[Sequence, Recovery] = {}
        # Those that compute what the host has, and up to which token: only how long they take is of interest.
        self._recomputing: dict[Sequence, tuple[Recovery, int]] = {}
        self._transfers: dict[int, _Transfer] = {}
        self._num_loading = 0
        self._stores: dict[int, int] = {}

    @property
    def num_loading(self) -> int:
        """Blocks whose load has been asked for and not confirmed."""
        return self._num_loading

    @property
    def _queued(self) -> int:
        """Blocks that the link has before it: asked for, or likely to be by those that are under way."""
        wanted = sum(one.back if one.method == "load" else one.back // 2 for one in self._active.values())
        return self._num_loading + wanted

    # ---- choosing ------------------------------------------------------------------------------------

    def choose(self, prefix: CachedPrefix, share: float) -> tuple[Method, Estimate | None]:
        """How a sequence that begins with ``prefix`` gets what lies on the host.

        ``share``: the part of a step's token budget that its computing would get.
        """
        if not prefix.on_host:
            return "device", None
        estimate = self.costs.estimate(prefix.num_tokens, len(prefix.on_host), self._queued, share)
        if self.mode == "swap":
            return "load", estimate
        if self.mode != "auto":
            return self.mode, estimate
        better: Method = "load" if estimate.load <= estimate.recompute else "recompute"
        # Both at once keeps the executor and the link busy: it has to win by more than the noise of the estimate.
        if estimate.both < _WORTH_BOTH * min(estimate.load, estimate.recompute):
            return "both", estimate
        self.costs.both_passed_over()
        if better == "recompute":
            self.costs.load_passed_over()
        return better, estimate

    def worth_keeping(self, node: CachedBlock) -> bool:
        """Whether copies of the prefix that ends with ``node`` are worth what they cost, block by block on average.

        They save, if the prefix is used again, what recovering from both ends saves over computing alone. They cost
        their time on the link, by how busy the link is: an idle one costs nothing.
        """
        if self.mode != "auto":
            return self.mode != "recompute"
        extends = node.parent is not None and node.parent.host >= 0
        recompute, load = self.costs.block_seconds(node.depth if extends else (node.depth + 1) // 2)
        saved = recompute * recompute / (recompute + load) if recompute > 0 else 0.0
        pool = self._kv.pool
        busy = pool.host.num_storing / max(1, pool.host.max_storing)
        return pool.policy.probability(node) * saved >= busy * self.costs.store.predict(0, 1)

    # ---- running -------------------------------------------------------------------------------------

    def begin(
        self, sequence: Sequence, prefix: CachedPrefix, choice: tuple[Method, Estimate | None], now: float
    ) -> Recovery:
        """The sequence has taken ``prefix``, and its table has room for what is on the host."""
        method, estimate = choice
        nodes = prefix.on_host if method in ("load", "both") else []
        recovery = Recovery(
            sequence=sequence,
            method=method,
            nodes=nodes,
            first=prefix.num_tokens // self._kv.block_size,
            back=len(nodes),
            device_tokens=prefix.num_tokens,
            estimate=estimate,
            resumed=sequence.num_preemptions > 0,
            began=now,
            behind_stores=self._kv.pool.host.num_storing > 0,
        )
        sequence.history.append(recovery)
        if nodes:
            self._kv.pool.host.pin(nodes)
            self._active[sequence] = recovery
        elif prefix.on_host:
            end = prefix.num_tokens + len(prefix.on_host) * self._kv.block_size
            self._recomputing[sequence] = recovery, min(end, sequence.num_tokens)
        else:
            recovery.ended = now
            if prefix.num_tokens or recovery.resumed:
                self.reports.append(recovery)
        return recovery

    def room(self, sequence: Sequence) -> int | None:
        """How many of the sequence's next tokens may be computed now; None: as many as there are."""
        recovery = self._active.get(sequence)
        if recovery is None:
            return None
        if recovery.method == "load":
            return 0
        size, start = self._kv.block_size, sequence.num_scheduled_tokens
        gap = (recovery.first + recovery.back) * size - start
        # Half of what is predicted to be computed until the pointers meet, so that what was predicted wrongly can be
        # made up for; all of it once a step costs more than the tokens in it.
        left = self.costs.split(start, gap, self._num_loading)
        if self.costs.compute_seconds(start, left) > SMALL_STEPS * self.costs.compute_seconds(start, 1):
            left = -(-left // 2)
        return min(gap, -(-max(1, left) // size) * size - start % size)

    def ask(self, step: int) -> list[int]:
        """The load list of ``step``: pairs (host block, device block), from the back of each recovery."""
        if not self._active:
            return []
        pairs: list[int] = []
        transfer = _Transfer()
        # The link serves one after the other, in order of admission: shared among all, all of them would end last.
        free = 2 * _PIECE_BLOCKS - self._num_loading
        for recovery in self._active.values():
            if free <= 0:
                break
            count = min(free, self._next_piece(recovery))
            if not count:
                continue
            free -= count
            recovery.back -= count
            nodes = recovery.nodes[recovery.back : recovery.back + count]
            start = recovery.first + recovery.back
            blocks = recovery.sequence.table.blocks[start : start + count]
            # What is being written into is nobody else's until it has arrived, whatever becomes of the sequence.
            self._kv.pool.share(blocks)
            for node, block in zip(nodes, blocks, strict=True):
                pairs += (node.host, block)
            transfer.parts.append((recovery, nodes, blocks))
            transfer.num_blocks += count
            recovery.loading += count
        if pairs:
            self._transfers[step] = transfer
            self._num_loading += transfer.num_blocks
        return pairs

    def _next_piece(self, recovery: Recovery) -> int:
        if not recovery.back:
            return 0
        if recovery.method == "load":
            return min(recovery.back, _PIECE_BLOCKS)
        # The back goes three quarters of the way to where the two are predicted to meet, for the front may go half of
        # it twice before the link is asked again. The prediction is made anew in every step, and what is left goes to
        # whichever turns out to be the faster one.
        start = recovery.sequence.num_scheduled_tokens
        left = recovery.back - (self._kv.blocks_for(start) - recovery.first)
        split = self.costs.split(start, left * self._kv.block_size, self._num_loading)
        behind = left - split // self._kv.block_size
        if behind + recovery.loading > _SMALL_PIECE:
            behind = (3 * (behind + recovery.loading) + 3) // 4 - recovery.loading
        return max(0, min(behind, _PIECE_BLOCKS))

    def stores(self, step: int) -> list[int]:
        """The store list of ``step``: pairs (device block, host block) that evictions have asked for."""
        host = self._kv.pool.host
        pairs, host.stores = host.stores, []
        if pairs:
            self._stores[step] = len(pairs) // 2
        return pairs

    def copied(self, message: Copied) -> list[Sequence]:
        """Copies of a step have been made; returns sequences that must start over because blocks came bad."""
        seconds = message.elapsed_us * 1e-6
        if message.direction == "load":
            return self.arrived(message.step, seconds, unpack_int32s(message.bad))
        if count := self._stores.pop(message.step, 0):
            self._kv.pool.host.stored(count)
            self.costs.store.observe(seconds, 1, count)
        return []

    def arrived(self, step: int, seconds: float, bad: Iterable[int]) -> list[Sequence]:
        """The loads of ``step`` are done; returns sequences that must start over because blocks came ``bad``.

        ``bad``: host blocks that do not hold what was stored in them.
        """
        transfer = self._transfers.pop(step, None)
        if transfer is None:
            return []
        self._num_loading -= transfer.num_blocks
        self._kv.pool.counters.loaded += transfer.num_blocks
        self.costs.load.observe(seconds, 1, transfer.num_blocks)
        host, wrong, failed = self._kv.pool.host, set(bad), []
        for recovery, nodes, blocks in transfer.parts:
            recovery.loading -= len(nodes)
            spoiled = [node for node in nodes if node.host in wrong]
            self._kv.pool.counters.spoiled += len(spoiled)
            host.unpin(reversed(nodes))
            self._kv.drop(blocks, None)
            for node in spoiled:
                if node.host >= 0:  # else it went with one above it
                    host.drop(node)
            if self._active.get(recovery.sequence) is not recovery:
                continue
            if spoiled:
                failed.append(recovery.sequence)
            else:
                recovery.loaded_tokens += len(nodes) * self._kv.block_size
                recovery.link_seconds += seconds
        return failed

    def settle(self, now: float) -> list[tuple[Sequence, int]]:
        """Recoveries whose pointers have met: (sequence, tokens it has now, computed and loaded)."""
        done: list[tuple[Sequence, int]] = []
        size = self._kv.block_size
        for sequence, recovery in list(self._active.items()):
            meeting = (recovery.first + recovery.back) * size
            if recovery.loading or sequence.num_scheduled_tokens < meeting:
                continue
            done.append((sequence, (recovery.first + len(recovery.nodes)) * size))
            recovery.ended = now
            if recovery.method == "load" and not recovery.behind_stores:
                self.costs.load_waited(now - recovery.began - recovery.link_seconds)
            if recovery.method == "both" and not recovery.behind_stores:
                self.costs.both_took(now - recovery.began, recovery.predicted)
            request = sequence.request
            if not recovery.resumed and not request.num_host_tokens:
                request.num_host_tokens = recovery.loaded_tokens
                request.num_cached_tokens = recovery.device_tokens + recovery.loaded_tokens
            self._close(recovery)
        for sequence, (recovery, end) in list(self._recomputing.items()):
            if sequence.num_computed_tokens >= end:
                recovery.ended = now
                del self._recomputing[sequence]
                self.reports.append(recovery)
        return done

    def abandon(self, sequence: Sequence) -> None:
        """The sequence lets go of its blocks. Loads under way for it keep theirs until they are done."""
        recovery = self._active.get(sequence)
        if recovery is not None:
            self._close(recovery)
        elif sequence in self._recomputing:
            self.reports.append(self._recomputing.pop(sequence)[0])

    def _close(self, recovery: Recovery) -> None:
        del self._active[recovery.sequence]
        self._kv.pool.host.unpin(reversed(recovery.nodes[: recovery.back]))
        self.reports.append(recovery)

    def clear(self) -> None:
        """The executor is gone or reset: nothing is under way any more."""
        for sequence in [*self._active, *self._recomputing]:
            self.abandon(sequence)
        for transfer in self._transfers.values():
            for _, nodes, blocks in transfer.parts:
                self._kv.pool.host.unpin(reversed(nodes))
                self._kv.drop(blocks, None)
        self._transfers.clear()
        self._stores.clear()
        self._num_loading = 0
