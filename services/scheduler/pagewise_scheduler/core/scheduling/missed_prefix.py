"""Why a prompt's prefix was not cached when it first ran: evicted, no snapshot, different tokens, or another salt."""

from collections.abc import Iterator, Sequence
from itertools import islice, takewhile
from operator import eq
from typing import Literal

from pagewise_shared.block_hash import is_adapter_salt, without_rope

from pagewise_scheduler.core.memory.eviction_history import LostRun, key_after, key_of, root_key, snapshot_key
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, PrefixTree, block_keys
from pagewise_scheduler.core.requests.request import RequestSequence
from pagewise_scheduler.core.requests.timeline import Divergence, MissedPrefix, NoSnapshot, NoWindow, OtherSalt
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.tiers.snapshots import nearest_pool

_LEAST_TOKENS = 2
_RUNS = 16
_SALTS_TRIED = 256
_COMPARED_BLOCKS = 16
_BLOCKS_BEYOND = 4096
_MOST_UNUSABLE = 1024
"""Cached blocks, the last ones, of which is asked whether a snapshot behind them was lost."""


def find_missed(
    kv: KVCacheManager, sequence: RequestSequence, last_node: CachedBlock | None, path: Sequence[CachedBlock] = ()
) -> MissedPrefix | None:
    """The reason why no more of the prefix of a starting sequence is cached; None: none is known.

    ``last_node``: the last block of it that is cached, in any tier, and behind which a sequence can begin. ``path``: of
    a model with windowed layers, all of its blocks in the prefix tree. Takes a few look-ups, and one for each block
    that is unusable, was evicted or is cached under another salt: less than computing these blocks by orders of
    magnitude.
    """
    size, request = kv.block_size, sequence.request
    usable = 0 if last_node is None else last_node.depth
    unusable = [*takewhile(lambda node: node.num_tiers, path[usable:])]
    found = usable + len(unusable)
    most = (sequence.num_tokens - 1) // size
    missed = MissedPrefix(found * size)
    last_node = unusable[-1] if unusable else last_node
    missed.not_asked = sequence.sampling.prompt_logprobs is not None
    lost = []
    if found < most and not missed.not_asked:
        lost = _look_for_lost(kv, sequence, last_node, missed, range(found, most))
        if kv.eviction_history.num_ghosts and request.computes_for is None and not unusable:
            kv.eviction_history.count_spared(request.params.key, missed.lost, size)
    if unusable:
        missed.no_window = _no_window(kv, sequence.table.due, usable, unusable, lost)
    if missed.not_asked:
        return missed
    if not missed.lost:
        missed.divergence = _divergence(kv, sequence, last_node, found)
        if found < most:
            missed.other_salt = _other_salt(kv.pool.tree, sequence, found, most)
    known = missed.no_window or missed.lost or missed.divergence or missed.other_salt
    return missed if known and request.computes_for is None else None


def _no_window(
    kv: KVCacheManager, due: Sequence[int], usable: int, unusable: Sequence[CachedBlock], lost: Sequence[int]
) -> NoWindow:
    """Report the groups without snapshots behind ``unusable`` blocks, which follow the first ``usable`` blocks of the
    prompt.

    ``due``: where the sequence is to take snapshots. ``lost``: the keys of the lost blocks of the prompt behind them.
    """
    size, history, seen = kv.block_size, kv.eviction_history.lost, unusable[-_MOST_UNUSABLE:]
    groups = [one for one in kv.windows if all(nearest_pool(one, node) is None for node in seen)]
    keys, before = [*map(key_of, seen), *lost], usable + len(unusable) - len(seen)
    kept = next((depth for depth in reversed(due) if before < depth <= before + len(keys)), 0)
    lacking: list[NoSnapshot] = []
    for group in groups or kv.windows:  # else each has snapshots there, but behind different blocks
        kind, run = kv.group_kinds[group.number], None
        for place in range(len(keys), 0, -1):
            if (run := history.find(snapshot_key(keys[place - 1], group.number))) is not None:
                break
        lacking.append(NoSnapshot(kind, (before + place) * size, run) if run is not None else NoSnapshot(kind))
        if run is not None and kept and kept != before + place:
            history.add(snapshot_key(keys[kept - before - 1], group.number), run)  # it is taken again there
    return NoWindow(usable * size, len(unusable) * size, unusable[-1].cached_by, tuple(lacking), kept * size)


def _look_for_lost(
    kv: KVCacheManager, sequence: RequestSequence, last_node: CachedBlock | None, missed: MissedPrefix, blocks: range
) -> list[int]:
    """Look for the blocks that were lost, and return their keys."""
    size, lost = kv.block_size, kv.eviction_history.lost
    key = root_key(sequence.cache_salt) if last_node is None else key_of(last_node)
    runs, keys = dict[LostRun, int](), list[int]()
    for index in blocks:
        key = key_after(key, sequence.tokens_between(index * size, (index + 1) * size))
        run = lost.find(key)
        if run is None or (run not in runs and len(runs) >= _RUNS):
            break
        runs[run] = runs.get(run, 0) + size
        keys.append(key)
    missed.lost = list(runs.items())
    return keys


def _divergence(
    kv: KVCacheManager, sequence: RequestSequence, last_node: CachedBlock | None, found: int
) -> Divergence | None:
    """The place where the prompt differs from the cached prompt that it has the most in common with."""
    tree, size = kv.pool.tree, kv.block_size
    start = found * size
    node = last_node or tree.root_of(sequence.cache_salt)
    rest = sequence.tokens_between(start, min(start + size, sequence.num_tokens - 1))
    if node is None or not node.children or not rest:
        return None
    closest = tree.find_partial(node, rest)
    child, shared = closest or (next(reversed(node.children.values())), 0)
    position = start + shared
    if position < _LEAST_TOKENS or shared == len(rest) // 4:
        return None  # they have nothing in common, or do not differ
    behind = list(islice(_newest_line(child), _BLOCKS_BEYOND + 1))
    theirs, beyond = [one.tokens for one in behind[:_COMPARED_BLOCKS]], len(behind) * size - shared
    mine = memoryview(sequence.tokens_between(position, start + len(theirs) * size)).cast("i")
    other = memoryview(b"".join(theirs)[4 * shared :]).cast("i")
    compared = min(len(mine), len(other))
    return Divergence(position, behind[-1].cached_by, beyond, compared, sum(map(eq, mine, other)))


def _newest_line(node: CachedBlock) -> Iterator[CachedBlock]:
    """A block, and its newest descendants one after the other."""
    yield node
    while node.children:
        node = next(reversed(node.children.values()))
        yield node


def _other_salt(tree: PrefixTree, sequence: RequestSequence, found: int, most: int) -> OtherSalt | None:
    """The salt under which more of the prompt is cached, if there is one among the newest salts."""
    size, salt = tree.block_size, sequence.request.params.cache_salt
    first = sequence.tokens_between(0, size)
    salts = [one for one in islice(tree.newest_salts(), _SALTS_TRIED) if without_rope(one) != salt]
    roots = {one: root for one in salts if (root := tree.root_of(one)) is not None and first in root.children}
    keys = list(block_keys(sequence.tokens_between(0, most * size), size)) if roots else []
    paths = {one: tree.walk(root, keys) for one, root in roots.items()}
    longest = max(paths, key=lambda one: len(paths[one]), default=None)
    path = paths.get(longest, [])
    if len(path) <= found:
        return None
    kind: Literal["salt", "adapter"] = "adapter" if _differ_by_adapter(without_rope(longest), salt) else "salt"
    return OtherSalt(len(path) * size, kind, path[-1].cached_by)


def _differ_by_adapter(one: str | None, other: str | None) -> bool:
    return (is_adapter_salt(one) or is_adapter_salt(other)) and _without_adapter(one) == _without_adapter(other)


def _without_adapter(salt: str | None) -> str | None:
    if salt is None or not is_adapter_salt(salt):
        return salt
    return salt.partition("/")[2] or None
