"""Look-ups of models with several groups of layers, which every tier without ids answers in the same way."""

import queue

import numpy as np
from pagewise_executor.grouped_batch import page_name
from pagewise_executor.tiers.block_names import chain
from pagewise_executor.tiers.hashed import HashedTier
from pagewise_shared.block_hash import pack_names, root_hash, salt_tag
from pagewise_shared.protocol import DISK, DropStored, Found, LayerGroup, LookUp, StoredDropped, pack_int32s

BLOCK_SIZE = 4
GROUPS = (LayerGroup(2, 2), LayerGroup(6, 3, window=9))


def check_look_ups(tier: HashedTier) -> None:
    """Store parts of a prefix in a tier, and look up where sequences can begin."""
    root, tokens = root_hash("model"), pack_int32s(range(45))
    names = chain(root, tokens, BLOCK_SIZE)
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    tier.report = told.put

    def store(group: int, blocks: list[int], pages: range) -> None:
        named = [page_name(names[block], group, index) for block in blocks for index in pages]
        assert all(tier.store(named, np.ones((len(named), tier.bytes_per_block), np.uint8)))

    def found(length: int) -> int:
        tier.look_up(LookUp(1, length, DISK, root, tokens[: 4 * length]), BLOCK_SIZE, GROUPS)
        answer = told.get(timeout=20)
        assert isinstance(answer, Found)
        assert answer.number == length
        return answer.num_blocks

    store(0, [*range(9)], range(2))
    store(1, [2, 3, 7], range(3))
    store(1, [6], range(2))
    assert [found(length) for length in (45, 17, 15, 3)] == [4, 4, 0, 0]
    store(1, [6], range(2, 3))
    assert found(45) == 8
    store(0, [10], range(2))
    store(1, [8], range(3))
    assert found(45) == 9
    tier.drop(DropStored(1, 1, DISK, names=pack_names(names[7:9])), GROUPS)
    assert told.get(timeout=20) == StoredDropped(1, 1, 10), "all pages of both blocks"
    assert found(45) == 4
    tier.drop(DropStored(1, 2, DISK, tag=salt_tag("key:a")), GROUPS)
    assert told.get(timeout=20) == StoredDropped(1, 2, 25), "of an unknown salt"
