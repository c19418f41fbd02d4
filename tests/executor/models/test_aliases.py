"""Models with code of their own are computed by the model of transformers that has the same layers."""

import json
import logging
from pathlib import Path

import pytest
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.transformers_loading import transformers_config
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import build_model
from tests.quantised_checkpoints import edit_config

KIMI = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "model_type": "kimi_k2",
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "torch_dtype": "float32",
}
"""The settings of config.json of moonshotai/Kimi-K2-Instruct that DeepSeek V3 lacks."""
ROPE = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0}


def test_kimi_k2_generates_the_tokens_of_deepseek_v3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = build_model("deepseek_v3", tmp_path, seed=7)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"], config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit_config(tmp_path, **KIMI, rope_theta=10000.0, rope_scaling=ROPE)
    caplog.set_level(logging.INFO)
    runner = build_runner(tmp_path, kernels="torch")
    said = [record.message for record in caplog.records if "(model_type kimi_k2)" in record.message]
    assert [
        line.endswith("(model_type kimi_k2) is computed as deepseek_v3, without its own code") for line in said
    ] == [True]
    prompts = [[(7 * i) % 190 + 3 for i in range(length)] for length in (23, 5)]
    requests = [request(prompt, 16, f"r{i}") for i, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=20, max_num_batched_tokens=11)
    expected = reference(model, prompts, [16, 16], "cpu")
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected


def test_settings_that_the_other_model_does_not_have_are_refused(tmp_path: Path) -> None:
    build_model("deepseek_v3", tmp_path, num_hidden_layers=1)
    edit_config(tmp_path, **KIMI | {"scoring_func": "softmax", "linear_attention": True})
    with pytest.raises(
        ModelError, match=r"as deepseek_v3: its config.json \(kimi_k2\) sets linear_attention, scoring_func"
    ):
        load_model(ExecutorConfig(model=str(tmp_path), device="cpu"))


def test_code_that_is_trusted_is_run(tmp_path: Path) -> None:
    build_model("deepseek_v3", tmp_path, num_hidden_layers=1)
    edit_config(tmp_path, **KIMI)
    with pytest.raises(ModelError, match="configuration_deepseek"):
        transformers_config(ExecutorConfig(model=str(tmp_path), trust_remote_code=True), tmp_path)
