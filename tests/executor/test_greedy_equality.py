"""Greedy tokens equal transformers' ``generate()``, token for token, for every family."""

from pathlib import Path

import pytest

from tests.executor.parity import check_family
from tests.model_builders import FAMILIES


@pytest.mark.parametrize(("family", "block_size"), [(f, (16, 5, 1)[i % 3]) for i, f in enumerate(FAMILIES)])
def test_greedy_tokens_equal_generate(family: str, block_size: int, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cpu", block_size)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_generate_on_cuda(family: str, tmp_path: Path) -> None:
    check_family(family, tmp_path, "cuda", 16)
