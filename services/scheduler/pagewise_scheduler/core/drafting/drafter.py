"""The interface of drafters: the scheduler looks drafts up in known tokens, or an executor proposes them by a model."""

from array import array
from typing import TYPE_CHECKING, Protocol

from pagewise_scheduler.core.requests.request import RequestSequence

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.step import Drafts, StepInFlight


class Drafter(Protocol):
    """Makes the drafts of one executor's sequences. ``Drafting`` calls it, and puts the drafts into plans.

    ``most_tokens``: of a draft. ``most_running``: with more running sequences nothing is drafted. ``ahead``: slots
    behind a draft of a step in which the next draft may be made.
    """

    most_tokens: int
    ahead: int
    most_running: float

    def waits(self) -> bool:
        """Whether the next plan is to wait for the step in flight, which has no drafts itself: its result may bring
        tokens, or drafts, from which the next step gains more than from being planned ahead."""
        ...

    def begin_plan(self, now: float) -> None:
        """A step is planned at ``now``, in seconds."""
        ...

    def draft(self, sequence: RequestSequence, most: int) -> "array[int]":
        """At most ``most`` tokens that may follow the known tokens of a sequence. No step is in flight."""
        ...

    def drafted(self, drafts: "Drafts") -> None:
        """The step has all its drafts."""
        ...

    def planned(self, most_verified: int) -> None:
        """All decodes and chunks of the step are planned. ``most_verified``: most draft tokens of the next step."""
        ...

    def returned(self, step: "StepInFlight") -> None:
        """A step has come back."""
        ...

    def verified(self, sequence: RequestSequence, drafted: int, accepted: int) -> None:
        """A step has verified a draft of a sequence that continues."""
        ...

    def release(self, sequence: RequestSequence) -> None:
        """A sequence leaves its row and its blocks."""
        ...

    def clear(self) -> None:
        """The executor was reset, or is gone."""
        ...
