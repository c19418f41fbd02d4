"""Adapters in the batches of a real model, against PEFT."""

from pathlib import Path

import pytest
from pagewise_shared.protocol import Adapter

from tests.executor.driver import run_requests
from tests.executor.runners import build_runner
from tests.lora_adapters import build_adapter, greedy, peft_model, read, with_adapter
from tests.model_builders import build_model

SETTINGS = {
    "plain": {},
    "attention": {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 4},
    "stabilised": {
        "use_rslora": True,
        "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
        "alpha_pattern": {"o_proj": 3},
    },
}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("qwen2", {"kernels": "torch", "quantization": "none"}),
    ],
)
def test_a_mixed_batch_is_what_peft_computes_for_each_adapter(
    family: str, options: dict[str, object], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    build_model(family, model)
    folders = {
        name: build_adapter(model, tmp_path / name, seed, **given)
        for seed, (name, given) in enumerate(SETTINGS.items())
    }
    adapters: dict[str, Adapter | None] = {name: read(path, name) for name, path in folders.items()}
    runner = build_runner(model, enable_lora=True, max_loras=3, **options)
    requests = [
        with_adapter(adapters.get(name), list(range(3 + number, 30 + number)), 12, f"{name} {number}", logprobs=0)
        for number, name in enumerate([*folders, "none", *folders, "none"])
    ]
    _, outputs = run_requests(runner, requests, max_num_batched_tokens=24)
    found: dict[str, list[float]] = {}
    for output in outputs:
        for sequence, entry in output.logprobs.items():
            found.setdefault(sequence.request.request_id, []).append(entry.logprob)
    references = {name: peft_model(model, folders.get(name)) for name in [*folders, "none"]}
    for request in requests:
        name = request.request_id.split()[0]
        tokens, logprobs = greedy(references[name], request.prompt_token_ids.tolist(), 12)
        assert request.sequences[0].output_token_ids.tolist() == tokens, request.request_id
        assert found[request.request_id] == pytest.approx(logprobs, abs=2e-4)
