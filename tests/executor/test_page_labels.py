"""The inventory that is made of the labels of pages."""

from pagewise_executor.page_labels import LABEL_BYTES, KeptBlocks
from pagewise_shared.block_hash import HASH_BYTES, BlockHash
from pagewise_shared.protocol import DEVICE, HOST, Inventory, NamedBlocks, named_blocks, pack_int32s

A, B, C = (BlockHash(letter * HASH_BYTES) for letter in (b"a", b"b", b"c"))


def label(name: BlockHash, slot: int) -> bytes:
    made = name + slot.to_bytes(8, "little")
    assert len(made) == LABEL_BYTES
    return made


def test_a_block_is_offered_if_all_its_pages_are_there() -> None:
    kept = KeptBlocks([1, 2])
    labels = {
        DEVICE: {1: label(A, 0), 2: label(B, 0), 3: label(A, 1), 4: label(B, 2), 5: label(A, 2), 6: label(C, 2)},
        HOST: {1: label(C, 1), 2: label(C, 2), 3: label(B, 1)},
    }
    inventory = kept.offer(labels, 100)
    assert inventory is not None
    assert [named_blocks(inventory, group) for group in range(2)] == [
        {DEVICE: {A: 0, B: 1}},
        {DEVICE: {A: 0}, HOST: {C: 0}},
    ]
    assert [pages.tolist() for pages in kept.pages(DEVICE)] == [[[1], [2]], [[3, 5]]]
    assert [pages.tolist() for pages in kept.pages(HOST)] == [[], [[1, 2]]]
    kept.clear()
    assert [len(pages) for pages in kept.pages(DEVICE)] == [0, 0]


def test_equal_blocks_are_offered_once() -> None:
    kept = KeptBlocks([1, 2])
    twice = {page: label(A, 1 + page % 2) for page in (3, 4, 5, 6)} | {7: label(A, 0), 8: label(A, 0)}
    inventory = kept.offer({DEVICE: twice}, 100)
    assert inventory is not None
    assert [named_blocks(inventory, group) for group in range(2)] == [{DEVICE: {A: 0}}] * 2
    assert [pages.tolist() for pages in kept.pages(DEVICE)] == [[[8]], [[6, 5]]]


def test_an_inventory_has_a_bound_and_others_may_not_have_all() -> None:
    kept = KeptBlocks([1, 1])
    held = {page: label(name, group) for group in range(2) for page, name in enumerate((A, B, C), 1 + 3 * group)}
    inventory = kept.offer({DEVICE: held}, 4)
    assert inventory is not None
    assert [(one.group, len(one.blocks) // 4) for one in inventory.tiers] == [(1, 3), (0, 1)], "windows come first"
    kept.agree(Inventory((NamedBlocks(DEVICE, pack_int32s([0, 1]), C + A), NamedBlocks(DEVICE, b"", b"", 1))))
    assert [pages.tolist() for pages in kept.pages(DEVICE)] == [[[3], [1]], []]
    assert kept.offer({DEVICE: {}}, 4) is None
    kept.agree(None)
    assert not any(map(len, kept.pages(DEVICE)))
