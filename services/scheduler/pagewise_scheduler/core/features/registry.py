"""All features of a scheduler: here they are registered, and made when they are used for the first time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from pagewise_shared.config.speculative import SpeculativeConfig
from pagewise_shared.protocol import NO_ADAPTERS, AdapterCapacity, Message

from pagewise_scheduler.core.features.feature import NOTHING_KEPT, Feature, Kept
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.features.adapters import AdapterSlots
    from pagewise_scheduler.core.features.beams import BeamGroups
    from pagewise_scheduler.core.features.drafts import Drafting
    from pagewise_scheduler.core.features.fair_shares import FairShares
    from pagewise_scheduler.core.features.grammars import CompiledGrammars
    from pagewise_scheduler.core.features.prefetches import Prefetches
    from pagewise_scheduler.core.features.segments import Segments
    from pagewise_scheduler.core.features.write_back import WriteBack
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepInFlight

_CLASSES = {
    "adapters": "AdapterSlots",
    "beams": "BeamGroups",
    "drafts": "Drafting",
    "fair_shares": "FairShares",
    "grammars": "CompiledGrammars",
    "prefetches": "Prefetches",
    "segments": "Segments",
    "write_back": "WriteBack",
}
"""The features by their modules in this folder, by whose names they are also attributes of ``Features``."""


@dataclass(frozen=True)
class FeatureOptions:
    """What an executor can do beside the loop.

    Fields:
        adapters: which it can serve. max_grammars: those that it keeps compiled; 0: it compiles a grammar when a
            sequence joins. speculative: how tokens are drafted; None: they are not.
    """

    adapters: AdapterCapacity = NO_ADAPTERS
    max_grammars: int = 0
    speculative: SpeculativeConfig | None = None


class Features:
    """The features of one scheduler. ``in_use``: those that have been made, in this order."""

    adapters: "AdapterSlots"
    beams: "BeamGroups"
    drafts: "Drafting"
    fair_shares: "FairShares"
    grammars: "CompiledGrammars"
    prefetches: "Prefetches"
    segments: "Segments"
    write_back: "WriteBack"

    def __init__(self, scheduler: "Scheduler", options: FeatureOptions) -> None:
        self.in_use: list[Feature] = []
        self.options = options
        self._scheduler = scheduler
        self._keys: set[str] = set()

    def of(self, request: Request) -> tuple[Feature, ...]:
        """The features that a request uses. Makes those that concern all requests once a request makes them of use."""
        params, made = request.params, self.__dict__
        self._keys.add(params.key)
        used = {
            "adapters": params.adapter,
            "grammars": self.options.max_grammars and params.sampling.grammar,
            "segments": request.segments,
            "beams": params.beam,
            "write_back": self._scheduler.kv.hashed,
            "prefetches": "prefetches" in made and request in self.prefetches.active,
            "drafts": self.options.speculative,
            "fair_shares": len(self._keys) > 1,
        }
        return tuple(getattr(self, name) for name, uses in used.items() if uses)

    def __getattr__(self, name: str) -> Feature:
        """Make a feature when it is used for the first time."""
        if name not in _CLASSES:
            raise AttributeError(name)
        feature: Feature = getattr(import_module(f"{__package__}.{name}"), _CLASSES[name])(self._scheduler)
        setattr(self, name, feature)
        self.in_use.append(feature)
        return feature

    def requests(self) -> list[Request]:
        """Requests of the features' own."""
        return [request for feature in self.in_use for request in feature.requests]

    def clear(self) -> None:
        """The executor was reset, or is gone."""
        for feature in self.in_use:
            feature.clear()

    def may_plan(self) -> bool:
        """See ``Feature``: whether all of them let the next step be planned now."""
        return all(feature.may_plan() for feature in self.in_use)

    def begin_step(self, step: int) -> None:
        """See ``Feature``."""
        for feature in self.in_use:
            feature.begin_step(step)

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        """Let them add copies to the device to ``loads``, and drafts to the plan; returns the tokens of the drafts."""
        left = budget
        for feature in self.in_use:
            feature.request_loads(step, loads)
            left -= feature.draft(left)
        return budget - left

    def wants_step(self) -> bool:
        """See ``Feature``: whether one of them needs a step that computes nothing."""
        return any(feature.wants_step() for feature in self.in_use)

    def planned(self, step: int) -> None:
        """See ``Feature``."""
        for feature in self.in_use:
            feature.planned(step)

    def verify(self, step: "StepInFlight", tokens: Sequence[int]) -> Sequence[int]:
        """See ``Feature``."""
        for feature in self.in_use:
            tokens = feature.verify(step, tokens)
        return tokens

    def victim(self, running: list[RequestSequence]) -> RequestSequence | None:
        """See ``Feature``: the choice of the first of them that has a preference."""
        return next(filter(None, (feature.victim(running) for feature in self.in_use)), None)

    def make_room(self) -> bool:
        """See ``Feature``: whether one of them has let go of blocks."""
        return any(feature.make_room() for feature in self.in_use)

    def unblock(self) -> bool:
        """See ``Feature``: whether one of them has let go of something."""
        return any(feature.unblock() for feature in self.in_use)

    def kept(self, key: str | None = None) -> Kept:
        """See ``Feature``; together."""
        kept = NOTHING_KEPT
        for feature in self.in_use:
            more = feature.kept(key)
            kept = Kept(kept.sequences + more.sequences, kept.tokens + more.tokens)
        return kept

    def messages(self, now: float) -> list[Message]:
        """See ``Feature``; of all of them."""
        return [message for feature in self.in_use for message in feature.messages(now)]

    def take(self, message: Message, now: float) -> list[Request]:
        """See ``Feature``; ends the requests that fail."""
        return self._fail(request for feature in self.in_use for request in feature.take(message, now))

    def give_up(self, now: float, most: float) -> list[Request]:
        """See ``Feature``; ends the requests that fail."""
        return self._fail(request for feature in self.in_use for request in feature.give_up(now, most))

    def _fail(self, requests: Iterable[Request]) -> list[Request]:
        failed = list(requests)
        for request in failed:
            request.fail()
            self._scheduler.forget(request)
        return failed

    def close(self) -> None:
        """The executor is gone for good."""
        for feature in self.in_use:
            feature.close()

    def counts(self) -> dict[str, int]:
        """The counters of all of them, by the name of the metric."""
        return {name: number for feature in self.in_use for name, number in feature.counts().items()}
