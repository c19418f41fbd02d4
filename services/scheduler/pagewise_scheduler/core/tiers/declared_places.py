"""Snapshots at the places that a request declares, beside those that its prompt takes anyway.

A declared place is where other prompts are expected to go on differently: the end of the system prompt and of tools, a
cache breakpoint of the client, or the end of what prompts of one ``prompt_cache_key`` have in common. So the second
prompt begins there already. Without it, the second prompt would show the place, and the third one would begin there.
"""

from bisect import insort
from collections.abc import Sequence

from pagewise_scheduler.core.memory.block_table import BlockTable, StateTable
from pagewise_scheduler.core.tiers.states import StateGroup
from pagewise_scheduler.core.tiers.windows import WindowGroup

LEAST_TOKENS = 64
"""Tokens between a declared place and others: a snapshot that saves fewer is not worth its memory."""


def add_declared(table: BlockTable, begin: int, places: Sequence[int], groups: Sequence[WindowGroup]) -> None:
    """Add declared places to those where a prompt takes snapshots.

    ``begin``: its cached blocks. ``places``: as of ``Request``. The last place replaces the one that was chosen near
    the prompt's end, if both are near each other: the client knows better. Others that are near are left out.
    """
    size, due, added = table.block_size, table.due, list[int]()
    has_states = any(isinstance(group, StateGroup) for group in groups)
    depths, least = sorted({place // size for place in places}), -(-LEAST_TOKENS // size)
    for depth in (depth for depth in reversed(depths) if depth - begin >= least):
        near = [one for one in due if abs(one - depth) < least]
        if not near:
            insort(due, depth)
            added.append(depth * size)
        elif has_states and depth == depths[-1] and near == due[-1:] and due[-1] in table.tails:
            table.tails[depth] = table.tails.pop(due[-1]) + due[-1] - depth
            due[-1] = depth
    for one in table.windows:
        if isinstance(one, StateTable):
            one.declared = added
