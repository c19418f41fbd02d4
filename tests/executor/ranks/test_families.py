"""Several ranks sample the tokens that one does, for every family, also where KV heads are fewer than ranks."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.runner import Runner
from pagewise_shared.errors import ModelError
from pagewise_shared.segments import ALL_BEFORE, make_segments, mark_segments

from tests.cpu_kernels import need_cpu_kernels
from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import LENGTHS, ThreadGroup, config_of, greedy, group_of, prompts
from tests.executor.references import reference
from tests.model_builders import EAGER, VOCAB_SIZE, build_model

DIVIDED = ("llama", "qwen3", "gemma3", "qwen3_moe")
BY_STRUCTURE = ("deepseek_v3", "gpt_oss", "olmo3")
"""Of these transformers does not say how all of their layers are divided."""
GENERATED = ("gpt_oss", "olmo3", "gemma4", "gemma4_moe", "llama4", "qwen3_moe", "minimax_m2", "glm4_moe", "deepseek_v3")
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "top_k": 150, "top_p": 0.95}


@pytest.mark.parametrize(
    ("family", "size"), [*((family, 2) for family in (*DIVIDED, *BY_STRUCTURE)), ("llama", 4), ("olmo3", 4)]
)
def test_tokens_of_ranks_equal_those_of_one(family: str, size: int, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    expected, _ = greedy(ModelRunner(config_of(tmp_path, 1)))
    group = ThreadGroup(tmp_path, size)
    found, preempted = greedy(group)  # type: ignore[arg-type]
    group.close()
    assert found == expected
    assert preempted > 0
    assert len({tuple(tokens) for tokens in found}) == len(found), "a model this dull would prove nothing"


def test_segments_are_moved_on_every_rank(tmp_path: Path) -> None:
    build_model("llama", tmp_path, seed=7)
    rng = random.Random(5)
    documents = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (24, 33, 16)]
    group, found = ThreadGroup(tmp_path, 2), []
    for runner in (group, ModelRunner(config_of(tmp_path, 1))):
        requests = []
        for number in range(6):
            prompt: list[int] = [number + 3] * (1 + 3 * number)
            ranges = []
            for document in (documents[number % 3], documents[(number + 1) % 3]):
                ranges.append((len(prompt), len(prompt) + len(document)))
                prompt += [*document, 9]
            made = request(prompt, 10, f"r{number}")
            made.segments = make_segments(len(prompt), ranges, root=ALL_BEFORE, boundary=0)
            mark_segments(made.prompt_token_ids, made.segments)
            requests.append(made)
        run_requests(runner, requests, max_num_batched_tokens=40)  # type: ignore[arg-type]
        found.append([one.sequences[0].output_token_ids.tolist() for one in requests])
    group.close()
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "mistral", "gemma2", "gemma4", "gemma4_moe", "llama4", "gpt_oss", "olmo3", "ministral"),
        *("glm4_moe", "minimax_m2", "mistral4", "glm4_moe_lite"),
    ],
)
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
@pytest.mark.long
def test_further_families(family: str, kernels: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    expected, _ = greedy(ModelRunner(config_of(tmp_path, 1)))
    group = ThreadGroup(tmp_path, 2, kernels=kernels)
    assert greedy(group)[0] == expected  # type: ignore[arg-type]
    group.close()


@pytest.mark.long
@pytest.mark.parametrize(("family", "quantization"), [("llama", "int8"), ("llama", "int4"), ("mixtral", "int4")])
def test_quantised_weights(family: str, quantization: str, tmp_path: Path) -> None:
    """Ranks round parts of rows, so the tokens are of other weights; but they are the same every time."""
    need_cpu_kernels()
    build_model(family, tmp_path, seed=7)
    group = ThreadGroup(tmp_path, 2, kernels="cpu", quantization=quantization)
    first, _ = greedy(group)  # type: ignore[arg-type]
    assert greedy(group)[0] == first  # type: ignore[arg-type]
    group.close()


@pytest.mark.interpreted
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_triton_kernels_and_the_buffers_of_decode_graphs(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)

    def outputs(runner: Runner) -> list[list[int]]:
        requests = [request(list(range(5, 5 + n)), 6, f"r{n}", **kind) for n, kind in ((3, {}), (9, SAMPLED))]
        run_requests(runner, requests, max_num_seqs=4, max_num_batched_tokens=16)
        return [one.sequences[0].output_token_ids.tolist() for one in requests]

    expected = outputs(ModelRunner(config_of(tmp_path, 1, kernels="triton")))
    with group_of(tmp_path, 2, kernels="triton") as group:
        assert outputs(group) == expected


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", DIVIDED)
@pytest.mark.long
def test_tokens_of_processes_equal_those_of_one(family: str, size: int, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    expected, _ = greedy(ModelRunner(config_of(tmp_path, 1)))
    with group_of(tmp_path, size, host_memory="4MiB", verify_copies=True) as group:
        found, preempted = greedy(group)
    assert found == expected
    assert preempted > 0


@pytest.mark.parametrize("family", GENERATED)
@pytest.mark.long
def test_tokens_of_processes_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    build_model(family, tmp_path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager" if family in EAGER else "sdpa"
    )
    expected = reference(model, prompts(), [most for _, most in LENGTHS], "cpu")
    assert len({tuple(tokens) for tokens in expected}) == len(expected), "a model this dull would prove nothing"
    with group_of(tmp_path, 2) as group:
        assert greedy(group)[0] == expected


@pytest.mark.parametrize(
    ("family", "flaw"),
    [
        ("olmoe", "its modules do not fit together with a part of its heads"),
        ("gemma3n", "the activations of a whole MLP decide which of them count"),
        ("phi3", "attention of Phi3ForCausalLM has no projections that can be divided"),
        ("gpt_neox", "attention of GPTNeoXForCausalLM has no projections that can be divided"),
        ("opt", "transformers says for no layer of OPTForCausalLM how it can be divided"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_by_name(family: str, flaw: str, tmp_path: Path) -> None:
    build_model(family, tmp_path)
    with pytest.raises(ModelError, match=flaw):
        ThreadGroup(tmp_path, 2)
