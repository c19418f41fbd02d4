"""How a sequence is to get its KV back, and how far it has come."""

from dataclasses import dataclass, field
from typing import Literal

from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.requests.request import Sequence
from pagewise_scheduler.core.tiers.cost_model import RecoveryEstimate
from pagewise_scheduler.core.tiers.peer import BlockPlace, RecoverySource

Method = Literal["device", "load", "recompute", "both"]
RecoveryMode = Literal["auto", "swap", "recompute", "both"]


@dataclass(slots=True)
class RecoveryPlan:
    """How blocks are to come back: ``nodes`` of ``source``, of which ``first`` is the index of the first in the table.

    ``start``: blocks on the device. What lies between them and ``first`` lies nowhere and has to be computed.
    """

    method: Method
    source: RecoverySource | None = None
    nodes: list[CachedBlock] = field(default_factory=list)
    start: int = 0
    first: int = 0
    estimate: RecoveryEstimate | None = None

    @property
    def end(self) -> int:
        """Blocks that the sequence has afterwards."""
        return self.first + len(self.nodes)

    @property
    def seconds(self) -> float:
        """What it is predicted to take."""
        if self.estimate is None or self.method == "device":
            return 0.0
        return {"load": self.estimate.load, "recompute": self.estimate.recompute, "both": self.estimate.both}[
            self.method
        ]

    @property
    def seconds_with_step(self) -> float:
        """The same, with the step that follows a load."""
        after = self.estimate.after if self.estimate is not None and self.method in ("load", "both") else 0.0
        return self.seconds + after


@dataclass(slots=True, eq=False)
class Recovery:
    """One sequence that gets its KV back.

    Fields:
        plan: what was chosen. method "device": everything that is cached is still there.
        places: where its blocks are pinned, if any of them are loaded.
        back: nodes from here on are loaded or asked for. loading: blocks asked for that have not arrived.
        device_tokens: tokens found on the device. resumed: it had run before. first_start: nothing of its request
            had run before, so that what is found was computed for others.
        began, ended: when it was admitted, and when everything that the source could have given was there, loaded or
            computed; NaN until then, for good if it was preempted or aborted before.
        loaded_tokens: tokens that came from the source. link_seconds: what the link took for its transfers.
        behind_demotions: copies to lower tiers were under way when it began, which loads wait for.
    """

    sequence: Sequence
    plan: RecoveryPlan
    places: list[BlockPlace]
    back: int
    device_tokens: int
    resumed: bool
    began: float
    loading: int = 0
    ended: float = float("nan")
    loaded_tokens: int = 0
    link_seconds: float = 0.0
    behind_demotions: bool = False
    first_start: bool = False

    @property
    def method(self) -> Method:
        """What was chosen."""
        return self.plan.method

    @property
    def origin(self) -> str:
        """Where the KV lay that the sequence was to get back, whether it was brought from there or computed again: one
        of ``SOURCES``.

        "device": nothing of it was known to lie elsewhere.
        """
        return "device" if self.plan.source is None else self.plan.source.name

    @property
    def estimate(self) -> RecoveryEstimate | None:
        """What each method was predicted to cost; None if there was nothing to get."""
        return self.plan.estimate

    @property
    def predicted(self) -> float:
        """Seconds the chosen method was predicted to take."""
        return self.plan.seconds

    @property
    def first(self) -> int:
        """Index in the table of the first block that the source has."""
        return self.plan.first

    @property
    def source(self) -> RecoverySource:
        """Where blocks come from, if any do."""
        assert self.plan.source is not None
        return self.plan.source
