"""How large steps, the pool and sequences are by default: on GPUs that are only described, and on this CPU."""

import logging
from pathlib import Path

import pytest
import torch
from pagewise_executor.device_defaults import Gpu, SizedConfig, with_step_limits
from pagewise_executor.kv.kv_pool import pool_size
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError

from tests.executor.driver import request, run_requests
from tests.executor.runners import build_runner
from tests.model_builders import build_model

GIB = 2**30
CUDA = torch.device("cuda", 0)


H200, H100, A100 = Gpu(140 * GIB, 9), Gpu(79 * GIB, 9), Gpu(79 * GIB, 8)
L4, RTX_4090, B200 = Gpu(22 * GIB, 8), Gpu(24 * GIB, 8), Gpu(178 * GIB, 10)


@pytest.mark.parametrize("gpu", [H200, H100, B200])
def test_large_cards_compute_large_steps(gpu: Gpu) -> None:
    config = with_step_limits(ExecutorConfig(), gpu)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (1024, 8192)


@pytest.mark.parametrize("gpu", [A100, L4, RTX_4090, None])
def test_others_compute_smaller_ones(gpu: Gpu | None) -> None:
    config = with_step_limits(ExecutorConfig(), gpu)
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)


def test_ranks_compute_steps_that_the_weakest_can() -> None:
    config = with_step_limits(ExecutorConfig(), H200, lambda own: min(own, False))
    assert (config.max_num_seqs, config.max_num_batched_tokens) == (256, 2048)


def test_what_is_asked_for_counts_on_any_device() -> None:
    config = with_step_limits(ExecutorConfig(max_num_seqs=7, max_num_batched_tokens=300, model="m"), H200)
    assert (config.max_num_seqs, config.max_num_batched_tokens, config.model) == (7, 300, "m")
    assert with_step_limits(ExecutorConfig(max_num_batched_tokens=300), H200).max_num_seqs == 300
    assert with_step_limits(ExecutorConfig(max_num_seqs=4), H200).max_num_batched_tokens == 8192
    assert with_step_limits(ExecutorConfig(max_num_seqs=3000), L4).max_num_batched_tokens == 3000


def test_a_share_of_a_gpu_that_is_not_there_has_no_effect_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with_step_limits(ExecutorConfig(), None)
    with_step_limits(ExecutorConfig(gpu_memory_utilization=0.5), H200)
    assert not caplog.messages
    with_step_limits(ExecutorConfig(gpu_memory_utilization=0.5), None)
    assert "--gpu-memory-utilization 0.5 has no effect, because this executor uses no GPU" in caplog.text


class Card:
    """The memory of a GPU: ``total`` bytes, of which torch has ``taken`` some, this process's ``context`` and libraries
    some more, and other processes others."""

    def __init__(self, total: int, taken: int, others: int = 0) -> None:
        self.total, self.taken, self.context, self.others = total, taken, 0, others

    @property
    def free(self) -> int:
        return self.total - self.taken - self.context - self.others

    def pool(self, *, reserved: int = 0, **options: object) -> int:
        """Bytes of the pool."""
        block = 2**20
        config: SizedConfig = with_step_limits(ExecutorConfig(**options), H200)  # type: ignore[arg-type]
        return pool_size(config, block, CUDA, 131_072, reserved) * block


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card(total=80 * GIB, taken=16 * GIB)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (card.free, card.total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: card.taken)
    return card


def test_the_pool_takes_what_an_executors_share_of_the_gpu_leaves(card: Card) -> None:
    assert card.pool() == (72 - 16) * GIB
    assert card.pool(reserved=6 * GIB) == (72 - 16 - 6) * GIB
    assert card.pool(gpu_memory_utilization=0.5) == (40 - 16) * GIB


def test_executors_that_share_a_gpu_have_a_share_each(card: Card) -> None:
    card.context = GIB
    alone = card.pool(gpu_memory_utilization=0.45)
    card.others = 36 * GIB
    assert card.pool(gpu_memory_utilization=0.45) == alone


def test_what_a_process_takes_without_torch_is_part_of_its_share(card: Card) -> None:
    card.context = GIB // 2
    assert card.pool(gpu_memory_utilization=0.95) == (76 - 16) * GIB - GIB // 2
    assert card.pool(gpu_memory_utilization=0.95) + card.taken + card.context == 76 * GIB


def test_memory_that_others_use_is_not_counted_on(card: Card, caplog: pytest.LogCaptureFixture) -> None:
    card.others = 40 * GIB
    with caplog.at_level(logging.WARNING):
        found = card.pool()
    assert 23 * GIB < found < 24 * GIB
    assert "is another process using it?" in caplog.text


def test_a_gpu_without_room_for_a_pool_says_what_takes_it(card: Card) -> None:
    with pytest.raises(
        ModelError, match=r"--gpu-memory-utilization 0\.25, weights and the context take 16GiB and steps 5120MiB"
    ) as why:
        card.pool(gpu_memory_utilization=0.25, reserved=5 * GIB)
    assert "64GiB are free" in str(why.value)


def test_runners_say_how_large_their_steps_may_be(tmp_path: Path) -> None:
    assert SimulatedRunner(ExecutorConfig()).info.max_num_seqs == 256
    build_model("llama", tmp_path)
    info = build_runner(tmp_path, max_num_seqs=3, max_num_batched_tokens=50).info
    assert (info.max_num_seqs, info.max_num_batched_tokens) == (3, 50)


def test_auto_is_the_longest_sequence_that_fits(tmp_path: Path) -> None:
    build_model("llama", tmp_path)
    whole = build_runner(tmp_path, num_blocks=400, block_size=4).info.max_model_len
    assert build_runner(tmp_path, num_blocks=400, block_size=4, max_model_len="auto").info.max_model_len == whole
    runner = build_runner(tmp_path, num_blocks=9, block_size=4, max_model_len="auto")
    assert runner.info.max_model_len == 36 < whole
    asked = request(list(range(3, 33)), 6, "r")
    run_requests(runner, [asked], num_blocks=9)
    assert len(asked.sequences[0].output_token_ids) == 6
    assert SimulatedRunner(ExecutorConfig(num_blocks=3, max_model_len="auto")).info.max_model_len == 48
