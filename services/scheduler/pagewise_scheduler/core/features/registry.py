"""All features of a scheduler: they are registered here, and created when they are used for the first time."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from pagewise_shared.config.speculative import SpeculativeConfig
from pagewise_shared.protocol import NO_ADAPTERS, AdapterCapacity, Hello, Message

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.requests.waiting_queue import QueueLoad

if TYPE_CHECKING:
    from pagewise_scheduler.core.features.adapters import AdapterSlots
    from pagewise_scheduler.core.features.advice import Advice
    from pagewise_scheduler.core.features.beams import BeamGroups
    from pagewise_scheduler.core.features.drafts import Drafting
    from pagewise_scheduler.core.features.fair_shares import FairShares
    from pagewise_scheduler.core.features.grammars import CompiledGrammars
    from pagewise_scheduler.core.features.loads_ahead import LoadsAhead
    from pagewise_scheduler.core.features.prefetches import Prefetches
    from pagewise_scheduler.core.features.segments import Segments
    from pagewise_scheduler.core.features.write_back import WriteBack
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler


@dataclass(frozen=True)
class FeatureOptions:
    """Abilities of an executor that features use.

    Fields:
        adapters: the adapters that it can serve.
        max_grammars: how many grammars it keeps compiled; 0: it compiles a grammar when a sequence joins.
        speculative: how tokens are looked up for drafts; None: they are not.
        max_proposed: most tokens of a draft of its own draft model; 0: it has none. max_proposing: with more running
            sequences that model is not used; 0: measured times alone decide.
        drafts_with_grammars: whether it verifies drafts of sequences with grammars.
    """

    adapters: AdapterCapacity = NO_ADAPTERS
    max_grammars: int = 0
    speculative: SpeculativeConfig | None = None
    max_proposed: int = 0
    max_proposing: int = 0
    drafts_with_grammars: bool = False

    @classmethod
    def of(cls, hello: Hello, speculative: SpeculativeConfig | None) -> "FeatureOptions":
        """Return the options of an executor, which its Hello has."""
        return cls(
            hello.adapters, hello.max_grammars, speculative, hello.max_proposed, hello.max_proposing,
            hello.drafts_with_grammars,
        )  # fmt: skip


class Features:
    """The features of a scheduler: an attribute each, named like the module in this folder, of the type of its class.

    ``in_use``: the features that have been created, in this order.
    """

    adapters: "AdapterSlots"
    advice: "Advice"
    beams: "BeamGroups"
    drafts: "Drafting"
    fair_shares: "FairShares"
    grammars: "CompiledGrammars"
    loads_ahead: "LoadsAhead"
    prefetches: "Prefetches"
    segments: "Segments"
    write_back: "WriteBack"

    def __init__(self, scheduler: "Scheduler", options: FeatureOptions) -> None:
        self.in_use: list[Feature] = []
        self.options = options
        self._scheduler = scheduler
        self._keys: set[str] = set()

    def of(self, request: Request) -> tuple[Feature, ...]:
        """The features that a request uses. Creates features that concern all requests when the first request needs
        them."""
        params, made = request.params, self.__dict__
        self._keys.add(params.key)
        used = {
            "adapters": params.adapter,
            "grammars": self.options.max_grammars and params.sampling.grammar,
            "segments": request.segments,
            "beams": params.beam,
            "write_back": self._scheduler.kv.hashed,
            "prefetches": "prefetches" in made and request in self.prefetches.active,
            "drafts": self.options.max_proposed or self.options.speculative,
            "fair_shares": len(self._keys) > 1,
            "advice": (params.reuse.session or "advice" in made) and self._scheduler.kv.pool.policy.learns,
        }
        return tuple(getattr(self, name) for name, uses in used.items() if uses)

    def __getattr__(self, name: str) -> Feature:
        """Create a feature when it is used for the first time."""
        if name not in Features.__annotations__:
            raise AttributeError(name)
        feature_class = getattr(import_module(f"{__package__}.{name}"), Features.__annotations__[name])
        feature: Feature = feature_class(self._scheduler)
        setattr(self, name, feature)
        self.in_use.append(feature)
        return feature

    def kept(self, key: str | None = None) -> QueueLoad:
        """The load of the requests that features keep: of one API key, or of all (None)."""
        kept = [feature.kept(key) for feature in self.in_use]
        return QueueLoad(sum(one.sequences for one in kept), sum(one.tokens for one in kept))

    def are_due(self, now: float) -> bool:
        """Whether a step is to be planned now for a feature, although nothing has happened."""
        return any(feature.is_due(now) for feature in self.in_use)

    def messages(self, now: float) -> list[Message]:
        """Messages to the executor beside plans; to be sent before and after planning. ``now``: seconds."""
        return [message for feature in self.in_use for message in feature.messages(now)]

    def take(self, message: Message, now: float) -> list[Request]:
        """Take an answer of the executor; returns the requests that fail for it, which have ended then."""
        return self._fail(request for feature in self.in_use for request in feature.take(message, now))

    def give_up(self, now: float, most: float) -> list[Request]:
        """Give up questions that the executor has not answered for ``most`` seconds; returns the requests that fail
        for it, which have ended then."""
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
        """The counters of all features, by the name of the metric."""
        return {name: number for feature in self.in_use for name, number in feature.counts().items()}
