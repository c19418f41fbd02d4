"""Every causal LM of transformers is served with the right tokens, or refused by name before its weights are read."""

import random
from pathlib import Path

import pytest
import torch
import transformers
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.support import SERVED
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from safetensors.torch import save_file

from tests.causal_lm_tables import DOCUMENT, reason_of, row_of
from tests.every_causal_lm import FEW, PARAMETERS, build_tiny, causal_lms, tiny_config
from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.executor.runners import build_runner
from tests.model_builders import EXPANDS_LATENTS, GIVES_STATES, VOCAB_SIZE, spoil_weights

_LENGTHS = ((23, 24), (5, 30), (1, 12))


def check(kind: str, path: Path) -> None:
    """Check that a family is refused by its name before weights are read, or generates the tokens of transformers."""
    config = tiny_config(kind)
    refusal = refusal_of(config, path / "refused") or ""
    if "take a later version" in refusal and not (EXPANDS_LATENTS and GIVES_STATES):
        pytest.skip(refusal)
    row = row_of(kind)
    assert row in DOCUMENT.read_text().splitlines(), "run python -m tests.causal_lm_tables"
    assert reason_of(refusal).replace("|", "/") in row
    assert ("| refused |" in row) == bool(refusal)
    if not refusal:
        check_tokens(config, path / "served")
        return
    names = {kind, config.get_text_config(decoder=True).model_type}
    assert any(f"(model_type {name})" in refusal for name in names), "of the model, or of its text part"
    assert refusal.endswith(SERVED)


def refusal_of(config: transformers.PreTrainedConfig, path: Path) -> str | None:
    """The sentence that refuses a model of this configuration; None: its weights are read."""
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(path)
    save_file({"unreadable": torch.zeros(1)}, path / "model.safetensors")
    spoil_weights(path)
    with pytest.raises(ModelError) as error:
        load_model(ExecutorConfig(model=str(path), device="cpu", dtype="float32"))
    return None if "model.safetensors cannot be loaded" in str(error.value) else str(error.value)


def check_tokens(config: transformers.PreTrainedConfig, path: Path) -> None:
    """Prompts of several lengths together, in chunks of an odd size, with preemptions."""
    made = build_tiny(config, path)
    model = type(made).from_pretrained(path, dtype=torch.float32)
    assert model.num_parameters() < PARAMETERS, "a model this large would make the test slow"
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length, _ in _LENGTHS]
    expected = reference(model, prompts, [length for _, length in _LENGTHS], "cpu")
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model this dull would prove nothing"
    runner = build_runner(path, kernels="torch")
    requests = [request(prompt, _LENGTHS[i][1], f"r{i}") for i, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=9, max_num_batched_tokens=11)
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected


@pytest.mark.parametrize("kind", FEW)
def test_families_of_each_kind(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(causal_lms().keys() - set(FEW)))
def test_every_family(kind: str, tmp_path: Path) -> None:
    check(kind, tmp_path)
