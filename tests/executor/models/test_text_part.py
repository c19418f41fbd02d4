"""Multimodal checkpoints serve their text part, with the tokens that the whole model generates for text."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.models.text_part import text_name

from tests.every_causal_lm import tiny_settings
from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import EXPANDS_LATENTS


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("gemma3", "gemma3_text"),
        ("gemma4", "gemma4_text"),
        ("gemma4_unified", "gemma4_unified_text"),
        ("mistral3", "mistral"),
        ("mistral3", "mistral4"),
        ("qwen2_5_vl", "qwen2_5_vl_text"),
        ("qwen3_vl", "qwen3_vl_text"),
    ],
)
def test_the_text_part_generates_what_the_whole_model_does(
    kind: str, part: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if part == "mistral4" and not EXPANDS_LATENTS:
        pytest.skip(f"transformers {transformers.__version__} has no method that expands latents")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    made = transformers.CONFIG_MAPPING[kind]
    settings = tiny_settings(transformers.CONFIG_MAPPING[part])
    config = made(
        text_config={"model_type": part} | settings | _ROPE.get(kind, {}),
        vision_config=_VISION[kind] if kind in _VISION else tiny_settings(made.sub_configs["vision_config"]),
        tie_word_embeddings=kind.startswith("gemma"),
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5.0)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    model.save_pretrained(tmp_path)
    prompts = [[(7 * i) % 190 + 3 for i in range(length)] for length in (23, 5)]
    expected = reference(model, prompts, [16, 16], "cpu")
    caplog.set_level(logging.INFO)
    runner = build_runner(tmp_path, kernels="torch")
    assert f"is a multimodal model ({kind}): its text part alone is served" in caplog.text
    assert "no place for" not in caplog.text
    requests = [request(prompt, 16, f"r{i}") for i, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=20, max_num_batched_tokens=11)
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected


_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
}
_ROPE = {
    "qwen2_5_vl": {"use_sliding_window": False, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    "qwen3_vl": {"rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}},
}
"""As config.json has it: three positions rotate parts of a head each."""
_VISION = {"gemma3": _SIGLIP, "mistral3": _SIGLIP, "qwen2_5_vl": _QWEN, "qwen3_vl": _QWEN}


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.vision_tower.layers.0.mlp.up_proj.weight", None),
        ("visual.blocks.0.mlp.up_proj.weight", None),
        ("multi_modal_projector.linear_1.weight", None),
    ],
)
def test_names_of_tensors(name: str, found: str | None) -> None:
    assert text_name(name) == found
