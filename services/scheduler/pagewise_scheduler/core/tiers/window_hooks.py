"""The operations of an executor's KV memory for windowed layers, which do nothing in a model without them."""

from collections.abc import Sequence

from pagewise_shared.protocol import GroupKind

from pagewise_scheduler.core.memory.block_table import BlockTable, CachedPrefix, StateTable
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.core.tiers.tier import Copies, Location
from pagewise_scheduler.core.tiers.windows import WindowGroup


class WindowHooks:
    """The methods that ``GroupedKVCacheManager`` overrides.

    ``windows``: the groups of windowed layers. ``pages_per_block``: of the other layers, 1 if there are no groups.
    """

    windows: tuple[WindowGroup, ...] = ()
    pages_per_block = 1

    @property
    def group_kinds(self) -> tuple[GroupKind, ...]:
        """The kind of content of each group's blocks, by the group's number on the wire."""
        return ("full",)

    def restore_windows(self, path: list[CachedBlock]) -> None:
        """Let sequences begin behind the nodes of ``path`` whose windows are recoverable."""

    def num_to_grow(self, table: BlockTable, count: int) -> int:
        """How many of ``count`` further blocks a table may take at once if it keeps the states at the end of each."""
        states = [pair for pair in zip(self.windows, table.windows, strict=True) if isinstance(pair[1], StateTable)]
        return max(0, min([count, *(group.most_blocks - len(one.blocks) for group, one in states)]))

    def can_fork(self, table: BlockTable, num_tokens: int) -> bool:
        """Whether ``table`` still holds the windows at the end of its first ``num_tokens`` tokens."""
        return True

    def can_begin(self, node: CachedBlock, *, device_only: bool = False) -> bool:
        """Whether some tier has the windows with which a sequence begins behind a node; ``device_only``: the device."""
        return True

    def loaded_to(self, prefix: CachedPrefix, end: int) -> CachedPrefix:
        """The prefix of a sequence that begins behind ``end`` blocks and loads the missing ones: the blocks and the
        windows that the device has. The sequence shares them."""
        return prefix

    def num_lacking_in_windows(self, node: CachedBlock | None, end: int) -> int:
        """How many blocks of full layers have as many bytes as the windows behind ``end`` blocks that the device lacks.

        ``node``: of the last of them, if the prefix tree has it.
        """
        return 0

    def hold_windows(self, node: CachedBlock, groups: Sequence[int]) -> list[list[Location]]:
        """Hold the windows at the end of a node in the tier below the device, of each of ``groups``."""
        return []

    def begin_windows(self, table: BlockTable, held: list[list[Location]]) -> Copies:
        """Let a table that has taken a prefix have blocks for the windows that are loaded, which are ``held``, and for
        the first tokens that its sequence writes. Returns copies as ``grow`` does."""
        return ()

    def num_to_write(self, table: BlockTable) -> int:
        """By how much ``num_available`` falls if a sequence writes into the blocks that it has."""
        return 0

    def expect_snapshots(
        self, table: BlockTable, prefix: CachedPrefix, num_tokens: int, places: Sequence[int] = (), fork: int = 0
    ) -> None:
        """Note where a sequence of ``num_tokens`` tokens, which has taken ``prefix``, is to take snapshots.

        ``places``: that its request declares. ``fork``: the tokens behind which further outputs of its request begin;
        0: there are none.
        """

    def grow_windows(
        self, table: BlockTable, start: int, num_tokens: int, in_flight_step: int | None, ends: Sequence[int] = ()
    ) -> tuple[list[tuple[int, int, int]], Copies]:
        """Let the table hold the windows of the tokens from ``start`` to ``num_tokens``, and drop the blocks before, at
        once or when ``in_flight_step`` returns. A group of states keeps the states at the end of each of ``ends``
        blocks.

        Returns the blocks that were added, each as group, token, block, and copies. ``token``: in a group of states,
        the one from which on states are written to the block; -1 in others.
        """
        return [], ()

    def _free_windows(self, table: BlockTable, in_flight_step: int | None) -> None:
        """Drop the references of a table's windows as ``free`` does."""

    def take_unmapped(self) -> bytes:
        """The blocks that have lost their pages since the last call, as ``GroupedStepPlan.unmapped`` has them."""
        return b""
