"""Ranks of models with recurrent layers: each computes some heads, and keeps their states."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagewise_executor.collectives import Ranks
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.models.loader import load_model
from pagewise_executor.models.shard_settings import shard_config
from pagewise_scheduler.core.requests.request import Request
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.errors import ModelError

from tests.draft_models import build_mtp
from tests.drafting import draft_always
from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import LENGTHS, ThreadGroup, config_of, greedy, group_of, prompts
from tests.executor.references import reference
from tests.model_builders import RECURRENT, build_model

EVEN = {"linear_value_head_dim": 8}
"""transformers saves three parts of equal size of OLMo Hybrid's convolutions, which are right for equal heads alone."""
SHARED: list[tuple[str, dict[str, Any]]] = [
    ("nemotron_h", {"n_groups": 1, "use_bias": True, "moe_latent_size": 24}),
    ("granitemoehybrid", {"mamba_n_groups": 1}),
    ("bamba", {"mamba_n_groups": 1}),
    ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True}),
    ("falcon_h1", {"mamba_n_groups": 1, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
]
"""Mamba-2 with one group, of whose heads each rank has some."""


def tokens_of_ranks(path: Path, size: int) -> tuple[list[list[int]], int]:
    group = ThreadGroup(path, size)
    found = greedy(group, num_blocks=8)  # type: ignore[arg-type]
    group.close()
    return found


def check(family: str, path: Path, size: int = 2, **settings: object) -> None:
    build_model(family, path, seed=7, **settings)
    expected, _ = greedy(ModelRunner(config_of(path, 1)))
    found, preempted = tokens_of_ranks(path, size)
    assert found == expected
    assert preempted > 0
    assert len({tuple(tokens) for tokens in found}) == len(found), "a model this dull would prove nothing"


@pytest.mark.parametrize(("family", "settings"), [("qwen3_5", {}), ("lfm2", {"conv_bias": True}), SHARED[0]])
def test_tokens_of_ranks_equal_those_of_one(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check(family, tmp_path, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in RECURRENT if family != "olmo_hybrid"), *SHARED[1:]]
)
def test_further_tokens_of_ranks(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    check(family, tmp_path, **settings)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
        ("nemotron_h", {"n_groups": 2, "mamba_num_heads": 8}),
        ("bamba", {"mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_d_head": 18, "mamba_expand": 3}),
        ("lfm2", {"block_auto_adjust_ff_dim": True, "intermediate_size": 90, "block_multiple_of": 20}),
    ],
)
def test_four_ranks(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Two of them share a group."""
    check(family, tmp_path, 4, **settings)


@pytest.mark.parametrize(
    "family", ["qwen3_next", *(pytest.param(one, marks=pytest.mark.long) for one in RECURRENT if one != "qwen3_next")]
)
def test_tokens_of_processes_equal_those_of_transformers(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next with drafts by its MTP layer."""
    draft_always(monkeypatch)
    drafts = {"speculative_config": '{"method": "mtp"}'} if family == "qwen3_next" else {}
    if drafts:
        build_mtp(family, tmp_path, seed=7)
    else:
        build_model(family, tmp_path, seed=7, **EVEN if family == "olmo_hybrid" else {})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = reference(model, prompts(), [most for _, most in LENGTHS], "cpu")
    with group_of(tmp_path, 2, host_memory="4MiB", verify_copies=True, **drafts) as group:
        found, preempted = greedy(group, num_blocks=8)
        assert found == expected
        assert preempted > 0
        if drafts:
            scheduler, _ = run_requests(group, [request(prompts()[-1], LENGTHS[-1][1])])
            assert scheduler.features.drafts.num_drafts > 9


def test_ranks_verify_drafts(tmp_path: Path) -> None:
    """With a norm over the heads of both ranks, which also sums while they update states by the kept tokens."""
    family, settings = SHARED[0]
    build_model(family, tmp_path, seed=7, **settings)
    ngram = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=2, prompt_lookup_min=1)

    def asked() -> list[Request]:
        prompt = [9, *[5, 6, 7] * 4]
        return [request(prompt, 30, f"at {heat}", temperature=heat, allowed=(5, 6, 7), seed=3) for heat in (0.0, 0.7)]

    run_requests(ModelRunner(config_of(tmp_path, 1)), alone := asked())
    group, found = ThreadGroup(tmp_path, 2), asked()
    scheduler, _ = run_requests(group, found, speculative=ngram)  # type: ignore[arg-type]
    group.close()
    tokens = [[one.sequences[0].output_token_ids.tolist() for one in requests] for requests in (alone, found)]
    assert tokens[0] == tokens[1]
    drafts = scheduler.features.drafts
    assert 5 < drafts.num_accepted_tokens < drafts.num_draft_tokens - 5


@pytest.mark.interpreted
@pytest.mark.parametrize(("family", "settings"), [pytest.param("qwen3_next", {}, marks=pytest.mark.long), SHARED[0]])
def test_triton_kernels_of_ranks(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """PyTorch computes modules with a norm over the heads of both. With drafts."""
    build_model(family, tmp_path, seed=7, **settings)
    ngram = SpeculativeConfig(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1)

    def asked() -> list[Request]:
        return [request([9, *[5, 6, 7] * 3][:length], 8, f"of {length}", allowed=(5, 6, 7)) for length in (10, 7)]

    run_requests(ModelRunner(config_of(tmp_path, 1)), alone := asked())
    with group_of(tmp_path, 2, kernels="triton") as group:
        scheduler, _ = run_requests(group, found := asked(), speculative=ngram)
    tokens = [[one.sequences[0].output_token_ids.tolist() for one in requests] for requests in (alone, found)]
    assert tokens[0] == tokens[1]
    assert scheduler.features.drafts.num_draft_tokens > 0


def test_each_rank_keeps_the_states_of_its_heads(tmp_path: Path) -> None:
    build_model("qwen3_next", tmp_path)
    config = config_of(tmp_path, 1, kernels="torch")
    whole, part = load_model(config).recurrent, load_model(config, Ranks(1, 2)).recurrent
    assert [(layer.name, layer.num_bytes) for layer in part] == [(layer.name, layer.num_bytes // 2) for layer in whole]
    conv, heads = (state.shape for state in part[0].states)
    assert (conv[0], heads) == ((2 * 2 * 8 + 4 * 16) // 2, (2, 8, 16))


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads is 3; numbers of ranks that work: 1$"),
        ("nemotron_h", {"n_groups": 3}, "n_groups is 3; numbers of ranks that work: 1$"),
        ("granitemoehybrid", {"mamba_n_heads": 3, "mamba_d_head": 32}, "mamba_n_heads is 3; numbers of ranks"),
        ("lfm2", {"hidden_size": 45, "intermediate_size": 80}, "hidden_size is 45; numbers of ranks that work: 1$"),
    ],
)
def test_numbers_of_ranks_that_work_are_named(family: str, settings: dict[str, Any], why: str) -> None:
    name, usual = RECURRENT[family]
    config = getattr(transformers, name)(**usual | settings)
    with pytest.raises(ModelError, match=why):
        shard_config("a model", config, 2)


def test_parts_of_unknown_sizes_are_refused(tmp_path: Path) -> None:
    build_model("olmo_hybrid", tmp_path)
    with pytest.raises(ModelError, match=r"conv1d.weight is divided \(parts of 32, 32, 64 rows, \[43, 1, 4\]"):
        load_model(config_of(tmp_path, 1, kernels="torch"), Ranks(0, 2))
