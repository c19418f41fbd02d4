"""Common parts of all storage: names of prefixes, and look-ups of the longest stored one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from pagewise_executor.tiers.block_names import chain, content_name, descendants, fingerprint_of, num_leading
from pagewise_shared.block_hash import BlockHash, BlockName, pack_names, root_hash, unpack_names
from pagewise_shared.protocol import pack_int32s

from tests.executor.tiers.names import prefix


def test_the_names_of_a_prefix_are_its_block_hashes() -> None:
    root = root_hash("model", "salt")
    tokens = pack_int32s(range(11))
    names = chain(root, tokens, 4)
    assert len(names) == 2
    assert names[0].parent == root
    assert names[1].parent == names[0].hash
    assert names == chain(root, tokens[: 4 * 8], 4) != chain(root_hash("model"), tokens, 4)
    assert unpack_names(pack_names(names)) == names


@given(length=st.integers(0, 3000), there=st.integers(0, 3000))
def test_the_end_of_what_is_there_is_found_in_few_questions(length: int, there: int) -> None:
    names = [BlockName(BlockHash(number.to_bytes(32)), BlockHash(bytes(32))) for number in range(length)]
    asked = 0

    def contains(some: Sequence[BlockName]) -> list[bool]:
        nonlocal asked
        asked += 1
        assert 0 < len(some) <= 33
        return [int.from_bytes(name.hash) < there for name in some]

    assert num_leading(names, contains) == min(there, length)
    assert asked <= 4


def test_nothing_is_there_of_what_has_no_full_block() -> None:
    assert num_leading([], lambda names: [True] * len(names)) == 0
    assert num_leading(prefix("a", 1), lambda names: [True]) == 1


def test_what_follows_a_block_is_found_also_in_circles() -> None:
    parents = {"a": "root", "b": "a", "c": "a", "d": "c", "e": "other", "f": "g", "g": "f"}
    assert sorted(descendants(parents, ["root"])) == ["a", "b", "c", "d"]
    assert descendants(parents, ["other"]) == ["e"]
    assert sorted(descendants(parents, ["f"])) == ["f", "g"]
    assert descendants(parents, ["nobody"]) == []


def test_the_name_of_a_content_tells_the_model() -> None:
    for fingerprint in ("0123abcd", "0123abcd-4096", "a/b:c.d e"):
        name = content_name(fingerprint, "0" * 16)
        assert fingerprint_of(name) == fingerprint
        assert not set(name) & set("/: ")
