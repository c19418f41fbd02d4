"""The pages of blocks: no page belongs to two blocks, and none is lost."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagewise_executor.page_map import NULL_PAGE, PageMap
from pagewise_executor.plan_checks import InvalidPlanError

NAMED = st.tuples(st.booleans(), st.integers(0, 2), st.lists(st.integers(0, 40), min_size=1, max_size=5))


@settings(max_examples=200, deadline=None)
@given(st.integers(5, 40), st.lists(st.integers(1, 5), min_size=3, max_size=3), st.lists(NAMED, max_size=60))
def test_every_page_has_one_block_or_is_free(
    num_pages: int, pages_per_block: list[int], steps: list[tuple[bool, int, list[int]]]
) -> None:
    pages = PageMap(num_pages, pages_per_block)
    mapped: dict[tuple[int, int], list[int]] = {}
    for is_named, group, blocks in steps:
        ids = np.array([block % pages.num_blocks(group) for block in blocks], np.int32)
        if is_named:
            new = {block for block in ids.tolist() if (group, block) not in mapped}
            if len(new) * pages_per_block[group] > pages.num_free:
                with pytest.raises(InvalidPlanError, match="free"):
                    pages.map(group, ids)
                continue
            found = pages.map(group, ids)
            for block, held in zip(ids.tolist(), found.tolist(), strict=True):
                assert mapped.setdefault((group, block), held) == held, "a block keeps its pages"
        else:
            pages.unmap(group, ids)
            for block in ids.tolist():
                mapped.pop((group, block), None)
            assert (pages.pages(group, ids) == NULL_PAGE).all()
        used = [page for held in mapped.values() for page in held]
        assert len(set(used)) == len(used) == num_pages - pages.num_free
        assert all(1 <= page <= num_pages for page in used)
