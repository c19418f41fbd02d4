"""The adapters that an executor has on its device, and the requests that wait for one.

An adapter is paged like KV. The device has a few slots. An adapter that has none is loaded into the least recently used
slot that no request needs. A request needs its adapter's slot from its admission until it ends, also while it is
preempted, so that it can continue at any time. Requests whose adapter has no slot wait outside of the waiting queue:
they hold up no other request, and cost nothing for requests without adapters.

If all slots are needed, the request that is next claims the slot whose adapter has been resident the longest. From then
on no later request is admitted to that adapter, so the slot becomes free when its running requests have ended: each
adapter gets its turn. A slot is not claimed before its adapter has been there for ``STAY_LOADS`` times as long as
loading takes, so that adapters are not exchanged all the time.

An executor loads one adapter after the other. If a load does not return, it and all loads behind it are given up. Until
the executor reports them after all, no further adapter is loaded, and only adapters in slots are served.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from math import inf, isnan
from typing import TYPE_CHECKING, Protocol

from pagewise_shared.protocol import Adapter, AdapterLoaded, LoadAdapter, Message

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.requests.request import Request, SequenceStatus
from pagewise_scheduler.core.requests.waiting_queue import KeyLoads, QueueLoad, queue_time_of
from pagewise_scheduler.core.tiers.cost_model import OnlineLine

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

STAY_LOADS = 8
"""How many times as long as its load takes an adapter stays before its slot is claimed for another one."""
_SCALES = (1.0, 1e8)
_FROM_DISK, _FROM_HOST = (5e-3, 1e-9), (1e-3, 1e-10)
"""Seconds of a load and of each of its bytes, until some have been measured."""


class Checked(Protocol):
    """Called when an adapter was loaded for a check."""

    def __call__(self, error: str | None, *, lost: bool = False) -> None:
        """``error``: why it could not be loaded. ``lost``: unknown, because the executor is gone."""
        ...


@dataclass(slots=True, eq=False)
class _Slot:
    """A slot with an adapter. ``since``: when it was loaded; NaN: it is not. ``pins``: requests that need it.
    ``free_after``: the last step that may use it. ``claimer``: the request that waits for the slot."""

    index: int
    adapter: Adapter
    since: float = float("nan")
    pins: dict[Request, None] = field(default_factory=dict)
    free_after: int = 0
    claimer: Request | None = None

    @property
    def loaded(self) -> bool:
        return not isnan(self.since)


@dataclass(slots=True, eq=False)
class _AdapterLoad:
    """A load that has not ended. ``asked``: when it was sent to the executor; infinite: it was not."""

    adapter: Adapter
    slot: _Slot | None
    checked: Checked | None = None
    asked: float = inf


class AdapterSlots(Feature):
    """The adapters of one executor. ``capacity``: which adapters it can serve. ``waiting``: the requests that wait for
    their adapters, and their loads. ``num_loads``, ``num_load_errors``, ``num_evictions``: counters."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self.capacity = scheduler.features.options.adapters
        self.num_loads = self.num_load_errors = self.num_evictions = 0
        self.waiting: dict[Request, QueueLoad] = {}
        self._disk, self._host = OnlineLine(_FROM_DISK, _SCALES), OnlineLine(_FROM_HOST, _SCALES)
        self._numbers = count(1)
        self._checks: list[_AdapterLoad] = []
        self.clear()

    def clear(self) -> None:
        self._free = list(range(self.capacity.slots - 1, -1, -1))
        self._slots: dict[bytes, _Slot] = {}  # the least recently used first
        self._pinned: dict[Request, _Slot] = {}
        self._loads: dict[int, _AdapterLoad] = {}
        self._late: set[int] = set()  # loads that were given up
        self._last_answer = -inf  # when the executor last reported a load
        self._outbox: list[tuple[int, Adapter, int]] = []
        self._on_host: set[bytes] = set()
        self._changed, self._look_at = False, inf
        self.waiting.clear()
        self._kept = KeyLoads()
        again, self._checks = self._checks, []
        for check in again:
            if check.checked is not None:
                self.check(check.adapter, check.checked)

    # ---- adapters in slots ---------------------------------------------------------------------------

    @property
    def num_resident(self) -> int:
        """Adapters in slots."""
        return sum(slot.loaded for slot in self._slots.values())

    def serves(self, adapter: Adapter) -> bool:
        """Whether the executor can compute with an adapter."""
        return self.capacity.slots > 0 and adapter.rank <= self.capacity.max_rank

    def can_take(self, adapter: Adapter) -> bool:
        """Whether a request with that adapter may come now: the executor can serve it, and has it or can load it."""
        return self.serves(adapter) and (not self._late or self._holds(adapter))

    def _holds(self, adapter: Adapter) -> bool:
        slot = self._slots.get(adapter.content)
        return slot is not None and slot.loaded

    def kept(self, key: str | None) -> QueueLoad:
        return self._kept.total if key is None else self._kept.of(key)

    def _park(self, request: Request) -> None:
        unfinished = request.params.num_sequences - sum(sequence.finished for sequence in request.sequences)
        load = self.waiting[request] = QueueLoad(unfinished, len(request.prompt_token_ids))
        self._kept.add(request.params.key, load)

    def _unpark(self, request: Request) -> None:
        if (load := self.waiting.pop(request, None)) is not None:
            self._kept.remove(request.params.key, load)

    def seconds(self, adapter: Adapter) -> float:
        """The predicted seconds until an adapter is in a slot, for loading it and the adapters before it."""
        if self._holds(adapter):
            return 0.0
        others = (load.adapter for load in self._loads.values() if load.adapter.content != adapter.content)
        ahead = sum(map(self._seconds, others))
        return ahead + self._seconds(adapter)

    def _seconds(self, adapter: Adapter) -> float:
        line = self._host if adapter.content in self._on_host else self._disk
        return line.predict(1, adapter.num_bytes)

    # ---- requests ------------------------------------------------------------------------------------

    def enter(self, request: Request) -> bool:
        adapter = request.params.adapter
        assert adapter is not None
        if not self.serves(adapter):
            raise ValueError(
                f"{request.request_id} needs an adapter of rank {adapter.rank}, and the executor serves none"
            )
        slot = self._slots.get(adapter.content)
        # A request that computes a segment uses the slot that is pinned for the client's request.
        if slot is not None and (request.computes_for is not None or self._may_enter(request, slot)):
            self._pin(request, slot)
            return True
        self._park(request)
        self._changed = True
        request.timeline.begin("adapter", request.placed_at)
        return False

    def leave(self, request: Request, last_step: int) -> None:
        self._changed |= request in self.waiting  # a slot that it has claimed is open again
        self._unpark(request)
        if (slot := self._pinned.pop(request, None)) is not None:
            del slot.pins[request]
            slot.free_after = last_step
            self._changed = True

    def messages(self, now: float) -> list[Message]:
        """Let requests enter whose adapters are in slots now; returns the loads to begin."""
        if self.waiting and (self._changed or now >= self._look_at):
            admitted, taken_back = self._advance(now)
            for request in taken_back:
                self.scheduler.take_back(request)
            for request in admitted:
                request.timeline.end(now)
                self.scheduler.enter(request)
        asked, self._outbox = self._outbox, []
        for number, _, _ in asked:
            self._loads[number].asked = now
        return [LoadAdapter(self.scheduler.epoch, number, adapter, slot) for number, adapter, slot in asked]

    def _advance(self, now: float) -> tuple[list[Request], list[Request]]:
        """Begin loads. Returns the requests that may enter the waiting queue now, and the requests to take back from
        there because the slot of their adapter is claimed."""
        # Slots are claimed anew each time, in the order of the requests: a request that has come meanwhile may go
        # first, and a claimer may have ended.
        oldest = self.scheduler.oldest_step
        oldest_step = inf if oldest is None else oldest
        self._changed, self._look_at = False, inf
        admitted: list[Request] = []
        taken_back: list[Request] = []
        for each in self._slots.values():
            each.claimer = None
        claimed: set[bytes] = set()
        for request in sorted(self.waiting, key=self._rank):
            assert request.params.adapter is not None
            content = request.params.adapter.content
            if (slot := self._slots.get(content)) is not None:
                if self._may_enter(request, slot):
                    self._pin(request, slot)
                    self._unpark(request)
                    admitted.append(request)
            elif content not in claimed and not self._late:
                claimed.add(content)
                taken_back += self._make_slot(request, request.params.adapter, now, oldest_step)
        return admitted, taken_back

    def _may_enter(self, request: Request, slot: _Slot) -> bool:
        return slot.loaded and (slot.claimer is None or self._rank(request) < self._rank(slot.claimer))

    def _rank(self, request: Request) -> tuple[float, float]:
        """Sort key: the key that has been served the least first, and the requests of a key in the queue's order."""
        return self.scheduler.waiting.account(request.params.key).served, queue_time_of(request)

    def _pin(self, request: Request, slot: _Slot) -> None:
        slot.pins[request] = None
        self._pinned[request] = slot
        request.adapter_slot = slot.index
        content = slot.adapter.content
        self._slots[content] = self._slots.pop(content)

    def _make_slot(self, request: Request, adapter: Adapter, now: float, oldest_step: float) -> list[Request]:
        """Begin to load an adapter if there is a slot, else claim one; returns the requests to take back for that."""
        unused = [slot for slot in self._slots.values() if slot.loaded and not slot.pins and slot.claimer is None]
        if self._free:
            self._load(adapter, self._free.pop())
        elif unused:
            idle = (slot for slot in unused if slot.free_after < oldest_step)
            self._exchange(next(idle, unused[0]), request, adapter, now, oldest_step)
        else:
            return self._claim(request, adapter, now, oldest_step)
        return []

    def _exchange(self, slot: _Slot, request: Request, adapter: Adapter, now: float, oldest_step: float) -> None:
        """Load an adapter into a slot that no request needs, after the steps in flight that use it have come back."""
        if slot.free_after < oldest_step:
            self.num_evictions += 1
            del self._slots[slot.adapter.content]
            self._load(adapter, slot.index)
        else:
            self._look_at = now
            slot.claimer = request

    def _claim(self, request: Request, adapter: Adapter, now: float, oldest_step: float) -> list[Request]:
        """Claim the slot of the adapter that has been there the longest; returns its requests that have not begun and
        come after ``request``, which are taken back."""
        open_slots = [slot for slot in self._slots.values() if slot.loaded and slot.claimer is None]
        stays = {slot: slot.since + STAY_LOADS * self._seconds(slot.adapter) for slot in open_slots}
        due = [slot for slot, until in stays.items() if until <= now]
        if not due:
            self._look_at = min([self._look_at, *stays.values()])
            return []
        slot = min(due, key=lambda one: one.since)
        slot.claimer = request
        back = [one for one in slot.pins if _has_not_begun(one) and self._rank(one) > self._rank(request)]
        for one in back:
            del slot.pins[one], self._pinned[one]
            self._park(one)
        if not slot.pins:
            self._exchange(slot, request, adapter, now, oldest_step)
        return back

    # ---- loads ---------------------------------------------------------------------------------------

    def check(self, adapter: Adapter, checked: Checked) -> None:
        """Load an adapter to the host to check its files; ``checked`` is called with the result."""
        self._load(adapter, -1, checked)

    def close(self) -> None:
        checks, self._checks = self._checks, []
        for check in checks:
            if check.checked is not None:
                check.checked(None, lost=True)

    def take(self, message: Message, now: float) -> list[Request]:
        if not isinstance(message, AdapterLoaded):
            return []
        self._last_answer, self._changed = now, True
        self._late.discard(message.number)
        if (load := self._loads.pop(message.number, None)) is None:
            return []
        adapter, slot, content = load.adapter, load.slot, load.adapter.content
        if message.error:
            self._failed(load, message.error)
            if slot is None:
                return []
            # Requests that name an equal adapter by another path do not fail: executors load that path for them.
            return self._unpark_all(lambda one: (one.content, one.path) == (content, adapter.path))
        if load.checked is not None:
            self._checks.remove(load)
            load.checked(None)
        self.num_loads += 1
        line = self._host if message.from_host else self._disk
        line.observe(message.elapsed_us * 1e-6, 1, adapter.num_bytes)
        self._on_host.add(content)
        self._on_host.difference_update(message.evicted)
        if slot is not None:
            slot.since = now
        return []

    def give_up(self, now: float, most: float) -> list[Request]:
        oldest = next(iter(self._loads.values()), None)
        if oldest is not None and now - max(oldest.asked, self._last_answer) > most:
            for number, load in list(self._loads.items()):
                if load.asked < inf:
                    self._late.add(number)
                self._failed(load, f"the adapter {load.adapter.name!r} has not been loaded within {most:g} s")
            self._loads.clear()
            self._outbox.clear()
        return self._unpark_all(lambda one: not self._holds(one)) if self._late else []

    def _failed(self, load: _AdapterLoad, error: str) -> None:
        # The slot of a load that was given up is free. The executor loads in order, so a late load cannot overwrite an
        # adapter that is loaded into the slot afterwards.
        self.num_load_errors += 1
        self._changed = True
        if load.slot is not None:
            del self._slots[load.adapter.content]
            self._free.append(load.slot.index)
        if load.checked is not None:
            self._checks.remove(load)
            load.checked(error)

    def _unpark_all(self, concerned: Callable[[Adapter], bool]) -> list[Request]:
        """Remove and return the waiting requests whose adapters are ``concerned``."""
        failed = [one for one in self.waiting if one.params.adapter is not None and concerned(one.params.adapter)]
        for request in failed:
            self._unpark(request)
        return failed

    def _load(self, adapter: Adapter, index: int, checked: Checked | None = None) -> None:
        slot = None
        if index >= 0:
            slot = self._slots[adapter.content] = _Slot(index, adapter)
        number = next(self._numbers)
        load = self._loads[number] = _AdapterLoad(adapter, slot, checked)
        if checked is not None:
            self._checks.append(load)
        self._outbox.append((number, adapter, index))

    def counts(self) -> dict[str, int]:
        return {
            "lora_loads": self.num_loads,
            "lora_load_errors": self.num_load_errors,
            "lora_evictions": self.num_evictions,
        }


def _has_not_begun(request: Request) -> bool:
    return (
        isnan(request.scheduled_time)
        and not request.segments
        and request.computes_for is None
        and all(sequence.status is SequenceStatus.WAITING for sequence in request.sequences)
    )
