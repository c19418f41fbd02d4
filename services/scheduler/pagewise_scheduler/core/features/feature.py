"""The interface of features.

The scheduler's loop plans decodes, prefills, blocks and preemption. A feature changes that at a few points, which are
the methods of ``Feature``; each of them does nothing unless a feature overrides it. The loop calls the features of a
request (``Request.features``) for that request and its sequences, and the features in use (``Features.in_use``) once a
step. So a feature costs nothing for requests without it, and nothing at all, not even its import, before the first
request that uses it.

To add a feature, write a class in a module of this folder and register it in ``Features``.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from pagewise_shared.protocol import Message, TokenLogprobs

from pagewise_scheduler.core.memory.block_table import BlockTable
from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence
from pagewise_scheduler.core.requests.timeline import WaitCause
from pagewise_scheduler.core.requests.waiting_queue import QueueLoad
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler
    from pagewise_scheduler.core.scheduling.step import StepInFlight, StepOutput


class Feature:
    """A feature of a scheduler. The methods stand in the order in which a request meets them.

    ``requests``: the feature's own requests, which no client has sent.
    """

    cause: WaitCause | None = None
    """The cause of waiting that is reported for a sequence that ``may_start`` refuses."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self.scheduler = scheduler
        self.requests: dict[Request, None] = {}

    # ---- a request arrives ---------------------------------------------------------------------------

    def enter(self, request: Request) -> bool:
        """Whether the sequences of a request, which exist already, may join the waiting queue now.

        False: the feature keeps the request, and calls ``Scheduler.enter`` later.

        Raises:
            ValueError: the executor can never run it.
        """
        return True

    def entered(self, request: Request) -> None:
        """The sequences of a request have joined the waiting queue."""

    def placed_elsewhere(self, request: Request) -> None:
        """Another executor serves a request of a session."""

    def kept(self, key: str | None) -> QueueLoad:
        """The load of the requests that the feature keeps: of one API key, or of all (None)."""
        return QueueLoad()

    def taken_back(self, request: Request) -> None:
        """A request that had entered, and of which nothing has begun, is kept by another feature again."""

    # ---- a step is planned ---------------------------------------------------------------------------

    def may_plan(self) -> bool:
        """Whether the next step may be planned now; False: it is planned after a step in flight has come back."""
        return True

    def begin_step(self, step: int) -> None:
        """``step`` is planned next: the feature may preempt sequences before decodes take their blocks."""

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        """Add copies to the device to ``loads``, or drafts of at most ``budget`` tokens to the plan; called before
        prefills are planned. Returns the number of tokens of the drafts."""
        return 0

    def is_due(self, now: float) -> bool:
        """Whether a step is to be planned now for the feature, although nothing has happened; asked now and then."""
        return False

    def wants_step(self) -> bool:
        """Whether the feature needs a step that computes nothing."""
        return False

    def planned(self, step: int) -> None:
        """All decodes and chunks of ``step`` are planned; the feature may add copies to the plan."""

    # ---- a sequence starts ---------------------------------------------------------------------------

    def coming(self) -> Iterable[tuple[BlockTable, bytes]]:
        """Block tables whose next blocks are being fetched, and the tokens (int32 bytes) that they will hold."""
        return ()

    def may_start(self, sequence: RequestSequence) -> bool:
        """Whether a waiting sequence may start, with any cached prefix; called in each step with room."""
        return True

    def is_ready(self, sequence: RequestSequence, num_cached: int) -> bool:
        """Whether a sequence may start behind its first ``num_cached`` tokens, which are cached."""
        return True

    def prepare(self, sequence: RequestSequence, num_cached: int, room: int) -> bool:
        """Begin to make a sequence ready, if it then fits into ``room`` blocks; returns whether it is ready."""
        return True

    def is_preparing(self, sequence: RequestSequence) -> bool:
        """Whether the feature has begun to make the sequence ready."""
        return False

    def holds(self, sequence: RequestSequence, num_cached: int) -> bool:
        """The same as ``is_ready`` for a sequence that starts now; changes nothing."""
        return True

    def joined(self, sequence: RequestSequence) -> None:
        """The sequence has taken a row in the next plan."""

    def started(self, sequence: RequestSequence, num_cached: int) -> int:
        """The sequence begins for the first time, behind ``num_cached`` tokens; returns how many more tokens it takes
        from the feature."""
        return 0

    # ---- a step computes -----------------------------------------------------------------------------

    def chunk_end(self, sequence: RequestSequence, start: int, end: int, budget: int) -> int:
        """The end of a chunk that begins at token ``start``; without the feature it is ``end``.

        ``budget``: the number of tokens that the step may compute.
        """
        return end

    def add_chunk(self, sequence: RequestSequence, start: int, end: int) -> None:
        """The next plan computes a sequence from token ``start`` to ``end``."""

    def decodes(self, sequence: RequestSequence) -> bool:
        """Whether a sequence decodes in the steps after the one that ends its prefill.

        False: it leaves its row, and the feature decides how it continues when that step has come back.
        """
        return True

    def may_rejoin(self, sequence: RequestSequence) -> bool:
        """Whether a sequence that has left its row, and kept its blocks, may have a row again at once."""
        return True

    def num_candidates(self, sequence: RequestSequence) -> int:
        """The number of log-probabilities that a sequence needs to go on, once a step has ended its prefill."""
        return 0

    def verify(self, step: "StepInFlight", tokens: Sequence[int]) -> Sequence[int]:
        """A step has come back with ``tokens``; returns the tokens that are kept, for the sequences that ``step`` then
        has in ``sampled``."""
        return tokens

    def take_logprobs(self, sequence: RequestSequence, entry: TokenLogprobs, output: "StepOutput") -> bool:
        """A sequence has sampled a token with these log-probabilities; returns whether the feature takes both, so that
        the client does not get them."""
        return False

    # ---- blocks are scarce ---------------------------------------------------------------------------

    def make_room(self) -> bool:
        """Release blocks for which no running sequence waits; returns whether there were any."""
        return False

    def unblock(self) -> bool:
        """Nothing can be planned, and nothing is in flight: release blocks; returns whether there were any."""
        return False

    def victim(self, running: list[RequestSequence]) -> RequestSequence | None:
        """The sequence of ``running`` to preempt; None: the feature has no preference."""
        return None

    # ---- a sequence, or its request, ends ------------------------------------------------------------

    def release(self, sequence: RequestSequence, in_flight_step: int | None = None) -> None:
        """A sequence leaves its row and its blocks. ``in_flight_step``: the last step that may touch them."""

    def ended(self, sequence: RequestSequence, reason: FinishReason) -> None:
        """A sequence is about to end; its blocks are still there."""

    def frees(self, sequence: RequestSequence) -> None:
        """A sequence that ends releases its blocks, of which the full ones are cached."""

    def aborted(self, request: Request, ended: list[RequestSequence]) -> list[RequestSequence]:
        """A request was aborted, which ended its sequences ``ended``; returns the outputs that the client has."""
        return ended

    def leave(self, request: Request, last_step: int) -> None:
        """A request has ended or migrates; harmless the second time. ``last_step``: the last planned step."""

    # ---- the executor --------------------------------------------------------------------------------

    def messages(self, now: float) -> list[Message]:
        """Messages to the executor beside plans; called before and after planning. ``now``: seconds."""
        return []

    def take(self, message: Message, now: float) -> Iterable[Request]:
        """Take an answer of the executor; returns the requests that fail for it."""
        return ()

    def give_up(self, now: float, most: float) -> Iterable[Request]:
        """Give up questions that the executor has not answered for ``most`` seconds; returns the requests that fail
        for it."""
        return ()

    def peer_lost(self, peer: str) -> None:
        """The executor with the block endpoint ``peer`` is gone."""

    def cache_reset(self, salt: str) -> None:
        """An operator is about to release the cached blocks of a cache salt (see ``is_below``)."""

    def clear(self) -> None:
        """The executor was reset, or is gone: forget its state and all requests."""

    def close(self) -> None:
        """The executor is gone for good."""

    def counts(self) -> dict[str, int]:
        """The feature's counters, by the name of the metric."""
        return {}
