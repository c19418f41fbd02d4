"""Sessions and advice: what clients say about the next use of their KV.

A session is a conversation, whose turns follow each other. The blocks that its turns alone have used are predicted
(see ``predicted_uses``): by the hints of its last turn, by later advice, or by what the session waits for: tools that
its last turn has called, or a person. Blocks of its last turn that the next turn has not taken are not used again.

Predictions concern blocks of full layers. Where layers are in several groups, the hints of requests count, and the end
of a session releases its windows and states.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.features.loads_ahead import LoadsAhead
from pagewise_scheduler.core.features.pins import Pins
from pagewise_scheduler.core.features.trust import Trust
from pagewise_scheduler.core.memory.eviction import CLASSES_PER_USE, NUM_ENDINGS, TOOL_CALL, CostAware
from pagewise_scheduler.core.memory.eviction_history import ENDED
from pagewise_scheduler.core.memory.predicted_uses import (
    HINTS,
    PEOPLE,
    SECONDS,
    TOOLS,
    PredictedUses,
    own_blocks,
)
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.tiers.cache_reset import release_node, snapshot_pools
from pagewise_scheduler.core.tiers.transfers import Loads

if TYPE_CHECKING:
    from pagewise_shared.protocol import Advise

    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_MOST_SESSIONS, _MOST_THINGS = 1 << 14, 16
"""Sessions that are known, and things of each of which the longest wait is known."""
_LATE, _LEAST_SECONDS, _FORK_SECONDS = 4.0, 0.5, 60.0
"""A hint is kept if the session returns within so many times its seconds. A fork's next use is expected in so many."""
_END_SECONDS = 600.0
"""A session that was said to have ended has, if it does not return for so long."""
_WATCH_SECONDS = 10.0

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

    ``prediction``: of its return; 0: none. ``due``: the seconds within which it returns if the hint is kept, or does
    not if it has ended; negative: no hint, or it was judged already.
    ``counted``: see ``PredictedUses.reach``. ``called``: its last turn has called tools. ``waits_for``: the thing that
    it waits for; "": a hint is known. ``longest``: the seconds of its longest wait for each thing so far.
    ``parent``: the number of the session with whose blocks it begins; 0: none.
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
    waits_for: str = ""
    longest: dict[str, float] = field(default_factory=dict)
    parent: int = 0


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
        self._trust: dict[tuple[str, bool], Trust] = {}
        self._pins = Pins(self._kv)
        self._ahead = LoadsAhead(scheduler, self._policy) if self._policy is not None else None
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
        if session.due >= 0:
            self._judge(session, kept=session.prediction != ENDED and away <= session.due)
        if session.prediction > ENDED:
            self._predicted.returned(session.prediction, away, session.counted)
        thing, longest = session.waits_for, session.longest
        if thing and (thing in longest or len(longest) < _MOST_THINGS):
            longest[thing] = max(away, longest.get(thing, 0.0))
        session.prediction, session.due = 0, -1.0

    def frees(self, sequence: RequestSequence) -> None:
        last, request = sequence.table.last_node, sequence.request
        if last is None or sequence.ending is None or self._policy is None:
            return
        reuse, session = request.params.reuse, self._session(request)
        before, session.last = session.last, last
        session.left, session.request_id = self._now, request.request_id
        session.due, session.counted, session.called = -1.0, 0, sequence.ending % NUM_ENDINGS == TOOL_CALL
        session.waits_for = ""
        if reuse.ends and self._believes_ends(session.key):
            session.prediction, session.due = ENDED, _END_SECONDS
        elif reuse.returns_in >= 0 and not reuse.ends:
            session.prediction, session.due = self._hinted(session.key, reuse.returns_in)
        else:
            session.prediction = self._waits(session)
        self._predicted.ends(last, session.number, session.prediction, session.parent)
        if before is not None and not self._kv.windows:
            path = set(ancestors(last))
            self._predict([node for node in own_blocks(before, session.number) if node not in path], ENDED)

    def leave(self, request: Request, last_step: int) -> None:
        session = self._session(request)
        if session.prediction == ENDED and session.request_id == request.request_id:
            self._drop_snapshots(own_blocks(session.last, session.number))

    def _drop_snapshots(self, nodes: Iterable[CachedBlock]) -> None:
        """No sequence begins behind these nodes any more: release the windows and states there. Blocks of full layers
        that are of use with them alone go first then."""
        history, pools = self._kv.eviction_history, list(snapshot_pools(self._kv))
        history.reason = "advice"
        for node in nodes if pools else ():
            for pool in pools:
                pool.forget(node)
        history.reason = "evicted"

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
            kind, things = TOOLS, ["tool " + name for name in tools]
        else:
            kind, things = PEOPLE, ["sub-agent" if session.parent else "person"]
        thing_of: dict[int, str] = {}
        for thing in things:
            seconds = session.longest.get(thing)
            longest = "" if seconds is None else str(int(seconds).bit_length())
            thing_of[self._predicted.source(kind, (thing, longest), session.key)] = thing
        source = self._predicted.slowest(thing_of)
        session.waits_for = thing_of[source]
        return self._predicted.time(source, SECONDS)

    def _predict(self, nodes: Sequence[CachedBlock], prediction: int) -> None:
        """Predict the next use of blocks, counted from now, and offer them to eviction by this prediction."""
        tick = self._kv.pool.policy.tick()
        for node in nodes:
            node.prediction, node.last_used = prediction, tick
            for tier in self._kv.tiers.values():
                tier.offer(node)

    def _hinted(self, key: str, seconds: float) -> tuple[int, float]:
        """The prediction from a hint that a session returns after so many seconds, and after how many it is broken."""
        seconds = max(seconds, _LEAST_SECONDS)
        return self._predicted.time(self._hints_of(key), seconds), _LATE * seconds

    def _hints_of(self, key: str) -> int:
        """The source of predictions from hints of an API key."""
        source = self._predicted.source(HINTS, (), key)
        self._predicted.charge(source, self._trust_of(key, ends=False).share)
        return source

    def _believes_ends(self, key: str) -> bool:
        return self._trust_of(key, ends=True).share == 1

    def _trust_of(self, key: str, *, ends: bool) -> Trust:
        return self._trust.setdefault((key, ends), Trust())

    def _judge(self, session: Session, *, kept: bool) -> None:
        """A hint on a session was kept or broken. Ends are judged on their own: they need no estimate of a time."""
        session.due, ends = -1.0, session.prediction == ENDED
        num_blocks = session.last.depth if session.last is not None else 1
        self._trust_of(session.key, ends=ends).count(num_blocks, kept=kept)
        self._hints_of(session.key)
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
            age = now - session.left
            if 0 <= session.due < age:
                self._judge(session, kept=session.prediction == ENDED)
            if session.prediction > ENDED:
                session.counted = self._predicted.reach(session.prediction, age, session.counted)
                if self._predicted.is_overdue(session.prediction, age):
                    session.prediction = 0

    def add_to_plan(self, step: int, budget: int, loads: Loads) -> int:
        if self._ahead is not None:
            self._ahead.ask(step, loads, self._now)
        return 0

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
        if self._ahead is not None:
            self._ahead.clear()
        self._sessions.clear()
        self._keys.clear()

    def counts(self) -> dict[str, int]:
        counts = {f"advice_{outcome}": count for outcome, count in self.outcomes.items()}
        counts["advice_loaded_blocks"] = self._ahead.num_loaded if self._ahead is not None else 0
        return counts | {"hints_kept": self.num_kept, "hints_broken": self.num_broken}

    # ---- advice --------------------------------------------------------------------------------------

    def advise(self, advice: "Advise", now: float) -> Outcome:
        """Follow advice of a client as far as this executor has the KV. ``now``: seconds."""
        self._kv.eviction_history.now = now
        session, path = self._subject(advice)
        if not path:
            return Outcome("refused", "nothing of it is cached", found=False)
        outcome = self._follow(advice, session, path)
        self.outcomes[outcome.outcome] += 1
        return outcome

    def _subject(self, advice: "Advise") -> tuple[Session | None, list[CachedBlock]]:
        """The session that advice is on, if it is on one, and the cached blocks, the last one first."""
        name = advice.parent if advice.kind == "fork" and advice.parent else advice.session
        if name:
            session = self._sessions.get((advice.key, advice.cache_salt, name))
        elif advice.request_id:
            newest = reversed(self._sessions.values())
            session = next(
                (one for one in newest if (one.key, one.request_id) == (advice.key, advice.request_id)), None
            )
        else:
            tree, keys = self._kv.pool.tree, block_keys(advice.tokens, self._kv.block_size)
            return None, tree.walk(tree.root_of(advice.cache_salt), keys)[::-1]
        last = session.last if session is not None else None
        return session, [node for node in ancestors(last) if node.num_tiers]

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
            if self._kv.windows:
                return Outcome("refused", "models with several groups of layers have no pins")
            held, until, reason = self._pins.hold(advice.key, path[::-1], seconds, self._now)
            kind: Literal["accepted", "clipped", "refused"] = "clipped" if reason else "accepted"
            return Outcome(kind if held else "refused", reason, held, until if held else 0.0)
        own = [node for node in path if self._is_own(node, advice.key)]
        if not own:
            return Outcome("refused", "other sessions use it too")
        if self._ahead is not None and advice.kind != "willneed":
            self._ahead.forget(path)
        if advice.kind in ("cold", "dontneed"):
            return self._release(self._behind(own[-1]), forget=advice.kind == "dontneed")
        if self._policy is None:
            return Outcome("refused", "this executor evicts the least recently used blocks")
        if self._kv.windows and advice.kind != "end":
            return Outcome("refused", "models with several groups of layers take hints with requests only")
        return self._expect(advice, session, path, own)

    def _expect(
        self, advice: "Advise", session: Session | None, path: list[CachedBlock], own: list[CachedBlock]
    ) -> Outcome:
        """Follow advice on when the blocks ``own`` of a path are used again, or not."""
        due = -1.0
        if advice.kind == "end":
            if not self._believes_ends(advice.key):
                return Outcome("refused", "most sessions of this API key have returned after their ends")
            prediction, due = ENDED, _END_SECONDS
            self._pins.release(advice.key, own)
            self._drop_snapshots(own)
        elif advice.kind == "called":
            if session is None or session.prediction == ENDED or session.due >= 0:
                return Outcome("accepted")
            session.called = True
            prediction, seconds = self._waits(session, advice.tools), -1.0
            own = list(own_blocks(session.last, session.number))
        else:
            seconds = advice.seconds if advice.seconds >= 0 else _FORK_SECONDS
            prediction, due = self._hinted(advice.key, seconds)
        self._predict(own, prediction)
        if self._ahead is not None and advice.kind == "willneed":
            self._ahead.want(path[0], self._now + due)
        if session is not None:
            session.prediction, session.due, session.left = prediction, due, self._now
            session.counted = 0
        return Outcome("accepted", blocks=len(own), seconds=0.0 if prediction == ENDED else max(seconds, 0.0))

    def _behind(self, first: CachedBlock) -> list[CachedBlock]:
        """A session's first own block and all blocks behind it, the last ones first. No other session has used these
        blocks: the session's turns had them, and some turns have left them."""
        nodes = [first]
        for node in nodes:  # grows while it is walked: parents come before their children
            nodes += node.children.values()
        return [node for node in reversed(nodes) if node.num_tiers]

    def _release(self, own: list[CachedBlock], *, forget: bool) -> Outcome:
        """Demote blocks, or forget them in all tiers with ids, as far as nothing uses them."""
        if self._kv.windows and not forget:
            return Outcome("refused", "models with several groups of layers demote memory by themselves")
        if forget:
            num_released = sum(release_node(self._kv, node, "advice") for node in own)
        else:
            before = self._kv.num_free
            self.scheduler.plan.copy(self._kv.pool.evict_nodes(own))
            self._demotes, num_released = True, self._kv.num_free - before
        if not num_released:
            return Outcome("refused", "it is in use")
        clipped = num_released < len(own)
        return Outcome("clipped" if clipped else "accepted", "a part is in use" if clipped else "", num_released)
