"""Decodes that share a prefix read it together on the Triton kernels, and no token changes by that."""

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from pagewise_executor.attention.triton_attention import LayerKind, TritonBackend
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.step_work import Int64s
from pagewise_shared.config import ExecutorConfig

from tests.executor.driver import request, run_requests
from tests.executor.references import reference
from tests.model_builders import EAGER, VOCAB_SIZE, build_model


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_greedy_tokens_of_shared_prefixes_equal_transformers(
    family: str, tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of decodes alone, which CUDA graphs compute, and in steps with chunks; prefixes come, go and branch.

    Half of the layers of Gemma 2 and of gpt-oss have a sliding window, so they do not share.
    """
    # As little as a GPU may share, one tile of float32; it is not worth it there.
    monkeypatch.setattr("pagewise_kernels.attention.decode.LEAST_SHARED", 16)
    build_model(family, tmp_path, seed=7)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager" if family in EAGER else "sdpa"
    ).to(device)
    rng = random.Random(5)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(136)]
    tails = [1, 9, 2, 3, 5]
    prompts = [[*common, *(rng.randrange(3, VOCAB_SIZE) for _ in range(tail))] for tail in tails]
    prompts.append([rng.randrange(3, VOCAB_SIZE) for _ in range(6)])
    lengths = [6, 4, 6, 4, 3, 5]
    expected = reference(model, prompts, lengths, device.type)
    shared: list[tuple[int, int]] = []
    share = TritonBackend.share_prefixes

    def watched(self: TritonBackend, rows: Int64s, lengths: Int64s) -> None:
        share(self, rows, lengths)
        prefixes, members = self._shared  # found now or in an earlier step
        for begin, count, tokens in prefixes.tolist():
            queries = members[begin : begin + count]
            tables = self._batch.block_tables[rows[queries], : tokens // 8]
            assert (tables == tables[0]).all()
            assert (lengths[queries] > tokens).all()
        shared.append((len(rows), max((int(plan._shared[0]) for plan in self._plans.values()), default=0)))

    monkeypatch.setattr(TritonBackend, "share_prefixes", watched)
    runner = ModelRunner(
        ExecutorConfig(
            model=str(tmp_path), device=device.type, dtype="float32", kernels="triton", block_size=8, num_blocks=140,
            profile=False,
        )
    )  # fmt: skip
    requests = [
        request(prompt, length, f"r{i}") for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    run_requests(runner, requests, max_num_seqs=7, max_num_batched_tokens=144, arrive_every=1)
    assert [asked.sequences[0].output_token_ids.tolist() for asked in requests] == expected
    # It is not worth it for three; and the next step without any prefix shares none.
    assert {stretches for decodes, stretches in shared if decodes < 4} == {0}
    assert 1 in {stretches for decodes, stretches in shared if decodes >= 4}


@pytest.mark.interpreted
def test_steps_that_share_nothing_copy_nothing() -> None:
    uploads: list[npt.NDArray[np.int32]] = []

    def upload(array: npt.NDArray[np.int32]) -> torch.Tensor:
        uploads.append(array)
        return torch.from_numpy(array)

    backend = TritonBackend(torch.device("cpu"), 4, 80, 8)
    backend.upload = upload  # type: ignore[assignment]
    plan = backend.decode_plan(LayerKind(4, 2, 16, torch.float32, None))
    own, common = np.arange(40, dtype=np.int32).reshape(4, 10), np.zeros((4, 10), np.int32)
    stretches = []
    rows, lengths = np.arange(4), np.full(4, 70)
    for tables in (own, common, own, own):
        backend._batch = SimpleNamespace(block_tables=tables, block_size=8, shares_prefixes=True)  # type: ignore[assignment]
        backend._shared_blocks = 0  # as if the tables had been changed
        backend.share_prefixes(rows, lengths)
        stretches.append(int(plan._shared[0]))
    assert stretches == [0, 1, 0, 0]
    assert len(uploads) == 2


@pytest.mark.interpreted
def test_what_is_shared_is_looked_for_again_when_rows_or_their_shared_blocks_change() -> None:
    backend = TritonBackend(torch.device("cpu"), 5, 80, 8)
    plan = backend.decode_plan(LayerKind(4, 2, 16, torch.float32, None))
    tables = np.zeros((5, 10), np.int32)
    backend._batch = SimpleNamespace(block_tables=tables, block_size=8, shares_prefixes=True)  # type: ignore[assignment]

    def sharing(rows: list[int], *changed: tuple[int, int, int]) -> list[int]:
        """The queries that share, after a step that has changed these entries of the tables."""
        backend.update_block_tables(SimpleNamespace(changed_tables=list(changed)))  # type: ignore[arg-type]
        backend.share_prefixes(np.array(rows), np.full(len(rows), 70))
        return np.flatnonzero(plan._shared[1 : 1 + len(rows)].numpy() >= 0).tolist()

    assert sharing([0, 1, 2, 3, 4]) == [0, 1, 2, 3, 4]
    tables[2, 9] = 5
    assert sharing([0, 1, 2, 3, 4], (2, 9, 10)) == [0, 1, 2, 3, 4]
    tables[2] = np.arange(10, 20)
    assert sharing([0, 1, 2, 3, 4], (2, 0, 10)) == [0, 1, 3, 4]
    assert sharing([2, 0, 1, 3]) == []
    assert sharing([2, 0, 1, 3, 4]) == [1, 2, 3, 4]
