"""The states of recurrent layers, on the device: the block that a sequence writes, and the ones that it keeps.

A block has the states of all recurrent layers behind one token. A sequence writes into its last block in place. To keep
the states behind a token, it writes to another block from this token on: nothing is copied. The block that it leaves is
a snapshot if that token is the last of a full block in the prefix tree. So decoding keeps the states behind the last
full block at no cost, and a prompt is not cut where it keeps some.

Behind a node a sequence needs one block, as if the layers had a window of two tokens. So snapshots of states are
evicted, loaded, fetched and restored as those of windows are (see ``snapshots``).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise

from pagewise_scheduler.core.memory.block_table import BlockTable, StateTable, WindowTable
from pagewise_scheduler.core.memory.eviction import NUM_ENDINGS
from pagewise_scheduler.core.memory.eviction_history import key_of, snapshot_key
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors
from pagewise_scheduler.core.memory.roles import ANSWER, INSIDE, new_role, place_of, role_after, role_at_end
from pagewise_scheduler.core.tiers.snapshots import Snapshot, nearest_pool
from pagewise_scheduler.core.tiers.tier import BlockCopy, Copies
from pagewise_scheduler.core.tiers.windows import WindowGroup

_MOST_BLOCKS = 4
"""Blocks of a sequence: the one that it writes, the one behind its last full block, and two that steps in flight leave
or that become snapshots."""


class StateGroup(WindowGroup):
    """The device's blocks of the states of one group of recurrent layers."""

    def _limits(self, most_tokens: int) -> tuple[int, int]:
        self._most_tokens = most_tokens
        return 0, _MOST_BLOCKS

    def new_table(self) -> StateTable:
        """An empty table."""
        return StateTable()

    def table_at(self, path: Sequence[CachedBlock], end: int) -> StateTable:
        """The states behind the first ``end`` blocks of a path, without a block if the device does not have them."""
        held = self.blocks_at(path[end - 1]) if 0 < end <= len(path) else None
        return StateTable(blocks=[*(held or ())], tokens=[end * self.block_size] if end else [])

    def can_fork(self, table: WindowTable, num_tokens: int) -> bool:
        """Whether a table has kept the states behind its first ``num_tokens`` tokens."""
        assert isinstance(table, StateTable)
        return num_tokens in table.tokens

    def fork(self, table: WindowTable, num_tokens: int) -> StateTable:
        """The states with which a sequence begins as the first ``num_tokens`` tokens of a table: all that it has
        computed, unless it has kept them."""
        assert isinstance(table, StateTable)
        block = table.blocks[table.tokens.index(num_tokens) if num_tokens in table.tokens else -1]
        return StateTable(blocks=[block], tokens=[num_tokens])

    def begin(self, table: WindowTable) -> Copies:
        """Let a table that has what its sequence begins with have a block to write. Returns copies as ``reserve``."""
        assert isinstance(table, StateTable)
        block, copies = self.reserve(1)
        table.blocks += block
        table.entry = table.tokens[-1] if table.tokens else 0
        return copies

    def copy_last(self, table: WindowTable) -> Copies:
        """Do nothing: what a sequence shares it does not write."""
        return ()

    def num_to_write(self, table: WindowTable) -> int:
        """The blocks that a table needs to write further states: one if it shares its last."""
        last = table.blocks[-1]
        return int(self.users(last) > 1 or self.has_snapshot(last))

    def marks_start(self, table: StateTable, start: int, num_tokens: int) -> bool:
        """Whether a table is to have another block for the tokens from ``start`` to ``num_tokens`` on."""
        if start in table.tokens or table.entry is not None:
            return False
        return (start < num_tokens and start % self.block_size == 0) or self.num_to_write(table) > 0

    def keeps_last(self, table: StateTable, start: int, num_tokens: int, due: Sequence[int]) -> bool:
        """Whether a prompt, in computing the tokens from ``start`` to ``num_tokens``, is to keep the states behind the
        last full block: it goes on, and has blocks for that and for what is ``due`` in these and in the next chunk."""
        size = self.block_size
        # A chunk that ends with a block needs none for that: the next one has it, at its start.
        if not start < num_tokens // size * size < num_tokens or not due or num_tokens >= due[-1] * size:
            return False
        taken = [depth * size for depth in due if start < depth * size and depth not in table.skipped]
        held = len(table.blocks) + self.marks_start(table, start, num_tokens) + bisect_left(taken, num_tokens)
        soon = bisect_left(taken, start + self._most_tokens) - bisect_left(taken, num_tokens)
        # When the next chunk is planned, the tokens before ``start`` are computed, and ``computed`` has dropped some.
        dropped = max(0, bisect_left(table.tokens, start // size * size + 1) - 1)
        return max(held, held - dropped + soon) < self.most_blocks

    def grow(
        self,
        table: WindowTable,
        start: int,
        num_tokens: int,
        in_flight_step: int | None,
        due: Sequence[int],
    ) -> tuple[list[tuple[int, int]], Copies]:
        """Let a table have a block to which the tokens from ``start`` to ``num_tokens`` are written.

        It keeps the states at the end of a full block at ``start``, the states that are ``due`` on the way, and the
        states with which further outputs begin. In a prompt that goes on, the table also keeps the states behind its
        last full block, with which it begins again if it is preempted. If it would have more than ``most_blocks``, it
        gives up states in the order of ``_least``. Returns (token, block) for each block to which states are written
        from a token on, and copies.
        """
        assert isinstance(table, StateTable)
        copies: list[BlockCopy] = []
        size, blocks, tokens = self.block_size, table.blocks, table.tokens
        marks = [depth * size for depth in due if start < depth * size < num_tokens and depth not in table.skipped]
        if self.marks_start(table, start, num_tokens):
            marks.insert(0, start)
        if (last := num_tokens // size * size) not in marks and self.keeps_last(table, start, num_tokens, due):
            marks.append(last)
        most, fork = self.most_blocks, table.fork if start <= table.fork < num_tokens else 0
        # For each further block of tokens, a block of states is available.
        if fork and fork not in (*tokens, *marks) and len(marks) < -(-num_tokens // size) - -(-start // size):
            insort(marks, fork)
            most = self.blocks_for(num_tokens)  # it may be in the first block
        if (excess := len(blocks) + len(marks) - most) > 0:  # admission has counted no more
            given_up = self._least(table, start, marks)[:excess]
            marks = [token for token in marks if token not in given_up]
        switched: list[tuple[int, int]] = []
        for token in marks:
            (block,), made = self.reserve(1)
            copies += made
            tokens.append(token)
            blocks.append(block)
            switched.append((token, block))
        # Beams leave states in the middle of blocks at each step. The step that begins with them reads them last.
        gone = [at for at, token in enumerate(tokens[:-1]) if token % size and token < start and token != table.fork]
        self.drop([blocks[at] for at in gone], in_flight_step)
        for at in reversed(gone):
            del blocks[at], tokens[at]
        if start == num_tokens and switched:  # it joins again with that
            table.entry, switched = start, []
        table.stop = num_tokens if start < num_tokens else table.stop
        return switched, copies

    def _least(self, table: StateTable, start: int, marks: list[int]) -> list[int]:
        """The tokens of ``marks`` that may be given up, in that order: those inside of a prompt, declared ones, the one
        at ``start``, unless others use the block that has its states, and the one for further outputs; of each, the
        ones that save the least."""
        ranks = {depth * self.block_size: 0 for depth in table.inside} | dict.fromkeys(table.declared, 1)
        ranks |= {table.fork: 3, start: 2}  # without those at the start, a preemption loses the chunk before
        if self.num_to_write(table):
            del ranks[start]
        saved = ((token, token - before) for before, token in pairwise([start, *marks]) if token in ranks)
        return [token for token, _ in sorted(saved, key=lambda one: (ranks[one[0]], one[1]))]

    def computed(self, table: WindowTable, known: int, due: Sequence[int]) -> None:
        """Drop what is older than the newest states behind the ``known`` full blocks that are computed, but not what is
        ``due``. The steps that have read them are back."""
        assert isinstance(table, StateTable)
        size = self.block_size
        newest = bisect_left(table.tokens, known * size + 1) - 1
        gone = [index for index in range(newest) if table.tokens[index] // size not in due]
        self.release(table.blocks[index] for index in gone)
        for index in reversed(gone):
            del table.blocks[index], table.tokens[index]

    def ended(self, table: BlockTable) -> None:
        """A sequence has ended: the snapshots on its path have other roles from now on.

        The sequence counts as a use of the last snapshot that an earlier sequence took, even if the snapshot was lost
        meanwhile. If that snapshot was inside of a prompt and lost or skipped, the snapshot before it counts, too.
        """
        policy, is_begun, is_missed, one = self._policy, False, False, table.windows[self.number - 1]
        assert isinstance(one, StateTable)
        for node in ancestors(table.last_node) if policy.learns else ():
            key, returned = snapshot_key(key_of(node), self.number), False
            if known := policy.role(key):
                missing = place_of(known) == INSIDE and nearest_pool(self, node) is None
                returned = not (is_begun or (missing and is_missed))
                role, is_missed, is_begun = role_after(known, begun=returned), missing, is_begun or not missing
            elif (pool := nearest_pool(self, node)) is not None:
                role = role_at_end(pool.at[node].kind, node.kind % NUM_ENDINGS)
            elif node.depth in one.skipped:
                role = role_at_end(new_role(one.skipped[node.depth]), node.kind % NUM_ENDINGS)
            else:
                continue
            if returned or role != known:
                policy.lives(key, role, returned=returned)
            self.has_role(node, role)

    def take_snapshot(self, node: CachedBlock, table: WindowTable, place: int) -> None:
        """Keep the states behind ``node``, if the table has kept them. ``place``: see ``roles``."""
        assert isinstance(table, StateTable)
        token = node.depth * self.block_size
        if node.depth in table.skipped and place != ANSWER:
            return
        if node in self.at:
            self._use(self.at[node])
            return
        # If a step were planned behind ``stop``, it would write elsewhere.
        at = table.tokens.index(token) if token in table.tokens else -1
        if not table.loading and (at >= 0 or token == table.stop):
            snapshot = Snapshot([node], node.depth - 1, [table.blocks[at]], 0)
            snapshot.kind = new_role(place)
            self._counters.snapshots_taken += 1
            self._add(snapshot)

    def skip(self, table: StateTable, depth: int, place: int) -> None:
        """Take no snapshot behind ``depth`` blocks, because other memory is worth more."""
        self._counters.snapshots_skipped += depth not in table.skipped
        table.skipped[depth] = place
