"""Sessions and advice: predictions of clients about the next use of their KV.

A session is a conversation, whose turns follow each other. The blocks that its turns alone have used are predicted
(see ``predicted_uses``): by the hints of its last turn, by later advice, or by the event for which the session waits:
tools that its last turn has called, or a person. Blocks of its last turn that the next turn has not taken are not used
again.

Where layers are in several groups, predictions of clients count for the last windows and states of a session too, and
its end releases them. Learned predictions count for blocks of full layers alone: snapshots have roles instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagewise_shared.protocol import Message

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.features.pins import Pins
from pagewise_scheduler.core.features.sessions import Session, Sessions
from pagewise_scheduler.core.features.subjects import own_of, subject
from pagewise_scheduler.core.features.trust import LATE, LEAST_SECONDS, Claim, Hints
from pagewise_scheduler.core.memory.eviction import NUM_ENDINGS, TOOL_CALL, CostAware
from pagewise_scheduler.core.memory.eviction_history import ENDED
from pagewise_scheduler.core.memory.predicted_uses import (
    PEOPLE,
    SECONDS,
    SHARED,
    TOOLS,
    PredictedUses,
    own_blocks,
)
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, cache_salt_of, left_behind
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers import session_memory
from pagewise_scheduler.core.tiers.stored_drops import drop_blocks, only_stored
from pagewise_scheduler.core.tiers.tier import BlockCopy

if TYPE_CHECKING:
    from pagewise_shared.protocol import Advise

    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_FORK_SECONDS = 60.0
"""The next use of blocks with which a session is to begin is expected in so many seconds."""
_END_SECONDS = 600.0
"""An announced end is kept if the session does not return for so long."""
_WATCH_SECONDS = 10.0


@dataclass(slots=True, frozen=True)
class Outcome:
    """The result of advice, as in ``Advised``; ``found``: the executor has some of the KV."""

    outcome: Literal["accepted", "clipped", "refused"]
    reason: str = ""
    blocks: int = 0
    seconds: float = 0.0
    found: bool = True


class Advice(Feature):
    """All sessions, pins and advice of one executor."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv = scheduler.kv
        policy = self._kv.pool.policy
        self._policy = policy if isinstance(policy, CostAware) else None
        self._predicted = PredictedUses()
        if self._policy is not None:
            self._policy.predicted = self._predicted
        self._sessions = Sessions(sum(tier.num_blocks for tier in self._kv.tiers.values()))
        self._hints = Hints(self._predicted)
        self.pins = Pins(self._kv)
        self._ahead = scheduler.features.loads_ahead
        self._watched, self._demotes = 0.0, False
        self._drops: list[Message] = []
        self.outcomes = {"accepted": 0, "clipped": 0, "refused": 0}

    @property
    def _now(self) -> float:
        return self._kv.eviction_history.now

    @property
    def _tick(self) -> int:
        return self._policy.now if self._policy is not None else 0

    # ---- turns ---------------------------------------------------------------------------------------

    def entered(self, request: Request) -> None:
        if request.params.reuse.session:
            self._returned(self._session(request), request)

    def placed_elsewhere(self, request: Request) -> None:
        params = request.params
        if (session := self._sessions.find(params.key, params.cache_salt, params.reuse.session)) is not None:
            if session.last is None and session.parent:
                self._hints.begun_elsewhere(session.key, session.parent)
            self._returned(session, request)

    def _returned(self, session: Session, request: Request) -> None:
        away = max(self._now, request.placed_at) - session.left  # no step was planned for long if nothing ran
        if session.due >= 0:
            self._judge(session, kept=not session.ends and away <= session.due)
        if session.prediction > ENDED:
            self._predicted.returned(session.prediction, away, session.counted, session.key)
        if session.last is not None:
            self._ahead.forget([session.last])
        session.has_waited(away)
        session.prediction, session.due, session.waits_for = 0, -1.0, ""

    def frees(self, sequence: RequestSequence) -> None:
        last, request = sequence.table.last_node, sequence.request
        if last is None or sequence.ending is None or self._policy is None:
            return
        self._sessions.ended(request.params.key, request.request_id, last)
        if not request.params.reuse.session:
            return
        reuse, session = request.params.reuse, self._session(request)
        before = session.last
        self._sessions.leave(session, last)
        session.left, session.request_id = self._now, request.request_id
        session.counted, session.called = 0, sequence.ending % NUM_ENDINGS == TOOL_CALL
        session.waits_for, session.ends, session.due = "", reuse.ends, _END_SECONDS if reuse.ends else -1.0
        if reuse.ends and self._hints.believes_ends(session.key):
            session.prediction = ENDED
        elif reuse.returns_in >= 0 and not reuse.ends:
            session.prediction, session.due = self._hints.time(session.key, reuse.returns_in)
        else:
            session.prediction = self._waits(session)
        self._predicted.ends(last, session.number, session.prediction, self._sessions.live_parent(session))
        self._load_in_time(session)
        if before is not None and not self._kv.windows:
            left = [node for node in left_behind(before, last) if node.session == session.number and node.num_tiers]
            self._predict(left, ENDED)

    def leave(self, request: Request, last_step: int) -> None:
        if not request.params.reuse.session or (session := self._session(request)).request_id != request.request_id:
            return
        if session.prediction == ENDED:
            self._leave_to_children(session)
            own = own_blocks(session.last, session.number)
            session_memory.drop_snapshots(self._kv, own, self.pins.ends)
        elif session.is_hinted:
            own = own_blocks(session.last, session.number)
            session_memory.predict_snapshots(self._kv, own, session.prediction, self._tick)

    def _leave_to_children(self, session: Session) -> None:
        """A session has ended: blocks with which live sessions begin are theirs from now on."""
        heirs = self._sessions.heirs(session)
        for heir in dict.fromkeys(heirs.values()):
            begin = [node for node, one in heirs.items() if one is heir]
            for node in begin:
                node.session = heir.number if heir is not None else SHARED
            self._predict(begin, heir.prediction if heir is not None else 0)

    def _session(self, request: Request) -> Session:
        params = request.params
        return self._sessions.of(params.key, params.cache_salt, params.reuse.session, params.reuse.parent)

    def _waits(self, session: Session, tools: Sequence[str] = ("",)) -> int:
        """The prediction for a session that waits for tools, the slowest of which decides, or for a person."""
        if session.called:
            kind, things = TOOLS, ["tool " + name for name in tools]
        else:
            kind, things = PEOPLE, ["sub-agent" if session.parent else "person"]
        thing_of = {
            self._predicted.source(kind, (thing, session.part_of(thing)), session.key): thing for thing in things
        }
        source = self._predicted.slowest(thing_of)
        session.waits_for = thing_of[source]
        return self._predicted.time(source, SECONDS)

    def _predict(self, nodes: Sequence[CachedBlock], prediction: int) -> None:
        """Predict the next use of blocks, counted from now, and offer them to eviction by this prediction."""
        assert self._policy is not None
        tick = self._policy.new_tick()
        self._predicted.note(tick, self._now)
        for node in nodes:
            node.prediction, node.last_used = prediction, tick
            for tier in self._kv.tiers.values():
                tier.offer(node)

    def _load_in_time(self, session: Session) -> None:
        """Load the blocks of a session ahead of the time at which such sessions return, if that is known."""
        assert session.last is not None
        self._ahead.forget([session.last])
        if session.prediction > ENDED and (expected := self._predicted.likeliest(session.prediction)) is not None:
            due, until = (session.left + seconds for seconds in expected)
            path = [*ancestors(session.last)][::-1]
            self._ahead.want(
                path, cache_salt_of(session.last), due, until, key=session.key, holder=session, learned=True
            )

    def _judge(self, session: Session, *, kept: bool) -> None:
        """A hint on a session was kept or broken."""
        session.due = -1.0
        num_blocks = session.last.depth if session.last is not None else 1
        self._hints.count(session.key, num_blocks, ends=session.ends, kept=kept)

    # ---- steps ---------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        now = self._now
        self._predicted.note(self._tick, now)
        if now - self._watched < _WATCH_SECONDS:
            return
        self._watched = now
        self.pins.expire(now)
        for claim in self._hints.over(now):  # blocks of a session have the session's prediction again
            session = self._sessions.numbered(claim.session)
            if session is not None and session.prediction != ENDED:
                own = [*own_blocks(session.last, session.number)]
                self._predict([node for node in own if node.prediction == claim.prediction], session.prediction)
                hinted = session.prediction if session.is_hinted else 0
                session_memory.predict_snapshots(self._kv, own, hinted, self._tick)
        for session in self._sessions:
            age = now - session.left
            if 0 <= session.due < age:
                self._judge(session, kept=session.ends)
            if session.prediction > ENDED and age >= self._predicted.reaches(session.prediction, session.counted):
                session.counted = self._predicted.reach(session.prediction, age, session.counted, session.key)
                if self._predicted.is_overdue(session.prediction, age):
                    session.prediction = 0

    def is_due(self, now: float) -> bool:
        return self.pins.any_expired(now)

    def wants_step(self) -> bool:
        return self._demotes and self.scheduler.has_unsent_demotions

    def planned(self, step: int) -> None:
        self._demotes = False

    def messages(self, now: float) -> list[Message]:
        drops, self._drops = self._drops, []
        return drops

    def make_room(self) -> bool:
        return self.pins.release_all()

    def unblock(self) -> bool:
        return self.scheduler.num_waiting + self.scheduler.num_running > 0 and self.pins.release_all()

    def clear(self) -> None:
        self._drops.clear()
        self.pins.release_all()
        self._sessions.clear()
        self._hints.clear()

    def counts(self) -> dict[str, int]:
        counts = {f"advice_{outcome}": count for outcome, count in self.outcomes.items()}
        return counts | {"hints_kept": self._hints.num_kept, "hints_broken": self._hints.num_broken}

    # ---- advice --------------------------------------------------------------------------------------

    def advise(self, advice: "Advise", now: float) -> Outcome:
        """Follow advice of a client as far as this executor has the KV. ``now``: seconds."""
        self._kv.eviction_history.now = now
        session, path = subject(self._kv, self._sessions, advice)
        if advice.kind == "dontneed":
            stored = only_stored(self.scheduler, path[0] if path else None)
            path = [*stored, *(node for node in path if node.num_tiers)]
        elif advice.kind != "willneed":
            path = [node for node in path if node.num_tiers]
        elif session is not None or not self._ahead.may_be_stored(advice.cache_salt):
            path = self._ahead.reachable(path[::-1])[::-1]
        if not path:
            return Outcome("refused", "nothing of it is cached", found=False)
        outcome = self._follow(advice, session, path)
        self.outcomes[outcome.outcome] += advice.kind != "called"  # gateways say that, not clients
        return outcome

    def knows(self, advice: "Advise") -> tuple[float, int]:
        """When the session that advice is on has left, and how many blocks of it are cached here; greater is better."""
        session, path = subject(self._kv, self._sessions, advice)
        return session.left if session is not None else -1.0, sum(1 for node in path if node.num_tiers)

    def _follow(self, advice: "Advise", session: Session | None, path: list[CachedBlock]) -> Outcome:
        seconds = advice.seconds
        if advice.kind == "unpin":
            num_released = self.pins.release(advice.key, path)
            return Outcome("accepted", blocks=num_released) if num_released else Outcome("refused", "it has no pin")
        if advice.kind == "pin":
            held, until, reason = self.pins.hold(advice.key, path[::-1], seconds, self._now)
            kind: Literal["accepted", "clipped", "refused"] = "clipped" if reason else "accepted"
            return Outcome(kind if held else "refused", reason, held, until if held else 0.0)
        own = own_of(self._sessions, session, path, advice)
        if not own:
            return Outcome("refused", "other turns or sessions use it too")
        if advice.kind == "cold" and self._kv.pool.below is None:
            return Outcome("refused", "there is no tier below the device")
        if advice.kind in ("cold", "dontneed"):
            stored = [node for node in own if not node.num_tiers]
            behind = session_memory.blocks_behind(own[-1])
            if not behind and not stored:
                return Outcome("refused", "other turns or sessions use it too")
            self._forget_loads(session, own)
            return self._release(behind, stored, forget=advice.kind == "dontneed")
        if self._policy is None:
            return Outcome("refused", "this executor evicts the least recently used blocks")
        return self._expect(advice, session, path, own)

    def _expect(
        self, advice: "Advise", session: Session | None, path: list[CachedBlock], own: list[CachedBlock]
    ) -> Outcome:
        """Follow advice on when the blocks ``own`` of a path are used again, or not."""
        if advice.kind == "end":
            return self._end(session, own, advice.key)
        if advice.kind == "called":
            if session is not None and session.prediction != ENDED and not session.is_hinted:
                session.called = True
                session.prediction, session.left, session.counted = self._waits(session, advice.tools), self._now, 0
                self._predict(own, session.prediction)
                self._load_in_time(session)
            return Outcome("accepted")
        seconds = advice.seconds if advice.seconds >= 0 else _FORK_SECONDS
        prediction, due = self._hints.time(advice.key, seconds)
        if advice.kind == "fork":
            self._fork(advice, session, own, prediction, due)
        elif session is None:
            self._claim(advice.key, own, prediction, due)
        else:
            self._predict(own, prediction)
            if session.is_hinted:  # another hint does not put off the judgement
                if (left := session.left + session.due - self._now) < 0:
                    self._judge(session, kept=False)
                else:
                    due = min(due, left)
            session.prediction, session.due, session.left = prediction, due, self._now
            session.ends, session.counted = False, 0
        session_memory.predict_snapshots(self._kv, own, prediction, self._tick)
        if advice.kind == "willneed":
            salt, now, due = cache_salt_of(path[0]), self._now, max(seconds, LEAST_SECONDS)
            self._ahead.want(path[::-1], salt, now + due, now + LATE * due, key=advice.key, holder=session)
        return Outcome("accepted", blocks=len(own), seconds=seconds)

    def _end(self, session: Session | None, own: list[CachedBlock], key: str) -> Outcome:
        """Blocks are not used again by the session that has used them."""
        believed = self._hints.believes_ends(key)
        if session is not None and session.is_hinted and believed:
            self._judge(session, kept=False)
        if session is not None and not session.is_hinted:  # the end is judged also if it is not believed
            session.ends, session.due = True, self._now - session.left + _END_SECONDS
        if not believed:
            return Outcome("refused", "most sessions of this API key have returned after their ends")
        self.pins.release(key, own)
        self._forget_loads(session, own)
        if session is not None:
            session.prediction = ENDED
            self._leave_to_children(session)
            own = [node for node in own if node.session == session.number]
        session_memory.drop_snapshots(self._kv, own, self.pins.ends)
        self._predict(own, ENDED)
        return Outcome("accepted", blocks=len(own))

    def _fork(
        self, advice: "Advise", parent: Session | None, own: list[CachedBlock], prediction: int, due: float
    ) -> None:
        """A session begins with the blocks ``own`` of another one, whose blocks they stay. Until it does, this advice
        predicts their use, unless they are worth more by the parent's return."""
        if parent is not None and advice.session:
            child = self._sessions.of(advice.key, advice.cache_salt, advice.session)
            parent.adopt(child)
            if child.last is None:
                child.prediction, child.left = prediction, self._now
        value = self._predicted.value
        lesser = [
            one
            for one in own
            if not one.prediction or value(one.prediction, one.last_used) < value(prediction, self._tick)
        ]
        self._claim(advice.key, lesser, prediction, due)

    def _claim(self, key: str, own: list[CachedBlock], prediction: int, due: float) -> None:
        """Predict a use of blocks that is not the return of a session, and judge the advice later."""
        if own:
            self._predict(own, prediction)
            self._hints.claim(key, own[0], Claim(own[0].session, prediction, self._now + due))

    def _forget_loads(self, session: Session | None, own: list[CachedBlock]) -> None:
        self._ahead.forget([*own, session.last] if session is not None and session.last is not None else own)

    def _release(self, own: list[CachedBlock], stored: list[CachedBlock], *, forget: bool) -> Outcome:
        """Demote blocks, or forget them in all tiers, as far as nothing uses them; and the blocks ``stored``, which
        only tiers without ids have."""
        if forget:
            num_cached = len(own) + len(stored)
            num_released = len(stored) + session_memory.release(self._kv, own)
            self._drops += drop_blocks(self.scheduler, [*stored, *(node for node in own if not node.num_tiers)])
        else:
            copies, num_cached = list[BlockCopy](), sum(node.block >= 0 for node in own)
            num_released = session_memory.demote(self._kv, own, copies)
            self.scheduler.plan.copy(copies)
            self._demotes = True
        if not num_released:
            return Outcome("refused", "it is in use" if num_cached else "it is not on the device")
        clipped = num_released < num_cached
        return Outcome("clipped" if clipped else "accepted", "a part is in use" if clipped else "", num_released)
