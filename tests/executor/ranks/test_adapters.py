"""Adapters on several ranks, each of which has its part of them: tokens equal the tokens of one rank."""

import queue
from pathlib import Path
from typing import Any

import pytest
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import Runner
from pagewise_shared.protocol import Adapter, LoadAdapter, Welcome

from tests.executor.driver import run_requests
from tests.executor.ranks.groups import ThreadGroup, config_of, group_of
from tests.lora_adapters import build_adapter, read, with_adapter
from tests.model_builders import build_model
from tests.quantised_checkpoints import FORMS, build_quantised

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "sums": {"target_modules": ["o_proj", "down_proj"], "r": 8},
    "columns": {"target_modules": ["k_proj", "v_proj", "gate_proj"], "use_rslora": True, "rank_pattern": {"k_proj": 2}},
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 2}

Folders = dict[str, Path]


def built(path: Path, family: str = "llama") -> tuple[Path, Folders]:
    """A model and adapters of it."""
    build_model(family, path / "model", seed=7)
    return path / "model", {
        name: build_adapter(path / "model", path / name, seed, **settings)
        for seed, (name, settings) in enumerate(SETTINGS.items())
    }


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Folders]:
    return built(tmp_path_factory.mktemp("llama"))


def outputs(
    runner: Runner, folders: Folders, *, count: int = 12, size: int = 21, asked: int = 2, **driving: Any
) -> dict[str, list[tuple[int, float]]]:
    """Tokens and their log-probabilities with each adapter and without, in the same batches and little memory."""
    adapters = {name: read(path, name) for name, path in folders.items()}
    requests = [
        with_adapter(
            adapters.get(name), list(range(3 + number, 3 + size + number)), count, f"{name} {number}", logprobs=0
        )
        for number, name in enumerate([*folders, "none"] * asked)
    ]
    _, steps = run_requests(runner, requests, **{"max_num_batched_tokens": 24} | driving)
    found: dict[str, list[tuple[int, float]]] = {}
    for step in steps:
        for sequence, entry in step.logprobs.items():
            found.setdefault(sequence.request.request_id, []).append((entry.token_id, round(entry.logprob, 3)))
    assert len({tuple(told) for told in found.values()}) == len(requests), "adapters that change nothing show nothing"
    return found


def tokens(found: dict[str, list[tuple[int, float]]]) -> dict[str, list[int]]:
    return {name: [token for token, _ in told] for name, told in found.items()}


def same(found: dict[str, list[tuple[int, float]]], expected: dict[str, list[tuple[int, float]]]) -> None:
    assert tokens(found) == tokens(expected)
    for name, told in expected.items():
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in told], abs=2e-3)


def test_processes_compute_each_adapter_of_a_batch_and_change_those_in_their_slots(
    llama: tuple[Path, Folders],
) -> None:
    model, folders = llama
    expected = outputs(ModelRunner(config_of(model, 1, **LORA)), folders, num_blocks=16)
    with group_of(model, 2, **LORA) as group:
        same(outputs(group, folders, num_blocks=16), expected)
        said: queue.SimpleQueue[Any] = queue.SimpleQueue()
        group.report_to(said.put)
        group.reset(Welcome(9, 4, 64))
        there = read(folders["all"])
        gone = Adapter("gone", str(model), bytes(32), rank=4)
        for number, adapter in enumerate([gone, there]):
            group.handle(LoadAdapter(9, number, adapter, slot=0))
            answer = said.get(timeout=30)
            assert (answer.number, "gone" in answer.error) == (number, adapter is gone)
        assert said.empty(), "all ranks answer together"


@pytest.mark.parametrize(("family", "size", "kernels"), [("gemma3", 2, "torch"), ("llama", 4, "torch")])
def test_layers_that_are_not_fused_and_kv_heads_that_are_shared(
    family: str, size: int, kernels: str, tmp_path: Path
) -> None:
    model, folders = built(tmp_path, family)
    expected = outputs(ModelRunner(config_of(model, 1, kernels=kernels, **LORA)), folders)
    group = ThreadGroup(model, size, kernels=kernels, **LORA)
    same(outputs(group, folders), expected)  # type: ignore[arg-type]
    group.close()


def test_adapters_of_a_quantised_checkpoint(llama: tuple[Path, Folders], tmp_path: Path) -> None:
    """Inputs are not rounded in this form, so that tokens do not depend on the number of ranks."""
    folders = llama[1]
    build_quantised(FORMS["int8 weights"], tmp_path, "llama")
    expected = outputs(ModelRunner(config_of(tmp_path, 1, **LORA)), folders, asked=1)
    group = ThreadGroup(tmp_path, 2, **LORA)
    same(outputs(group, folders, asked=1), expected)  # type: ignore[arg-type]
    group.close()


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("kernels", "size"), [("torch", 2), ("torch", 4), ("triton", 2), ("triton", 4)])
def test_tokens_of_processes_equal_those_of_one(llama: tuple[Path, Folders], kernels: str, size: int) -> None:
    model, folders = llama
    less: dict[str, Any] = {"count": 3, "size": 6, "asked": 1} if kernels == "triton" else {}
    expected = outputs(ModelRunner(config_of(model, 1, kernels=kernels, **LORA)), folders, **less)
    with group_of(model, size, kernels=kernels, **LORA) as group:
        same(outputs(group, folders, **less), expected)
