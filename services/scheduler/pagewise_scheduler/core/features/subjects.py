"""The blocks that advice is about, by the session, the request or the prompt that it names."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from pagewise_scheduler.core.features.sessions import Session, Sessions
from pagewise_scheduler.core.memory.eviction import CLASSES_PER_USE
from pagewise_scheduler.core.memory.eviction_history import RequestRef
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock, ancestors, block_keys
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager

if TYPE_CHECKING:
    from pagewise_shared.protocol import Advise

_NOT_NEEDED = ("cold", "dontneed", "end")
"""The advice that blocks are not used soon, or not at all."""


def subject(kv: KVCacheManager, sessions: Sessions, advice: "Advise") -> tuple[Session | None, list[CachedBlock]]:
    """Return the session that advice is on, if it is on one, and its blocks, the last one first, cached or not."""
    name = advice.parent if advice.kind == "fork" and advice.parent else advice.session
    if name:
        session = sessions.find(advice.key, advice.cache_salt, name)
        return session, [*ancestors(session.last if session is not None else None)]
    if advice.request_id:
        last = sessions.last_of(advice.key, advice.request_id)
        session = sessions.numbered(last.session) if last is not None else None
        is_last = session is not None and session.request_id == advice.request_id
        return session if is_last else None, [*ancestors(last)]
    tree, keys = kv.pool.tree, [*block_keys(advice.tokens, kv.block_size)]
    path = tree.walk(tree.root_of(advice.cache_salt), keys)
    if advice.kind == "willneed":
        path += tree.detached(advice.cache_salt, path, keys[len(path) :], RequestRef("", advice.key))
    return None, path[::-1]


def own_of(
    sessions: Sessions, session: Session | None, path: Iterable[CachedBlock], advice: "Advise"
) -> list[CachedBlock]:
    """Return the blocks of a path that advice may change: of a session, its own blocks alone.

    Advice that an earlier turn of a session is not needed any more does not change the blocks of the last turn.
    """
    if session is not None:
        return [node for node in path if node.session == session.number]
    own = [node for node in path if _is_own(sessions, node, advice.key)]
    owner = sessions.numbered(own[0].session) if own else None
    if owner is None or not advice.request_id or advice.kind not in _NOT_NEEDED:
        return own
    last_turn = {*ancestors(owner.last)}
    return [node for node in own if node not in last_turn]


def _is_own(sessions: Sessions, node: CachedBlock, key: str) -> bool:
    """Whether the requests of one API key, and of one session at most, have used a block."""
    if node.session > 0:
        owner = sessions.numbered(node.session)
        return owner is not None and owner.key == key
    used_once = node.kind // CLASSES_PER_USE <= 1 and node.session == 0
    return used_once and node.cached_by is not None and node.cached_by.key == key
