"""Sessions and advice: what clients say about the next use of their KV.

A session is a conversation, whose turns follow each other. The blocks that its turns alone have used are predicted
(see ``predicted_uses``): by the hints of its last turn, by later advice, or by what the session waits for: tools that
its last turn has called, or a person. Blocks of its last turn that the next turn has not taken are not used again.

Where layers are in several groups, what clients say counts for the last windows and states of a session too, and its
end releases them. What is learned counts for blocks of full layers alone: snapshots have roles instead.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.features.pins import Pins
from pagewise_scheduler.core.memory.eviction import CLASSES_PER_USE, NUM_ENDINGS, TOOL_CALL, CostAware
from pagewise_scheduler.core.memory.eviction_history import ENDED, RequestRef
from pagewise_scheduler.core.memory.predicted_uses import (
    DOUBTED,
    HINTED,
    PEOPLE,
    SECONDS,
    TOOLS,
    PredictedUses,
    own_blocks,
)
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys, cache_salt_of
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers import session_memory
from pagewise_scheduler.core.tiers.tier import BlockCopy

if TYPE_CHECKING:
    from pagewise_shared.protocol import Advise

    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_MOST_SESSIONS, _MOST_RETURNS = 1 << 14, 2
"""Returns of a person to a session that are told apart: who has come back before comes back more often."""
_LATE, _LEAST_SECONDS, _FORK_SECONDS = 4.0, 0.5, 60.0
"""A hint is kept if the session returns within so many times its seconds. A fork's next use is expected in so many."""
_WATCH_SECONDS = 10.0
_DOUBTED_FROM, _MOST_TRUST = 4, 64

_Name = tuple[str, str | None, str]
"""A session's API key, cache salt and name."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """What came of advice, as in ``Advised``; ``found``: the executor has some of the KV."""

    outcome: Literal["accepted", "clipped", "refused"]
    reason: str = ""
    blocks: int = 0
    seconds: float = 0.0
    found: bool = True


@dataclass(slots=True, eq=False)
class Session:
    """A session. ``last``: the last block of its last turn, which left it at ``left`` (seconds).

    ``prediction``: of its return; 0: none. ``due``: the hinted seconds, negative: no hint, or it was judged already.
    ``counted``: see ``PredictedUses.reach``. ``called``: its last turn has called tools. ``returns``: how often a turn
    came after one that had not. ``parent``: the number of the session with whose blocks it begins; 0: none.
    """

    number: int
    key: str
    last: CachedBlock | None = None
    request_id: str = ""
    left: float = 0.0
    prediction: int = 0
    due: float = -1.0
    counted: int = 0
    called: bool = False
    returns: int = 0
    parent: int = 0


@dataclass(slots=True)
class Trust:
    """The hints of one API key that were kept and broken. Old ones weigh less."""

    kept: float = 0.0
    broken: float = 0.0

    @property
    def source(self) -> int:
        """The source of predictions from its hints."""
        return DOUBTED if self.broken >= _DOUBTED_FROM and self.broken > self.kept else HINTED

    def count(self, *, kept: bool) -> None:
        """Count a hint."""
        if self.kept + self.broken >= _MOST_TRUST:
            self.kept, self.broken = self.kept / 2, self.broken / 2
        if kept:
            self.kept += 1
        else:
            self.broken += 1


class Advice(Feature):
    """All sessions and advice of one executor."""

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self._kv = scheduler.kv
        policy = self._kv.pool.policy
        self._policy = policy if isinstance(policy, CostAware) else None
        self._predicted = PredictedUses()
        if self._policy is not None:
            self._policy.predicted = self._predicted
        self._sessions: OrderedDict[_Name, Session] = OrderedDict()
        self._keys: dict[int, str] = {}
        self._num_sessions = 0
        self._trust: dict[str, Trust] = {}
        self._pins = Pins(self._kv)
        self._ahead = scheduler.features.loads_ahead
        self._watched, self._demotes = 0.0, False
        self.outcomes = {"accepted": 0, "clipped": 0, "refused": 0}
        self.num_kept = self.num_broken = 0

    @property
    def _now(self) -> float:
        return self._kv.eviction_history.now

    @property
    def _tick(self) -> int:
        return self._policy.now if self._policy is not None else 0

    # ---- turns ---------------------------------------------------------------------------------------

    def entered(self, request: Request) -> None:
        session = self._session(request)
        away = max(self._now, request.placed_at) - session.left  # no step was planned for long if nothing ran
        if session.prediction == ENDED:
            self._judge(session, kept=False)
        elif session.prediction:
            self._predicted.returned(session.prediction, away, session.counted)
            if session.due >= 0:
                self._judge(session, kept=away <= _LATE * session.due)
        if session.last is not None:
            self._ahead.forget([session.last])
        session.returns += session.last is not None and not session.called
        session.prediction, session.due = 0, -1.0

    def frees(self, sequence: RequestSequence) -> None:
        last, request = sequence.table.last_node, sequence.request
        if last is None or sequence.ending is None or self._policy is None:
            return
        reuse, session = request.params.reuse, self._session(request)
        before, session.last = session.last, last
        session.left, session.request_id = self._now, request.request_id
        session.due, session.counted, session.called = -1.0, 0, sequence.ending % NUM_ENDINGS == TOOL_CALL
        if reuse.ends:
            session.prediction = ENDED
        elif reuse.returns_in >= 0:
            session.due = max(reuse.returns_in, _LEAST_SECONDS)
            session.prediction = self._predicted.time(self._trust_of(session.key).source, session.due)
        else:
            session.prediction = self._waits(session)
        self._predicted.ends(last, session.number, session.prediction, session.parent)
        self._load_in_time(session)
        if before is not None and not self._kv.windows:
            path = set(ancestors(last))
            self._predict([node for node in own_blocks(before, session.number) if node not in path], ENDED)

    def leave(self, request: Request, last_step: int) -> None:
        session = self._session(request)
        if not self._kv.windows or session.request_id != request.request_id:
            return
        own, pinned = own_blocks(session.last, session.number), self._pins.ends
        if session.prediction == ENDED:
            session_memory.drop_snapshots(self._kv, (node for node in own if node not in pinned))
        elif session.due >= 0:
            session_memory.predict_snapshots(self._kv, own, session.prediction, self._tick)

    def _session(self, request: Request) -> Session:
        params = request.params
        name = params.key, params.cache_salt, params.reuse.session
        session = self._sessions.get(name)
        if session is None:
            self._num_sessions += 1
            session = self._sessions[name] = Session(self._num_sessions, params.key)
            parent = self._sessions.get((params.key, params.cache_salt, params.reuse.parent))
            session.parent = parent.number if parent is not None else 0
            self._keys[session.number] = params.key
            if len(self._sessions) > _MOST_SESSIONS:
                del self._keys[self._sessions.popitem(last=False)[1].number]
        self._sessions.move_to_end(name)
        return session

    def _waits(self, session: Session, tools: Sequence[str] = ("",)) -> int:
        """The prediction for a session that waits for tools, the slowest of which decides, or for a person."""
        if session.called:
            source = self._predicted.slowest([self._predicted.waits_for("tool " + name, TOOLS) for name in tools])
        else:
            kind = "sub-agent" if session.parent else f"person {min(session.returns, _MOST_RETURNS)}"
            source = self._predicted.waits_for(kind, PEOPLE)
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
        if session.last is None or session.prediction <= ENDED:
            return
        if (expected := self._predicted.likeliest(session.prediction)) is not None:
            due, until = (session.left + seconds for seconds in expected)
            path = [*ancestors(session.last)][::-1]
            self._ahead.want(path, cache_salt_of(session.last), due, until, holder=session, learned=True)

    def _trust_of(self, key: str) -> Trust:
        return self._trust.setdefault(key, Trust())

    def _judge(self, session: Session, *, kept: bool) -> None:
        session.due = -1.0
        self._trust_of(session.key).count(kept=kept)
        self.num_kept += kept
        self.num_broken += not kept

    # ---- steps ---------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        now = self._now
        self._predicted.note(self._tick, now)
        if now - self._watched < _WATCH_SECONDS:
            return
        self._watched = now
        self._pins.expire(now)
        for session in self._sessions.values():
            if session.prediction > ENDED:
                if session.due >= 0 and now - session.left > _LATE * session.due:
                    self._judge(session, kept=False)
                age = now - session.left
                session.counted = self._predicted.reach(session.prediction, age, session.counted)
                if self._predicted.is_overdue(session.prediction, age):
                    session.prediction = 0

    def wants_step(self) -> bool:
        return self._demotes and self.scheduler.has_unsent_demotions

    def planned(self, step: int) -> None:
        self._demotes = False

    def make_room(self) -> bool:
        return self._pins.release_all()

    def unblock(self) -> bool:
        return self.scheduler.num_waiting + self.scheduler.num_running > 0 and self._pins.release_all()

    def clear(self) -> None:
        self._pins.release_all()
        self._sessions.clear()
        self._keys.clear()

    def counts(self) -> dict[str, int]:
        counts = {f"advice_{outcome}": count for outcome, count in self.outcomes.items()}
        return counts | {"hints_kept": self.num_kept, "hints_broken": self.num_broken}

    # ---- advice --------------------------------------------------------------------------------------

    def advise(self, advice: "Advise", now: float) -> Outcome:
        """Follow advice of a client as far as this executor has the KV. ``now``: seconds."""
        self._kv.eviction_history.now = now
        session, path = self._subject(advice)
        if advice.kind != "willneed":
            path = [node for node in path if node.num_tiers]
        elif session is not None or not self._ahead.may_be_stored(advice.cache_salt):
            path = self._ahead.reachable(path[::-1])[::-1]
        if not path:
            return Outcome("refused", "nothing of it is cached", found=False)
        outcome = self._follow(advice, session, path)
        self.outcomes[outcome.outcome] += 1
        return outcome

    def knows(self, advice: "Advise") -> tuple[float, int]:
        """When the session that advice is on has left, and how many blocks of it are cached here; greater is better."""
        session, path = self._subject(advice)
        return session.left if session is not None else -1.0, sum(1 for node in path if node.num_tiers)

    def _subject(self, advice: "Advise") -> tuple[Session | None, list[CachedBlock]]:
        """The session that advice is on, if it is on one, and its blocks, the last one first, cached or not."""
        name = advice.parent if advice.kind == "fork" and advice.parent else advice.session
        if name:
            session = self._sessions.get((advice.key, advice.cache_salt, name))
        elif advice.request_id:
            newest = reversed(self._sessions.values())
            session = next(
                (one for one in newest if (one.key, one.request_id) == (advice.key, advice.request_id)), None
            )
        else:
            tree, keys = self._kv.pool.tree, [*block_keys(advice.tokens, self._kv.block_size)]
            path = tree.walk(tree.root_of(advice.cache_salt), keys)
            if advice.kind == "willneed":
                path += tree.detached(advice.cache_salt, path, keys[len(path) :], RequestRef("", advice.key))
            return None, path[::-1]
        last = session.last if session is not None else None
        return session, [*ancestors(last)]

    def _is_own(self, node: CachedBlock, key: str) -> bool:
        """Whether the requests of one API key, and of one session at most, have used a block."""
        if node.session > 0:
            return self._keys.get(node.session) == key
        used_once = node.kind // CLASSES_PER_USE <= 1 and node.session == 0
        return used_once and node.cached_by is not None and node.cached_by.key == key

    def _follow(self, advice: "Advise", session: Session | None, path: list[CachedBlock]) -> Outcome:
        seconds = advice.seconds
        if advice.kind == "unpin":
            return Outcome("accepted", blocks=self._pins.release(advice.key, path))
        if advice.kind == "pin":
            held, until, reason = self._pins.hold(advice.key, path[::-1], seconds, self._now)
            kind: Literal["accepted", "clipped", "refused"] = "clipped" if reason else "accepted"
            return Outcome(kind if held else "refused", reason, held, until if held else 0.0)
        own = [node for node in path if self._is_own(node, advice.key)]
        if not own:
            return Outcome("refused", "other sessions use it too")
        if advice.kind != "willneed":
            self._ahead.forget([*path, *ancestors(session.last)] if session is not None else path)
        if advice.kind in ("cold", "dontneed"):
            return self._release(session_memory.blocks_behind(own[-1]), forget=advice.kind == "dontneed")
        if self._policy is None:
            return Outcome("refused", "this executor evicts the least recently used blocks")
        return self._expect(advice, session, path, own)

    def _expect(
        self, advice: "Advise", session: Session | None, path: list[CachedBlock], own: list[CachedBlock]
    ) -> Outcome:
        """Follow advice on when the blocks ``own`` of a path are used again, or not."""
        due, source = -1.0, self._trust_of(advice.key).source
        if advice.kind == "end":
            prediction = ENDED
            self._pins.release(advice.key, own)
            session_memory.drop_snapshots(self._kv, own)
        elif advice.kind == "called":
            if session is None or session.prediction == ENDED or session.due >= 0:
                return Outcome("accepted")
            session.called = True
            prediction, seconds = self._waits(session, advice.tools), -1.0
            own = list(own_blocks(session.last, session.number))
        else:
            seconds = advice.seconds if advice.seconds >= 0 else _FORK_SECONDS
            due = max(seconds, _LEAST_SECONDS)
            prediction = self._predicted.time(source, due)
        self._predict(own, prediction)
        if due >= 0:
            session_memory.predict_snapshots(self._kv, own, prediction, self._tick)
        if advice.kind == "willneed":
            salt = cache_salt_of(path[0])
            self._ahead.want(path[::-1], salt, self._now + due, self._now + _LATE * due, holder=session)
        if session is not None:
            session.prediction, session.due, session.left = prediction, due, self._now
            session.counted = 0
            if advice.kind == "called":
                self._load_in_time(session)
        return Outcome("accepted", blocks=len(own), seconds=0.0 if prediction == ENDED else max(seconds, 0.0))

    def _release(self, own: list[CachedBlock], *, forget: bool) -> Outcome:
        """Demote blocks, or forget them in all tiers with ids, as far as nothing uses them."""
        if forget:
            num_released, num_cached = session_memory.release(self._kv, own), len(own)
        else:
            copies, num_cached = list[BlockCopy](), sum(node.block >= 0 for node in own)
            num_released = session_memory.demote(self._kv, own, copies)
            self.scheduler.plan.copy(copies)
            self._demotes = True
        if not num_released:
            return Outcome("refused", "it is in use" if num_cached else "it is not on the device")
        clipped = num_released < num_cached
        return Outcome("clipped" if clipped else "accepted", "a part is in use" if clipped else "", num_released)
