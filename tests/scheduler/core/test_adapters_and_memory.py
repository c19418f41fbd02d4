"""Adapters and everything that moves KV: tiers, peers, preemption, resets, moves, segments, many outputs, beams.

The executors check that whatever a row reads was written under the root of its own adapter, and that its slot holds
that adapter. Adapters with equal content share KV, whatever they are called.
"""

from typing import NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.cost_model import Costs
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_shared.protocol import HOST
from pagewise_shared.sampling import BeamParams

from tests.core_requests import change
from tests.scheduler.core.adapter_fleet import Fleet, adapter, request, segmented
from tests.scheduler.core.driving import check_states, expected_beams, expected_tokens

COSTS = Costs(step=1e-4, token=1e-2, fetch_setup=1e-4, fetch_block=1e-4)
"""Computing a block takes much longer than fetching or loading it."""


class Asked(NamedTuple):
    """A request: its executor, its adapter, and its kind."""

    where: int
    which: int | None
    kind: str
    max_tokens: int


class Event(NamedTuple):
    """Something that happens to an executor, or so many steps of all of them."""

    what: str
    where: int
    steps: int


ASKED = st.builds(
    Asked,
    st.integers(0, 1),
    st.one_of(st.none(), st.integers(0, 3)),
    st.sampled_from(["plain", "plain", "plain", "segmented", "many", "beams"]),
    st.integers(1, 12),
)
EVENTS = st.builds(
    Event, st.sampled_from(["step", "step", "step", "reset", "kill", "abort"]), st.integers(0, 1), st.integers(1, 6)
)


class Pair:
    """Two executors that fetch each other's blocks, with few slots, few blocks and a small host tier."""

    def __init__(self, num_blocks: int) -> None:
        self.directory = PrefixDirectory()
        self.num_blocks = num_blocks
        self.requests: list[Request] = []
        self.names = ["", ""]
        self.nodes = [self._node(where, 0) for where in range(2)]

    def _node(self, where: int, life: int) -> Fleet:
        node = Fleet(1 + where, 1, self.num_blocks, costs=COSTS, tiers={HOST: 12}, recovery="swap", epoch=life + 1)
        node.executor.reset(life + 1)
        self.names[where] = f"node {where}.{life}"
        node.scheduler.recoveries.planner.join(
            self.directory, Peer(self.names[where], "", node.scheduler, lambda: None)
        )
        return node

    def _introduce(self) -> None:
        for node in self.nodes:
            node.executor.peers = dict(zip(self.names, (one.executor for one in self.nodes), strict=True))

    def add(self, asked: Asked) -> None:
        number = len(self.requests)
        now = self.nodes[asked.where].now
        if asked.kind == "segmented":
            made = segmented(number, asked.which, 21, asked.max_tokens, now)
        else:
            made = request(number, asked.which, asked.max_tokens, now)
            made.prompt_token_ids.extend(range(30, 42))
            change(made, n=3 if asked.kind == "many" else 1)
            change(made, beam=BeamParams(2, 1.0, early_stopping=False) if asked.kind == "beams" else None)
        if made.params.adapter is not None and number % 2:  # equal files under another name
            change(made, adapter=adapter(asked.which or 0, path=f"/copies/{asked.which}"))
        self.requests.append(made)
        self.nodes[asked.where].scheduler.add(made)

    def step(self) -> None:
        self._introduce()
        for node in self.nodes:
            node.step()

    def kill(self, where: int, life: int) -> None:
        """One is gone, and is back with nothing; its requests go on at the other one."""
        node, other, name = self.nodes[where], self.nodes[1 - where], self.names[where]
        moving = node.scheduler.release_all()
        node.scheduler.kv.close()
        del self.directory.peers[name]
        other.executor.peers.pop(name, None)
        other.scheduler.peer_lost(name)
        self.nodes[where] = self._node(where, life)
        self.nodes[where].now = node.now
        for one in moving:
            other.scheduler.add(one)

    def happen(self, event: Event, life: int) -> None:
        if event.what == "reset":
            self.nodes[event.where].reset()
        elif event.what == "kill":
            self.kill(event.where, life)
        elif event.what == "abort" and self.requests:
            aborted = self.requests[event.steps % len(self.requests)]
            for node in self.nodes:
                node.scheduler.abort(aborted.request_id)
        for _ in range(event.steps):
            self.step()


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=40)
@given(st.lists(st.tuples(ASKED, EVENTS), min_size=1, max_size=14), st.integers(26, 60))
def test_no_adapter_reads_what_another_one_has_computed(script: list[tuple[Asked, Event]], num_blocks: int) -> None:
    pair = Pair(num_blocks)
    for life, (asked, event) in enumerate(script, 1):
        pair.add(asked)
        pair.happen(event, life)
    for _ in range(3000):
        if not any(node.is_busy for node in pair.nodes):
            break
        pair.step()
    for one in pair.requests:
        assert one.finished, one.request_id
        if any(sequence.finish_reason == "abort" for sequence in one.sequences):
            continue
        outputs = [sequence.output_token_ids.tolist() for sequence in one.sequences]
        assert outputs == (
            expected_beams(one) if one.params.beam is not None else [expected_tokens(one)] * one.params.n
        )
    for node in pair.nodes:
        check_states(node.scheduler.kv.pool)
        assert node.scheduler.kv.pool.num_in_use == 0
        assert node.scheduler.num_waiting == 0
        assert not node.failed
