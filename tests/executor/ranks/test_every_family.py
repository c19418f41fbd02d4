"""Two ranks generate the tokens of one, for every causal LM of transformers that they can divide."""

import re
from pathlib import Path

import pytest
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.text_part import text_part

from tests.causal_lm_tables import DOCUMENT
from tests.every_causal_lm import build_tiny, tiny_config
from tests.executor.ranks.groups import ThreadGroup, config_of, greedy

DIVIDED = re.findall(r"^\| `([\w-]+)` \| served \| yes \|", DOCUMENT.read_text(), re.MULTILINE)


@pytest.mark.long
@pytest.mark.parametrize("kind", DIVIDED)
def test_tokens_of_ranks_equal_those_of_one(kind: str, tmp_path: Path) -> None:
    build_tiny(text_part("a model", tiny_config(kind)), tmp_path)
    expected, _ = greedy(ModelRunner(config_of(tmp_path, 1)))
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model this dull would prove nothing"
    group = ThreadGroup(tmp_path, 2)
    assert greedy(group)[0] == expected  # type: ignore[arg-type]
    group.close()
