"""All features of a scheduler: here they are registered, and made when they are used for the first time."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from pagewise_shared.config.speculative import SpeculativeConfig
from pagewise_shared.protocol import NO_ADAPTERS, AdapterCapacity, Message

from pagewise_scheduler.core.features.feature import NO_LOAD, Feature, Load
from pagewise_scheduler.core.requests.request import Request

if TYPE_CHECKING:
    from pagewise_scheduler.core.features.adapters import AdapterSlots
    from pagewise_scheduler.core.features.beams import BeamGroups
    from pagewise_scheduler.core.features.drafts import Drafting
    from pagewise_scheduler.core.features.grammars import CompiledGrammars
    from pagewise_scheduler.core.features.segments import Segments
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

F = TypeVar("F", bound=Feature)


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

    def __init__(self, scheduler: "Scheduler", options: FeatureOptions) -> None:
        self.in_use: list[Feature] = []
        self.options = options
        self._scheduler = scheduler

    def of(self, request: Request) -> tuple[Feature, ...]:
        """The features that a request uses."""
        used: list[Feature] = []
        if request.params.adapter is not None:
            used.append(self.adapters)
        if request.params.sampling.grammar and self.options.max_grammars:
            used.append(self.grammars)
        if request.segments:
            used.append(self.segments)
        if request.params.beam is not None:
            used.append(self.beams)
        return tuple(used)

    @cached_property
    def adapters(self) -> "AdapterSlots":
        """Adapters in slots of the device."""
        from pagewise_scheduler.core.features.adapters import AdapterSlots

        return self._use(AdapterSlots(self._scheduler, self.options.adapters))

    @cached_property
    def grammars(self) -> "CompiledGrammars":
        """Grammars that are compiled before their sequences start."""
        from pagewise_scheduler.core.features.grammars import CompiledGrammars

        return self._use(CompiledGrammars(self._scheduler, self.options.max_grammars))

    @cached_property
    def segments(self) -> "Segments":
        """Segments of prompts whose KV is moved from elsewhere."""
        from pagewise_scheduler.core.features.segments import Segments

        return self._use(Segments(self._scheduler))

    @cached_property
    def beams(self) -> "BeamGroups":
        """Beam searches."""
        from pagewise_scheduler.core.features.beams import BeamGroups

        return self._use(BeamGroups(self._scheduler))

    @cached_property
    def drafts(self) -> "Drafting":
        """Speculative decoding."""
        from pagewise_scheduler.core.features.drafts import Drafting

        assert self.options.speculative is not None
        return self._use(Drafting(self._scheduler, self.options.speculative))

    def _use(self, feature: F) -> F:
        self.in_use.append(feature)
        return feature

    def requests(self) -> list[Request]:
        """Requests of the features' own."""
        return [request for feature in self.in_use for request in feature.requests]

    def clear(self) -> None:
        """The executor was reset, or is gone."""
        for feature in self.in_use:
            feature.clear()

    def make_room(self) -> bool:
        """See ``Feature``: whether one of them has let go of blocks."""
        return any(feature.make_room() for feature in self.in_use)

    def unblock(self) -> bool:
        """See ``Feature``: whether one of them has let go of something."""
        return any(feature.unblock() for feature in self.in_use)

    def kept(self, key: str | None = None) -> Load:
        """See ``Feature``; together."""
        kept = NO_LOAD
        for feature in self.in_use:
            more = feature.kept(key)
            kept = Load(kept.sequences + more.sequences, kept.tokens + more.tokens)
        return kept

    def messages(self, now: float) -> list[Message]:
        """What the executor is to be told beside plans; called before and after planning. ``now``: seconds."""
        return [message for feature in self.in_use for message in feature.messages(now)]

    def take(self, message: Message, now: float) -> list[Request]:
        """What the executor answers; returns the requests that fail for it."""
        return self._fail(request for feature in self.in_use for request in feature.take(message, now))

    def give_up(self, now: float, most: float) -> list[Request]:
        """Give up what it has not answered for ``most`` seconds; returns the requests that fail for it."""
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
        """What all of them have counted, by the name of the metric."""
        return {name: number for feature in self.in_use for name, number in feature.counts().items()}
