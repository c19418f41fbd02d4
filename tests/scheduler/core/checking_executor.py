"""An executor made of dicts that keeps, for every KV slot, which prefix was written there, and checks every read.

It follows ``docs/wire-protocol.md`` literally and breaks loudly on a plan that would corrupt memory. Loads are slow on
purpose: they read the host and write the device only when ``finish_copies`` is called.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pagewise_scheduler.core.tiers.arena import ArenaShape
from pagewise_shared.block_hash import ONE_ROPE, BlockHash, block_hash, unpack_names
from pagewise_shared.protocol import (
    DEVICE,
    HASH_TIERS,
    HOST,
    BlockCopies,
    Copied,
    SegmentMove,
    StepPlan,
    StepResult,
    TokenLogprobs,
    pack_float32s,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import num_accepted
from pagewise_shared.segments import MOVED, TOKEN_ID

Content = dict[int, tuple[bytes, tuple[int, ...]]]
"""By slot of a block: where the chain of block hashes begins, and all tokens up to this one."""


FEW_TOKENS = 2
"""The vocabulary of a model that repeats itself."""

repeats_itself = False
"""Whether the model draws from few tokens, so that drafts are right now and then."""


def next_token(tokens: tuple[int, ...], vocab_size: int = 0) -> int:
    """The model: a pure function of all tokens so far."""
    return hash(tokens) % (vocab_size or (FEW_TOKENS if repeats_itself else 1000))


def next_candidates(tokens: tuple[int, ...], count: int, vocab_size: int = 1000) -> list[tuple[int, float]]:
    """The likeliest next tokens with their log-probabilities; the first is ``next_token``."""
    first = next_token(tokens, vocab_size)
    logprobs = array("f", [-0.3 * (i + 1) - (first % 13) / 50 for i in range(count)])  # rounded as they are sent
    return [((first + 7 * i) % vocab_size, logprob) for i, logprob in enumerate(logprobs)]


def pairs(data: bytes) -> list[tuple[int, int]]:
    """Pairs of an int32 list."""
    values = unpack_int32s(data).tolist()
    return list(zip(values[::2], values[1::2], strict=True))


@dataclass
class Row:
    tokens: list[int]
    computed: int
    blocks: list[int]
    root: bytes
    logprobs: int | None = None
    limit: int = ONE_ROPE
    windows: list[dict[int, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)  # the block that is written, by group
    switches: dict[tuple[int, int], int] = field(default_factory=dict)  # by group and token


class CheckingExecutor:
    """``num_blocks``: of each tier. ``tiers``: the contents of their blocks. ``spoil``: host blocks whose next load is
    reported bad; ``spoilt_windows``: of groups of windowed layers. ``unkept``: host blocks in which nothing is kept.
    ``elapsed_us``: the reported time of copies.

    ``early_loads``: blocks are loaded as soon as a plan's order allows, and not only on request. ``peers``: others that
    it fetches from, by endpoint; ``epoch``: under which it lends. ``storage``: the contents of storage, which others
    may share. ``full``: nothing is written there. ``in_flight``: returns the steps without a result so far. Copies do
    not wait for them: no load may overwrite blocks that they use, and no block that they write may be stored.
    ``shape``: of the device memory of several groups, with ``host_pages`` pages below it. ``mapped``: the tiers, groups
    and blocks that have pages, each with its number of pages. A block that is unmapped loses its content.
    """

    def __init__(
        self, num_blocks: Mapping[int, int], block_size: int, shape: ArenaShape | None = None, host_pages: int = 0
    ) -> None:
        self.shape, self.window_shapes = shape, shape.windows if shape is not None else ()
        self.num_pages = {DEVICE: shape.num_pages if shape is not None else 0, HOST: host_pages}
        self.num_blocks = {HOST: 0, **num_blocks}
        self.block_size = block_size
        self.spoil: set[int] = set()
        self.unkept: set[int] = set()
        self.spoilt_windows: set[int] = set()
        self.short_rope_len = ONE_ROPE
        self.kinds: dict[bytes, bool] = {}  # of roots: whether KV behind them has the long factors of LongRoPE
        self.elapsed_us = 100
        self.early_loads = False
        self.peers: dict[str, CheckingExecutor] = {}
        self.epoch = 1
        self.storage: dict[BlockHash, Content] = {}
        self.stored_windows: dict[tuple[BlockHash, int], Content] = {}
        self.full = False
        self.in_flight: Callable[[], set[int]] = set
        self.most_mapped = 0
        self.reset()

    def reset(self, epoch: int = 1, *, keeps_blocks: bool = False) -> None:
        self.mapped: dict[tuple[int, int, int], int] = {}
        if keeps_blocks:
            for group, by_tier in enumerate(self.inventory()):
                for tier in (DEVICE, HOST) if self.shape is not None else ():
                    held, kept = self._held(tier, group), set(by_tier.get(tier, {}).values())
                    self._map(group, kept, tier)
                    for block in held.keys() - kept:  # it has no pages any more
                        del held[block]
        else:
            self.tiers: dict[int, dict[int, Content]] = {tier: {} for tier in self.num_blocks}
            self.windowed: list[dict[int, Content]] = [{} for _ in self.window_shapes]
            self.windowed_on_host: list[dict[int, Content]] = [{} for _ in self.window_shapes]
        self.epoch = epoch
        self.rows: dict[int, Row] = {}
        self._unmapped: dict[tuple[int, int, int], Content] = {}  # by the present plan
        self.decoding: dict[int, None] = {}
        self.last_step = 0
        self.touched: dict[int, set[int]] = {}  # by each step in flight
        self.written: dict[int, set[int]] = {}
        self.copying: list[tuple[StepPlan, BlockCopies]] = []  # with the plans that asked for them
        self.num_unmapped = 0
        self.num_windows_loaded = self.num_windows_stored = 0
        self.num_fetched = self.num_drafted = self.num_accepted = 0
        self.num_computed = self.num_moved = self.num_stored = self.num_loaded = self.num_written = (
            self.num_recalled
        ) = 0

    @property
    def blocks(self) -> dict[int, Content]:
        return self.tiers[DEVICE]

    @property
    def host(self) -> dict[int, Content]:
        return self.tiers[HOST]

    @property
    def arriving(self) -> set[int]:
        """Blocks of the device that copies are under way to."""
        return self.arriving_in(0)

    def arriving_in(self, group: int) -> set[int]:
        """Blocks of the device, of a group, that copies are under way to."""
        loads = (one for _, one in self.copying if one.target == DEVICE and one.group == group)
        return {target for one in loads for _, target in pairs(one.pairs)}

    # ---- pages ---------------------------------------------------------------------------------------

    def _held(self, tier: int, group: int) -> dict[int, Content]:
        if not group:
            return self.tiers[tier]
        return (self.windowed if tier == DEVICE else self.windowed_on_host)[group - 1]

    def _unmap(self, plan: StepPlan) -> None:
        """Take the pages from blocks. Copies of this plan may still read their contents."""
        self._unmapped.clear()
        changes = unpack_int32s(plan.unmapped).tolist()
        for key in zip(changes[::3], changes[1::3], changes[2::3], strict=True):
            tier, group, block = key
            self.num_unmapped += tier == DEVICE
            self.mapped.pop(key, None)
            self._unmapped[key] = self._held(tier, group).pop(block, {})

    def _map(self, group: int, blocks: Iterable[int], tier: int = DEVICE) -> None:
        """A plan names blocks to be written or read: blocks without pages get some."""
        if self.shape is None:
            return
        pages = self.shape.windows[group - 1].pages_per_block if group else self.shape.pages_per_block
        for block in blocks:
            assert 0 <= block < self.num_pages[tier] // pages
            self.mapped.setdefault((tier, group, block), pages)
        mapped = sum(pages for (lies, *_), pages in self.mapped.items() if lies == tier)
        assert mapped <= self.num_pages[tier], "there are too few pages"
        self.most_mapped = mapped if tier == DEVICE else self.most_mapped

    def _source(self, tier: int, group: int, block: int) -> Content:
        """The content of a block that a copy of the present plan reads."""
        if (tier, group, block) in self._unmapped:
            return self._unmapped[tier, group, block]
        assert self.shape is None or (tier, group, block) in self.mapped, "the source of a copy has no pages"
        return self._held(tier, group).get(block, {})

    # ---- steps ---------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        live = self.in_flight() - {plan.step}
        for blocks in (self.touched, self.written):
            for step in blocks.keys() - live:
                del blocks[step]
            blocks[plan.step] = set()
        self._unmap(plan)
        inside = [one for one in plan.copies if one.peer is None and one.source == one.target == DEVICE]
        read = [[dict(self._source(DEVICE, one.group, block)) for block, _ in pairs(one.pairs)] for one in inside]
        for copies in plan.copies:
            if copies not in inside:
                self._check_copies(plan.step, copies)
                self._copy(plan, copies)
            if copies.target in (DEVICE, HOST):
                self._map(copies.group, (target for _, target in pairs(copies.pairs)), copies.target)
            for _, target in pairs(copies.pairs) if copies.target == HOST else ():
                self._unmapped.pop((HOST, copies.group, target), None)
        for copies, contents in zip(inside, read, strict=True):
            self._held(DEVICE, copies.group).update(
                zip((target for _, target in pairs(copies.pairs)), contents, strict=True)
            )
        self._unmapped.clear()
        for row in plan.left:
            del self.rows[row]
            self.decoding.pop(row, None)
        for new in plan.joined:
            assert new.row not in self.rows
            self.rows[new.row] = Row(
                unpack_int32s(new.tokens).tolist(),
                new.num_computed_tokens,
                unpack_int32s(new.blocks).tolist(),
                new.root,
                new.sampling.logprobs,
            )
            self.rows[new.row].windows = [
                dict(enumerate(unpack_int32s(blocks).tolist(), first)) for first, blocks in new.windows
            ]
            self.rows[new.row].ends = [first + len(blocks) // 4 for first, blocks in new.windows]
            self._check_windows(self.rows[new.row])
            for group, table in enumerate((new.blocks, *(held for _, held in new.windows))):
                self._map(group, unpack_int32s(table))
            for group, (token, blocks) in enumerate(new.windows, 1):
                if self.window_shapes[group - 1].state:
                    first, *other = unpack_int32s(blocks).tolist()
                    self.rows[new.row].states[group] = first
                    for block in other:
                        self.rows[new.row].switches[group, token] = block
            known = len(self.rows[new.row].tokens)
            is_long = known > self.short_rope_len
            self.rows[new.row].limit = ONE_ROPE if is_long else self.short_rope_len
            assert self.kinds.setdefault(new.root, is_long) == is_long, "KV of two kinds has one root"
        changes = unpack_int32s(plan.tables).tolist()
        for row, index, block in zip(changes[::3], changes[1::3], changes[2::3], strict=True):
            assert 0 <= block < self.num_blocks[DEVICE]
            assert 0 <= index <= len(self.rows[row].blocks)
            self.rows[row].blocks[index : index + 1] = [block]
            self._map(0, (block,))
        added = unpack_int32s(plan.windows).tolist()
        for row, group, block in zip(added[::3], added[1::3], added[2::3], strict=True):
            ends = self.rows[row].ends
            self.rows[row].windows[group - 1][ends[group - 1]] = block
            ends[group - 1] += 1
            self._map(group, (block,))
        switched = unpack_int32s(plan.states).tolist()
        for row, group, token, block in zip(*(switched[at::4] for at in range(4)), strict=True):
            assert token >= self.rows[row].computed
            self.rows[row].switches[group, token] = block
            self._map(group, (block,))
        for row_held in self.rows.values():
            assert not self.shape or all((DEVICE, 0, block) in self.mapped for block in row_held.blocks), (
                "it has no pages"
            )
            assert len(row_held.blocks) == len(set(row_held.blocks)), "a block is in a table twice"
        self.holders = Counter(block for row in self.rows.values() for block in row.blocks)
        for row, computed in plan.computed:
            assert computed >= self.rows[row].computed
            self.rows[row].computed = computed
            self._check(self.rows[row])
        for move in plan.moves:
            self._move(move)
        rows = [row for row in self.decoding if row not in dict(plan.drafts)]
        sampled = [self._compute(self.rows[row], 1) for row in rows]
        for row, tokens in plan.drafts:
            assert row in self.decoding
            drawn = self._verify(self.rows[row], unpack_int32s(tokens).tolist())
            sampled += drawn
            rows += [row] * len(drawn)
        for row, size in plan.chunks:
            assert size > 0
            assert row not in self.decoding
            self._compute(self.rows[row], size, append=False)
            if self.rows[row].computed == len(self.rows[row].tokens):
                self.decoding[row] = None
                self.rows[row].tokens.append(next_token(tuple(self.rows[row].tokens)))
                sampled.append(self.rows[row].tokens[-1])
                rows.append(row)
        logprobs = tuple(
            self._logprobs(index, self.rows[row])
            for index, row in enumerate(rows)
            if self.rows[row].logprobs is not None
        )
        proposed = self._proposed(plan, {row for row, _ in plan.chunks} | set(rows))
        return StepResult(
            epoch=plan.epoch, step=plan.step, tokens=pack_int32s(sampled), logprobs=logprobs, proposed=proposed
        )

    def _proposed(self, plan: StepPlan, computing: set[int]) -> bytes:
        """Drafts of a draft model that is often right, and sometimes proposes less than it is asked for."""
        asked = pairs(plan.proposals)
        assert len(dict(asked)) == len(asked)
        proposed: list[int] = []
        for row, count in asked:
            assert row in computing
            assert not count or row in self.decoding
            tokens = self.rows[row].tokens
            assert not count or self.rows[row].computed == len(tokens) - 1
            made: list[int] = []
            for _ in range(count):
                chance = hash((*tokens, *made, 7)) % 8 if not made or made[-1] >= 0 else 0
                right = next_token((*tokens, *made)) if chance else -1
                made.append(right + (chance == 1))
            proposed += made
        return pack_int32s(proposed)

    def _logprobs(self, index: int, row: Row) -> TokenLogprobs:
        candidates = next_candidates(tuple(row.tokens[:-1]), max(1, row.logprobs or 0))
        ids, values = zip(*candidates, strict=True)
        return TokenLogprobs(index, row.tokens[-1], values[0], 1, pack_int32s(ids), pack_float32s(values))

    def finish_copies(self, count: int = 1_000_000) -> list[Copied]:
        """Make the oldest copies that are under way and tell of them."""
        done, self.copying = self.copying[:count], self.copying[count:]
        messages = []
        for plan, copies in done:
            bad: list[int] = []
            if copies.target in HASH_TIERS:
                bad = [target for _, target in pairs(copies.pairs)] if self.full else []
            elif copies.peer is not None:
                bad = self._fetch(copies)
            elif copies.source in HASH_TIERS:
                bad = self._recall(copies)
            elif copies.target == DEVICE:
                bad = self._load(copies)
            elif not copies.group:
                bad = [target for _, target in pairs(copies.pairs) if target in self.unkept]
            peer = copies.peer.endpoint if copies.peer is not None else ""
            told = (copies.source, copies.target, peer, self.elapsed_us, pack_int32s(bad))
            messages.append(Copied(plan.epoch, plan.step, *told, group=copies.group))
        return messages

    def _load(self, copies: BlockCopies) -> list[int]:
        """Copy blocks to the device; returns the bad blocks."""
        bad, corrupt = [], set()
        spoil = self.spoilt_windows if copies.group else self.spoil
        for source, target in pairs(copies.pairs):
            if copies.source == HOST and source in spoil:
                bad.append(target)
                corrupt.add(source)
            elif not self.early_loads:
                content = self._held(copies.source, copies.group)[source]
                self._held(DEVICE, copies.group)[target] = dict(content)
            self.num_loaded += not copies.group
            self.num_windows_loaded += copies.group > 0
        spoil -= corrupt
        return bad

    def _fetch(self, copies: BlockCopies) -> list[int]:
        """Copy a peer's blocks as they are now; returns the own blocks that stay empty."""
        assert copies.peer is not None
        peer = self.peers.get(copies.peer.endpoint)
        if peer is None or peer.epoch != copies.peer.epoch:
            return [target for _, target in pairs(copies.pairs)]
        assert peer.last_step >= copies.peer.step
        for source, target in pairs(copies.pairs):
            held = peer._held(copies.source, copies.group)
            assert source in held, (copies.source, source)
            assert peer.shape is None or (copies.source, copies.group, source) in peer.mapped
            content = held[source]
            assert len(content) == self.block_size, "a block that is not full is lent"
            self._held(DEVICE, copies.group)[target] = dict(content)
            self.num_fetched += 1
        return []

    def _recall(self, copies: BlockCopies) -> list[int]:
        """Copy blocks from storage; returns the missing blocks."""
        bad, names, group = [], unpack_names(copies.names), copies.group
        for index, target in pairs(copies.pairs):
            name = names[index].hash
            content = self.stored_windows.get((name, group)) if group else self.storage.get(name)
            if content is None:
                bad.append(target)
            else:
                self._held(DEVICE, group)[target] = dict(content)
                self.num_recalled += 1
        return bad

    def _write(self, copies: BlockCopies) -> None:
        names, group = unpack_names(copies.names), copies.group
        for source, index in pairs(copies.pairs):
            assert copies.source != DEVICE or source not in self.arriving_in(group)
            content, name = self._source(copies.source, group, source), names[index]
            (known_as,) = self._named({source: content})
            tokens = content[self.block_size - 1][1]
            assert name.hash == known_as == block_hash(name.parent, pack_int32s(tokens[-self.block_size :]))
            if not self.full:
                if group:
                    self.stored_windows[name.hash, group] = dict(content)
                else:
                    self.storage[name.hash] = dict(content)
                self.num_written += 1

    def inventory(self) -> list[dict[int, dict[BlockHash, int]]]:
        """The names of the full blocks of each group, in each tier."""
        named: list[dict[int, dict[BlockHash, int]]] = []
        for group in range(1 + len(self.window_shapes)):
            arriving = self.arriving_in(group)
            device = {block: held for block, held in self._held(DEVICE, group).items() if block not in arriving}
            lower = {tier: self._held(tier, group) for tier in (self.tiers if not group else (HOST,)) if tier != DEVICE}
            named.append({tier: self._named(held) for tier, held in ({DEVICE: device} | lower).items()})
        return named

    def _named(self, blocks: dict[int, Content]) -> dict[BlockHash, int]:
        names: dict[BlockHash, int] = {}
        for block, content in blocks.items():
            if len(content) < self.block_size:
                continue
            root, tokens = content[self.block_size - 1]
            if len(tokens) % self.block_size or any(
                content[slot] != (root, tokens[: len(tokens) - self.block_size + slot + 1]) for slot in content
            ):
                continue  # the rest of one sequence, which another has overwritten
            name = BlockHash(root)
            for start in range(0, len(tokens), self.block_size):
                name = block_hash(name, pack_int32s(tokens[start : start + self.block_size]))
            names[name] = block
        return names

    def _check_copies(self, step: int, copies: BlockCopies) -> None:
        """Check that no copy needs to wait for a step in flight before ``step``."""
        if copies.group:
            return
        if copies.target == DEVICE and copies.source != DEVICE:
            touched = set().union(*(blocks for number, blocks in self.touched.items() if number != step))
            assert not touched & {target for _, target in pairs(copies.pairs)}, "a step in flight touches this block"
        if copies.source == DEVICE and copies.target not in (DEVICE, *HASH_TIERS):
            written = set().union(*(blocks for number, blocks in self.written.items() if number != step))
            assert not written & {source for source, _ in pairs(copies.pairs)}, "a step in flight writes this block"

    def _copy(self, plan: StepPlan, copies: BlockCopies) -> None:
        """Begin a list of copies. Copies to the device are made on request, the others at once."""
        if copies.peer is None and (copies.source in HASH_TIERS or copies.target in HASH_TIERS):
            if copies.target in HASH_TIERS:
                self._write(copies)
            self.copying.append((plan, copies))
            return
        for source, target in pairs(copies.pairs):
            assert copies.group or 0 <= target < self.num_blocks[copies.target]
            if copies.peer is None:
                assert self._source(copies.source, copies.group, source)
                assert copies.group or copies.source != DEVICE or source not in self.arriving
        if copies.target != DEVICE:
            self._store(copies)
        elif copies.peer is None and self.early_loads:
            for source, target in pairs(copies.pairs):
                content = self._source(copies.source, copies.group, source)
                self._held(DEVICE, copies.group)[target] = dict(content)
        self.copying.append((plan, copies))

    def _store(self, copies: BlockCopies) -> None:
        """Copy blocks to a lower tier: all sources are read before any target is written, and of several sources of one
        target the last counts."""
        group = copies.group
        read = {
            source for _, other in self.copying
            if _loads_from(other, copies.target) and other.group == group for source, _ in pairs(other.pairs)
        }  # fmt: skip
        taken = [(target, dict(self._source(copies.source, group, source))) for source, target in pairs(copies.pairs)]
        for target, content in taken:
            assert target not in read, "a block is written that is being loaded"
            assert len(content) == self.block_size, "a block that is not full leaves its tier"
            self.num_stored += not group
            self.num_windows_stored += group > 0
        self._held(copies.target, group).update(taken)

    def _move(self, move: SegmentMove) -> None:
        """Move a part of a segment: its original has to be in the planned blocks, and its targets must be the row's."""
        row, blocks = self.rows[move.row], unpack_int32s(move.blocks)
        arriving, size = self.arriving, self.block_size
        begin = move.start
        while row.tokens[begin] & TOKEN_ID == row.tokens[begin] - (row.tokens[begin] & MOVED):
            begin -= 1  # to the first token of the segment, which has a mark of its own
        root = begin - move.distance
        plain = [token & TOKEN_ID for token in row.tokens]
        for position in range(move.start, move.stop):
            assert row.tokens[position] & MOVED
            at = position - move.distance
            source = self.blocks[blocks[at // size - move.first]]
            self.touched[self.last_step].add(blocks[at // size - move.first])
            assert blocks[at // size - move.first] not in arriving
            expected = (row.root, (*plain[:root], *plain[begin : position + 1]))
            assert source.get(at % size) == expected, f"no original: {source.get(at % size)} instead of {expected}"
            block = row.blocks[position // size]
            assert self.holders[block] == 1, "a shared block is written"
            assert block not in arriving, "a block is written that is being loaded"
            self.blocks.setdefault(block, {})[position % size] = (row.root, tuple(row.tokens[: position + 1]))
            self.num_moved += 1

    def _compute(self, row: Row, size: int, append: bool = True, drafted: bool = False) -> int:
        assert row.computed + size <= min(len(row.tokens), row.limit)
        arriving = self.arriving
        for position in range(row.computed, row.computed + size):
            if row.tokens[position] & MOVED:
                continue  # its content is checked below
            self.num_computed += 1
            self._compute_windows(row, position, drafted=drafted)
            block = row.blocks[position // self.block_size]  # IndexError: the plan gave it no block
            self.written[self.last_step].add(block)
            assert self.holders[block] == 1, "a shared block is written"
            assert block not in arriving, "a block is written that is being loaded"
            self.blocks.setdefault(block, {})[position % self.block_size] = (
                row.root,
                tuple(row.tokens[: position + 1]),
            )
        row.computed += size
        self.touched[self.last_step].update(row.blocks[: -(-row.computed // self.block_size)])
        self._check(row)
        if append:
            row.tokens.append(next_token(tuple(row.tokens)))
        return row.tokens[-1]

    def _check_windows(self, row: Row) -> None:
        """Check the blocks of a row that joins: an inventory may name those whose tokens are computed."""
        for shape, held, table in zip(self.window_shapes, self.windowed, row.windows, strict=True):
            for index, block in table.items() if not shape.state else ():
                if (end := (index + 1) * self.block_size) <= row.computed:
                    expected = row.root, tuple(row.tokens[:end])
                    assert held[block][self.block_size - 1] == expected, (
                        "a window counts as computed before it is there"
                    )

    def _compute_windows(self, row: Row, position: int, *, drafted: bool) -> None:
        """Write a token into the windowed layers, and check that it finds the tokens that it sees. States of a draft
        are written when its right part is known."""
        size = self.block_size
        for group, (shape, held, table) in enumerate(
            zip(self.window_shapes, self.windowed, row.windows, strict=True), 1
        ):
            if shape.state:
                if not drafted:
                    self._compute_state(row, position, group, held)
                continue
            block = table[position // size]
            assert block not in self.arriving_in(group), "a windowed block is written that is being loaded"
            first = position // shape.window * shape.window if shape.chunked else max(0, position - shape.window + 1)
            held.setdefault(block, {})[position % size] = (row.root, tuple(row.tokens[: position + 1]))
            for seen in range(first, position + 1):
                found = held[table[seen // size]][seen % size]
                assert found == (row.root, tuple(row.tokens[: seen + 1])), "this windowed block holds something else"

    def _compute_state(self, row: Row, position: int, group: int, held: dict[int, Content]) -> None:
        """Continue from the states behind the tokens before, and write the states behind this one.

        The states behind the last token of a full block are kept as the block of these tokens is elsewhere.
        """
        size, before = self.block_size, row.states[group]
        assert before not in self.arriving_in(group), "states are read that are being loaded"
        if position:
            last = held[before][(position - 1) % size]
            assert last == (row.root, tuple(row.tokens[:position])), "these are other states"
        row.states[group] = block = row.switches.pop((group, position), before)
        others = [one for one in self.rows.values() if one is not row]
        written = {one.states.get(group) for one in others}
        written.update(to for one in others for key, to in one.switches.items() if key[0] == group)
        assert block not in written, "states are written that another row reads or writes"
        stop = position + 1
        begin = stop - size if stop % size == 0 else position
        held[block] = {at % size: (row.root, tuple(row.tokens[: at + 1])) for at in range(begin, stop)}

    def _verify(self, row: Row, draft: list[int]) -> list[int]:
        """Compute a draft too, and draw behind each of its tokens. Rejected tokens stay in the slots."""
        assert draft
        known = len(row.tokens)
        row.tokens += draft
        self._compute(row, 1 + len(draft), append=False, drafted=True)
        drawn = [next_token(tuple(row.tokens[:stop])) for stop in range(known, len(row.tokens) + 1)]
        accepted = num_accepted(draft, drawn)
        row.tokens[known:] = drawn[: accepted + 1]
        row.computed = known + accepted
        for group, (shape, held) in enumerate(zip(self.window_shapes, self.windowed, strict=True), 1):
            for position in range(known - 1, row.computed) if shape.state else ():
                self._compute_state(row, position, group, held)
        self.num_drafted += len(draft)
        self.num_accepted += accepted
        return drawn

    def _check(self, row: Row) -> None:
        """Each block of the row's table has the tokens that the row has computed or loaded."""
        for position in range(row.computed):
            held = self.blocks[row.blocks[position // self.block_size]][position % self.block_size]
            assert held == (row.root, tuple(row.tokens[: position + 1])), "this block holds something else"


def _loads_from(copies: BlockCopies, tier: int) -> bool:
    return copies.peer is None and copies.source == tier and copies.target == DEVICE
