"""Which recurrent layers are served, and which are refused before weights are read."""

from pathlib import Path

import pytest
import torch
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.recurrent import CONV, RECURRENT, State
from pagewise_executor.models.trial import try_without_weights
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from transformers import AutoConfig, Cache, PreTrainedConfig, __version__

from tests.every_causal_lm import tiny_config
from tests.model_builders import build_model, need_states


def tried(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, tuple[State, ...]]]:
    recurrent = try_without_weights("MODEL", config, dtype, trust_remote_code=False).recurrent
    return [(layer.name, layer.states) for layer in recurrent]


def test_states_are_found_by_what_modules_do(tmp_path: Path) -> None:
    """States in float32 stay in float32."""
    build_model("nemotron_h", tmp_path)
    states = (
        State((CONV, 0), (6 * 16 + 2 * 2 * 8, 4), torch.bfloat16),
        State((RECURRENT, 0), (6, 16, 8), torch.float32),
    )
    assert tried(AutoConfig.from_pretrained(tmp_path)) == [
        ("model.layers.0.mixer", states), ("model.layers.4.mixer", states)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("jamba", "JambaMambaMixer, which compute 4 later tokens without the recurrent state of earlier ones"),
        ("recurrent_gemma", "keeps states in modules of type RecurrentGemmaDecoderLayer, which cannot be computed"),
        ("bailing_hybrid", "which get arguments that are not known: position_embeddings"),
    ],
)
def test_states_that_cannot_be_kept_are_refused(kind: str, why: str) -> None:
    need_states()
    with pytest.raises(ModelError, match=rf"\(model_type {kind}\).*{why}"):
        tried(tiny_config(kind))


def test_the_version_of_transformers_that_recurrent_layers_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Cache, "get_conv_state", raising=False)
    why = rf"has recurrent layers, which are served from transformers 5\.21 on, and {__version__} is installed"
    with pytest.raises(ModelError, match=rf"\(model_type jamba\) {why}"):
        tried(tiny_config("jamba"))


def test_page_tables_in_hardware_are_refused(tmp_path: Path) -> None:
    build_model("lfm2", tmp_path)
    with pytest.raises(ModelError, match=r"--kv-mapping mmu: .* has recurrent layers"):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu", kv_mapping="mmu"))
