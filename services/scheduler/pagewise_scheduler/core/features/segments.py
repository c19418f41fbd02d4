"""The KV of segments: it has blocks of its own, the *original*, and is moved from there to each place of the segment.

An original is an ordinary prefix: the tokens of the root and of the segment, and padding to the end of a block. So it
is in the prefix tree, and is shared, evicted, demoted, fetched and stored like any other. If an original is not cached,
a request of the feature's own computes it before the sequence starts. Whether it was found or computed, the sequence
holds references on its blocks until its moves have been planned.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from pagewise_shared.protocol import SegmentMove, pack_int32s
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.segments import Segment, furthest, original_tokens

from pagewise_scheduler.core.features.feature import Feature
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree, block_keys
from pagewise_scheduler.core.requests.request import FinishReason, Request, RequestSequence, SequenceStatus

if TYPE_CHECKING:
    from pagewise_scheduler.core.scheduling.scheduler import Scheduler

_EARLIER = 1e-4
"""Seconds by which requests that compute originals go before the sequences that wait for them."""
_MOST_AT_ONCE = 16
"""The most originals of a sequence that wait to be computed or are being computed at a time."""
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(slots=True, eq=False)
class _Original:
    """The original of some segments of one sequence that have the same tokens.

    Fields:
        segment: one of them. keys: the tokens of each block behind the full blocks of the root.
        blocks: these blocks, referenced for the sequence; empty until they are computed.
        request: the request that computes it. found: it was cached already.
    """

    segment: Segment
    keys: list[bytes]
    blocks: list[int] = field(default_factory=list)
    request: Request | None = None
    found: bool = False


@dataclass(slots=True, eq=False)
class _Prepared:
    """The originals that a sequence needs, by its segments.

    Fields:
        moves_left: segments that are still to be moved, in order.
        root: the tokens of each full block of the root. root_blocks: these blocks, referenced as long as any original
            is held.
    """

    originals: dict[Segment, _Original]
    moves_left: list[Segment]
    root: list[bytes]
    root_blocks: list[int] = field(default_factory=list)

    @property
    def distinct(self) -> list[_Original]:
        return list(dict.fromkeys(self.originals.values()))


class Segments(Feature):
    """The originals of all sequences of one executor that wait for them or hold them.

    ``requests``: waiting and running requests that compute originals. ``num_moved``: tokens whose KV was moved.
    ``num_wanted``: tokens of segments that sequences started with; ``num_found``: how many of them had their original
    cached. ``num_requests``: requests for originals; ``num_withdrawn``: how many of them were withdrawn.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        super().__init__(scheduler)
        self.num_moved = self.num_wanted = self.num_found = self.num_requests = self.num_withdrawn = 0
        self._kv = scheduler.kv
        self._waiting = scheduler.waiting
        self._plan = scheduler.plan
        self._prepared: dict[RequestSequence, _Prepared] = {}
        self._draft: tuple[RequestSequence, int, _Prepared] | None = None
        self._moved: list[int] = []

    @property
    def num_held(self) -> int:
        """The number of references on blocks of originals."""
        held = sum(len(prepared.root_blocks) for prepared in self._prepared.values())
        return held + sum(len(one.blocks) for prepared in self._prepared.values() for one in prepared.distinct)

    def num_slots(self, segments: Sequence[Segment]) -> int:
        """The most slots that all originals of a prompt's segments take together, beside the prompt itself."""
        size, blocks = self._kv.block_size, 0
        for segment in segments:
            if segment.moved < segment.stop:
                # The root's blocks are shared. A request for an original computes one token more.
                blocks += self._kv.blocks_for(segment.num_original_tokens) - segment.root // size + 1
        return (blocks + segments[0].root // size) * size if segments else 0

    def longest_original(self, segments: Sequence[Segment]) -> int:
        """The most tokens of a request that computes an original of these segments."""
        size = self._kv.block_size
        moved = (one.num_original_tokens for one in segments if one.moved < one.stop)
        return max((self._kv.blocks_for(length) * size + 1 for length in moved), default=0)

    # ---- before a sequence starts --------------------------------------------------------------------

    def entered(self, request: Request) -> None:
        # A peer may have a longer prefix of a sequence, with segments in their places, while their originals are not
        # here. If fetching it takes less time than computing, it is fetched before the sequence starts: otherwise the
        # sequence would wait for originals that it then does not need.
        for sequence in request.sequences:
            if sequence.finished:
                continue
            prefix, start = self.scheduler.prefilling.admission.cached_prefix(sequence)
            plan = self.scheduler.recoveries.planner.choose(prefix, 1.0, sequence)
            if plan.peer is not None and plan.method != "recompute" and self.lacks(sequence, start):
                prefetches = self.scheduler.features.prefetches
                prefetches.want(sequence, plan.end * self._kv.block_size)
                if prefetches not in request.features:
                    request.features = (*request.features, prefetches)

    def is_preparing(self, sequence: RequestSequence) -> bool:
        return sequence in self._prepared

    def is_ready(self, sequence: RequestSequence, num_cached: int) -> bool:
        """Whether the sequence holds the originals of all segments behind its first ``num_cached`` tokens. References
        originals that have been computed meanwhile."""
        if not (needed := _needed(sequence, num_cached)):
            return True
        if (prepared := self._prepared.get(sequence)) is None:
            return False
        if any(segment not in prepared.originals for segment in needed):
            self.release(sequence)  # less of its prefix is cached than before: it has to be prepared anew
            return False
        self._hold_or_compute(sequence, prepared)
        return all(prepared.originals[segment].blocks for segment in needed)

    def prepare(self, sequence: RequestSequence, num_cached: int, room: int) -> bool:
        """Reference the cached originals of the segments that end behind the cached tokens, and compute the others."""
        prepared, last = self._look_up(sequence, num_cached)
        references = self._kv.pool.references
        more = len(prepared.root)
        for original in prepared.distinct:
            path = self._on_device(last, original)
            # A request for an original computes one token more.
            more += len(original.keys) + 1 if path is None else sum(references(node.block) == 0 for node in path)
        if self._kv.blocks_for(sequence.num_tokens) + more > room - self._reserved():
            return False
        self._draft = None
        self._prepared[sequence] = prepared
        self._hold_or_compute(sequence, prepared)
        for original in prepared.distinct:
            original.found = bool(original.blocks)
        return all(original.found for original in prepared.distinct)

    def lacks(self, sequence: RequestSequence, start: int) -> bool:
        """Whether a sequence whose first ``start`` tokens are cached needs originals that are not on the device."""
        if not _needed(sequence, start):
            return False
        prepared, last = self._look_up(sequence, start)
        return any(self._on_device(last, original) is None for original in prepared.distinct)

    def _look_up(self, sequence: RequestSequence, start: int) -> tuple[_Prepared, CachedBlock | None]:
        """The originals behind the first ``start`` tokens of a sequence, and the node behind which they are cached."""
        # A sequence that lacks room asks again in each step: its originals are kept meanwhile.
        if self._draft is None or self._draft[:2] != (sequence, start):
            self._draft = sequence, start, self._originals(sequence, start)
        prepared = self._draft[2]
        return prepared, self._root(sequence, prepared)[0]

    def _originals(self, sequence: RequestSequence, start: int) -> _Prepared:
        size, prompt, needed = self._kv.block_size, sequence.request.prompt_token_ids, _needed(sequence, start)
        first = needed[0].root // size * size
        made: dict[bytes, _Original] = {}
        originals: dict[Segment, _Original] = {}
        for segment in needed:
            content = original_tokens(prompt, segment, size, first).tobytes()
            if content not in made:
                made[content] = _Original(segment, list(block_keys(content, size)))
            originals[segment] = made[content]
        return _Prepared(originals, needed, list(block_keys(prompt[:first].tobytes(), size)))

    def _root(self, sequence: RequestSequence, prepared: _Prepared) -> tuple[CachedBlock | None, list[CachedBlock]]:
        """The node behind which originals are in the tree, None if it is not cached; and the blocks up to there."""
        tree = self._kv.pool.tree
        last = tree.root_of(sequence.request.params.cache_salt)
        path = tree.walk(last, prepared.root)
        if len(path) < len(prepared.root):
            return None, []
        return path[-1] if path else last, path

    @staticmethod
    def _on_device(last: CachedBlock | None, original: _Original) -> list[CachedBlock] | None:
        path = PrefixTree.walk(last, original.keys)
        return path if len(path) == len(original.keys) and path[-1].block >= 0 else None

    def _hold(
        self, prepared: _Prepared, original: _Original, last: CachedBlock | None, root: list[CachedBlock]
    ) -> bool:
        """Reference the blocks of an original, if it is on the device. ``last``, ``root``: from ``_root``."""
        if (path := self._on_device(last, original)) is None:
            return False
        if root and not prepared.root_blocks:
            prepared.root_blocks = [node.block for node in root]
            self._kv.pool.pin(prepared.root_blocks)
        original.blocks = [node.block for node in path]
        self._kv.pool.pin(original.blocks)
        self._need_no_more(original)
        return True

    def _hold_or_compute(self, sequence: RequestSequence, prepared: _Prepared) -> None:
        """Reference the originals that have been computed, and compute some of the others."""
        last, root = self._root(sequence, prepared)
        lacking = [one for one in prepared.distinct if not one.blocks and not self._hold(prepared, one, last, root)]
        room = _MOST_AT_ONCE - sum(one.request is not None for one in lacking)
        for original in lacking:
            if room > 0 and original.request is None:
                room -= 1
                self._compute(sequence, original)

    def _need_no_more(self, original: _Original) -> None:
        """An original need not be computed any more: end its request if it waits. A running request continues, because
        the next plan may have it already."""
        request, original.request = original.request, None
        if request is not None and request.sequences[0].status is SequenceStatus.WAITING:
            self._waiting.take(request.sequences[0], SequenceStatus.FINISHED)
            request.sequences[0].end("abort")
            self._forget(request)
            self.num_withdrawn += 1

    def _forget(self, request: Request) -> None:
        self.requests.pop(request, None)
        for feature in request.features:
            feature.leave(request, max((sequence.last_step for sequence in request.sequences), default=0))
        request.replace_sequences([])  # breaks a cycle: otherwise all its tokens wait for the garbage collector

    def _compute(self, sequence: RequestSequence, original: _Original) -> None:
        """Queue a request that computes an original."""
        self.num_requests += 1
        parent = sequence.request
        tokens = original_tokens(parent.prompt_token_ids, original.segment, self._kv.block_size)
        stored = parent.stored_originals.get(tokens.tobytes(), {}) if parent.stored_originals else {}
        tokens.append(0)  # the last token of a prompt is always computed, and not cached
        original.request = request = Request(
            request_id=f"{parent.request_id}/segment-{self.num_requests}",
            prompt_token_ids=tokens,
            max_tokens=0,
            params=msgspec.structs.replace(parent.params, sampling=_GREEDY, n=1, beam=None, client_request_id=""),
            arrival_time=parent.arrival_time - _EARLIER,
            stored=dict(stored),
            computes_for=sequence,
        )
        request.features = (*self.scheduler.features.of(request), self)
        request.create_sequences()
        self._waiting.arrive(request)
        self.requests[request] = None
        for feature in request.features:
            feature.enter(request)
        (computing,) = request.sequences
        self._kv.restore(request.params.cache_salt, computing.token_bytes)
        computing.table = self._kv.new_table(request.params.cache_salt, parent.ref)
        self._waiting.push(computing)

    def ended(self, sequence: RequestSequence, reason: FinishReason) -> None:
        # A sequence of a client needs its originals no more. A sequence that has computed an original hands it over.
        self.release(sequence)
        request, owner = sequence.request, sequence.request.computes_for
        if owner is None:
            return
        self._forget(request)
        prepared = self._prepared.get(owner)
        for original in prepared.distinct if prepared is not None else ():
            if prepared is not None and original.request is request:
                original.request = None
                if reason == "length":
                    self._hold(prepared, original, *self._root(owner, prepared))

    def _reserved(self) -> int:
        """The number of blocks that waiting sequences with originals have yet to take."""
        reserved = 0
        for sequence, prepared in self._prepared.items():
            if sequence.status is SequenceStatus.WAITING:
                missing = sum(len(one.keys) + 1 for one in prepared.distinct if not one.blocks)
                reserved += self._kv.blocks_for(sequence.num_tokens) + missing
                reserved += 0 if prepared.root_blocks else len(prepared.root)
        return reserved

    def make_room(self) -> bool:
        return self._release_waiting(None)

    def unblock(self) -> bool:
        # If nothing runs, the head of the queue keeps its originals. Otherwise no sequence would ever hold all of its
        # originals: two could take them from each other for ever.
        return self._release_waiting(None if self.scheduler.prefilling else self._waiting.peek())

    def _release_waiting(self, head: RequestSequence | None) -> bool:
        """Release the originals of waiting sequences, except ``head``; they are prepared again later."""
        kept = None if head is None else head.request.computes_for or head
        waiting = [one for one in self._prepared if one.status is SequenceStatus.WAITING and one is not kept]
        for sequence in waiting:
            self.release(sequence)
        return bool(waiting)

    # ---- while it is computed ------------------------------------------------------------------------

    def started(self, sequence: RequestSequence, num_cached: int) -> int:
        prepared = self._prepared.get(sequence)
        if prepared is None:
            return 0
        prepared.moves_left = [one for one in prepared.moves_left if one.stop > num_cached]
        found = 0
        for segment in prepared.moves_left:
            wanted = segment.stop - max(segment.moved, num_cached)
            self.num_wanted += wanted
            found += wanted if prepared.originals[segment].found else 0
        self.num_found += found
        self._release_moved(sequence, prepared)
        return found

    def holds(self, sequence: RequestSequence, num_cached: int) -> bool:
        prepared = self._prepared.get(sequence)
        held = prepared.originals if prepared is not None else {}
        return all(segment in held and held[segment].blocks for segment in _needed(sequence, num_cached))

    def chunk_end(self, sequence: RequestSequence, start: int, end: int, budget: int) -> int:
        # Moved tokens cost nothing of the budget, but a plan moves a bounded number of them.
        if not (segments := sequence.request.segments):
            return end
        return start if self._plan.moves_enough else furthest(segments, start, sequence.num_tokens, budget)

    def add_chunk(self, sequence: RequestSequence, start: int, end: int) -> None:
        prepared = self._prepared.get(sequence)
        if prepared is None:
            return
        size = self._kv.block_size
        for segment in prepared.moves_left:
            first, last = max(segment.moved, start), min(segment.stop, end)
            if first >= last:
                continue
            blocks = prepared.originals[segment].blocks
            before, begin = segment.root // size, (first - segment.distance) // size
            last_block = self._kv.blocks_for(last - segment.distance)
            packed = pack_int32s(blocks[begin - before : last_block - before])
            self._plan.moves.append(SegmentMove(sequence.row, first, last, segment.distance, begin, packed))
            self.num_moved += last - first
        prepared.moves_left = [one for one in prepared.moves_left if one.stop > end]
        self._release_moved(sequence, prepared)

    def _release_moved(self, sequence: RequestSequence, prepared: _Prepared) -> None:
        """Release the originals that have no moves left, after the step that makes the last move (see ``planned``)."""
        kept = {prepared.originals[segment] for segment in prepared.moves_left}
        for original in prepared.distinct:
            if original not in kept:
                self._moved += original.blocks
                # The use of an original that was computed is counted when its request ends.
                if original.found and (pool := self._kv.pool).policy.learns:
                    nodes = filter(None, map(pool.node, original.blocks))
                    pool.policy.used(nodes, sequence.request.ending(()))
        prepared.originals = {segment: prepared.originals[segment] for segment in prepared.moves_left}
        if not prepared.originals:
            self._moved += prepared.root_blocks
            del self._prepared[sequence]

    def planned(self, step: int) -> None:
        # The plan makes the moves. Nothing may overwrite the originals before it has returned, not even copies of this
        # plan, because a plan's copies come before its moves.
        if self._moved:
            blocks, self._moved = self._moved, []
            self._kv.drop(blocks, step)

    def release(self, sequence: RequestSequence, in_flight_step: int | None = None) -> None:
        if self._draft is not None and self._draft[0] is sequence:
            self._draft = None
        if (prepared := self._prepared.pop(sequence, None)) is not None:
            for original in prepared.distinct:
                self._need_no_more(original)
                self._kv.drop(original.blocks, in_flight_step)
            self._kv.drop(prepared.root_blocks, in_flight_step)

    def clear(self) -> None:
        for sequence in list(self._prepared):
            self.release(sequence)
        for request in self.requests:
            request.replace_sequences([])
        self.requests.clear()

    def counts(self) -> dict[str, int]:
        return {
            "segment_tokens_found": self.num_found,
            "segment_tokens_computed": self.num_wanted - self.num_found,
            "segment_moved_tokens": self.num_moved,
        }


def _needed(sequence: RequestSequence, start: int) -> list[Segment]:
    """The segments of a sequence that have moved tokens behind ``start``."""
    return [one for one in sequence.request.segments if one.moved < one.stop and one.stop > start]
