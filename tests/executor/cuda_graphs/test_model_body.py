"""A model computes its logits from the hidden states that a graph has left, whatever its family."""

from pathlib import Path

import pytest
import torch
from pagewise_executor.cuda_graphs.mixed_graphs import ModelBody

from tests.model_builders import FAMILIES, OTHERS, VOCAB_SIZE, build_model


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_the_head_takes_what_the_body_has_computed(family: str, tmp_path: Path) -> None:
    model = build_model(family, tmp_path)
    body = ModelBody(model)
    ids = torch.randint(3, VOCAB_SIZE, (40,))
    positions = torch.arange(40)
    with torch.inference_mode():
        expected = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        output = body.compute(ids, positions)
        assert output.last_hidden_state.shape[:2] == (1, 40)
        with body.computed(output):
            # A model that computes its layers again computes them for these ids.
            found = model(input_ids=torch.zeros_like(ids)[None], position_ids=positions[None], use_cache=False).logits
    assert torch.equal(found, expected)
