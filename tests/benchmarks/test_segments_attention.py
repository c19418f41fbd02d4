"""Segments by an attention mask, as the experiment on their quality computes them: the tokens of the oracle."""

from pathlib import Path

import pytest
import torch
from pagewise_shared.segments import make_segments, mark_segments

from benchmarks.segments.attention import expand, logits
from tests.executor.driver import request
from tests.executor.references import segments_reference
from tests.model_builders import VOCAB_SIZE, build_model


@pytest.mark.parametrize("boundary", [0, 5, 40])
def test_the_mask_gives_the_tokens_of_the_reference(boundary: int, tmp_path: Path) -> None:
    model = build_model("llama", tmp_path, seed=7).eval()
    prompt = torch.randint(3, VOCAB_SIZE, (90,), generator=torch.Generator().manual_seed(boundary)).tolist()
    segments = make_segments(90, [(6, 30), (33, 48), (48, 80)], boundary=boundary)
    asked = request(prompt, 6, "asked")
    asked.segments = segments
    mark_segments(asked.prompt_token_ids, segments)
    with torch.inference_mode():
        expected = segments_reference(model, asked)
        tokens = prompt + expected[:-1]
        found = logits(model, torch.tensor([tokens]), expand(len(tokens), segments, "segments"), 6)
    assert found[0].argmax(-1).tolist() == expected
