"""An executor of a replay: a scheduler, and simulated times of its steps and copies."""

from collections.abc import Callable, Hashable, Mapping

from pagewise_shared.protocol import DEVICE, BlockCopies, Copied, Role, StepPlan, StepResult, pack_int32s

from pagewise_scheduler.core.routing.executor_view import ExecutorView
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import DeviceCosts

SAMPLED = 1 << 30
"""The token that every step samples. It differs from all block ids of traces, by which Belady's rule identifies blocks:
outputs are never used again."""

Event = StepResult | Copied | int | None
"""A step's result; a confirmation of copies; the index of a request that arrives; None: the executor may have to plan,
because blocks came back or a request migrates."""


class SimulatedExecutor:
    """A scheduler with a simulated executor, which has a link to each of its tiers, and one from all other executors.

    ``busy``: seconds in which it computed. ``computed``: prompt tokens that it computed. ``at``: called with a time and
    an event of this executor at that time. ``free_at``: until when the device or a link is occupied. ``senders``: by
    endpoint, executors whose sending link is limited too; it sends one list of blocks after the other.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: DeviceCosts,
        at: Callable[[float, "SimulatedExecutor", "Event"], None],
        depth: int,
        role: Role = "both",
    ) -> None:
        self.scheduler = scheduler
        self.view = ExecutorView(scheduler, role)
        self.steps = self.computed = 0
        self.busy = 0.0
        self._costs = costs
        self._at = at
        self._depth = depth
        self.free_at: dict[Hashable, float] = {}
        self.senders: Mapping[str, SimulatedExecutor] = {}

    def plan(self, now: float) -> bool:
        """Plan steps as far ahead as allowed; returns whether any was."""
        scheduler, before = self.scheduler, self.steps
        while scheduler.num_in_flight < self._depth and (plan := scheduler.schedule(now)) is not None:
            self._execute(plan, now)
        return self.steps > before

    def _execute(self, plan: StepPlan, now: float) -> None:
        """Occupy the device and the links for a plan; its results come as events."""
        costs, step = self._costs, self.scheduler.steps_in_flight[-1]
        num_decodes = step.num_seqs - len(step.chunk_rows)
        seconds = costs.prefill.step + costs.prefill.token * (step.num_tokens - num_decodes)
        seconds += costs.prefill.attention * step.attention + costs.decode * num_decodes
        pool = self.scheduler.kv.pool
        if num_decodes:
            seconds += costs.context * pool.num_in_use * self.scheduler.kv.block_size
        if not step.num_tokens:
            seconds = 0.0
        self.steps += 1
        self.busy += seconds
        self.computed += step.num_tokens - num_decodes
        tokens = pack_int32s([SAMPLED] * len(step.sampled))
        result = StepResult(plan.epoch, plan.step, tokens, elapsed_us=max(1, int(seconds * 1e6)))
        self._at(self._occupy("step", seconds, now), self, result)
        for copies in between_tiers(plan):
            seconds = self._copy_seconds(copies)
            if copies.peer is not None:
                begins = max(now, self.free_at.get("receives", 0.0))
                end = self._fetch(copies.peer.endpoint, seconds, begins)
                seconds = end - begins
            else:
                end = self._occupy((copies.source, copies.target), seconds, now)
            self._at(end, self, confirmation(plan, copies, max(1, int(seconds * 1e6))))

    def _fetch(self, endpoint: str, seconds: float, begins: float) -> float:
        """Occupy the links between a peer and this executor from ``begins`` on; returns until when."""
        if (sender := self.senders.get(endpoint)) is not None:
            begins = max(begins, sender.free_at.get("sends", 0.0))
            sender.free_at["sends"] = begins + seconds
        self.free_at["receives"] = begins + seconds
        return begins + seconds

    def _copy_seconds(self, copies: BlockCopies) -> float:
        costs, num_blocks = self._costs.prefill, len(copies.pairs) // 8
        if copies.peer is not None:
            return costs.fetch_setup + num_blocks * costs.fetch_block
        if copies.target == DEVICE:
            link = costs.of_tier(copies.source)
            return link.load_setup + num_blocks * link.load_block
        link = costs.of_tier(copies.target)
        return link.store_setup + num_blocks * link.store_block

    def _occupy(self, resource: Hashable, seconds: float, now: float) -> float:
        end = self.free_at[resource] = max(now, self.free_at.get(resource, 0.0)) + seconds
        return end


def between_tiers(plan: StepPlan) -> list[BlockCopies]:
    """The copies of a plan that executors confirm: all except copies inside the device."""
    return [copies for copies in plan.copies if copies.peer is not None or copies.source != copies.target]


def confirmation(plan: StepPlan, copies: BlockCopies, elapsed_us: int = 0) -> Copied:
    """The confirmation of copies, as an executor sends it."""
    peer = copies.peer.endpoint if copies.peer is not None else ""
    return Copied(plan.epoch, plan.step, copies.source, copies.target, peer, elapsed_us)
