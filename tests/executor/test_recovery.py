"""KV that went to the host and came back gives the tokens that transformers gives, whatever the method of recovery."""

import queue
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pagewise_executor import profile
from pagewise_executor.block_copies import CopyJob
from pagewise_executor.tiers import host_copies
from pagewise_executor.tiers.disk import DiskTier
from pagewise_executor.tiers.host_copies import Job
from pagewise_executor.tiers.tier import Tier
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.block_hash import BlockName
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import DEVICE, DISK, HOST, BlockCopies, Copied, StepPlan, Welcome, pack_int32s

from tests.executor.driver import request, run_requests
from tests.executor.parity import check_mixture, check_recovery
from tests.executor.references import reference
from tests.executor.runners import build_runner, host_of
from tests.model_builders import VOCAB_SIZE, build_model, model_fixture

model_path = model_fixture("llama", seed=5)


@pytest.mark.parametrize("mode", ["swap", "recompute", "both", "auto"])
@pytest.mark.parametrize("num_blocks", [14, 17, 25])
def test_greedy_tokens_stay_equal_whichever_method_recovers_kv(
    model_path: Path, mode: RecoveryMode, num_blocks: int
) -> None:
    _, loaded = check_recovery(model_path, mode, num_blocks)
    assert (loaded > 0) == (mode != "recompute")


@pytest.mark.parametrize("mode", ["swap", "both"])
def test_several_outputs_of_one_prompt_come_back_too(model_path: Path, mode: RecoveryMode) -> None:
    assert check_recovery(model_path, mode, 21, n=4)[1] > 0


@pytest.mark.parametrize("seed", range(4))
def test_everything_mixed_at_random(model_path: Path, seed: int) -> None:
    check_mixture(model_path, seed, block_size=random.Random(seed).choice([3, 8, 16]))


@pytest.mark.long
@pytest.mark.parametrize("family", ["glm4_moe", "minimax_m2", "qwen3_moe"])
def test_further_families_in_too_little_memory(family: str, tmp_path: Path) -> None:
    """Of one group of layers; test_latents.py and test_windows_in_tiers.py have the others."""
    build_model(family, tmp_path, seed=5)
    assert check_recovery(tmp_path, "swap", 17, n=2)[1] > 0
    assert check_recovery(tmp_path, "recompute", 17)[1] == 0
    check_mixture(tmp_path, 1, block_size=3)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["swap", "both", "auto"])
def test_greedy_tokens_stay_equal_on_a_gpu(model_path: Path, mode: RecoveryMode) -> None:
    assert check_recovery(model_path, mode, 17, device="cuda")[1] > 0


def test_what_a_full_host_gives_up_goes_to_the_disk(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(model_path, host_memory="24KiB", disk_cache=str(tmp_path))
    disk, taken = runner._copier.tiers[DISK], list[BlockName]()
    begin = disk.begin

    def watched(job: CopyJob, upper: Tier) -> None:
        taken.extend(job.names if job.source == HOST else ())
        begin(job, upper)

    monkeypatch.setattr(disk, "begin", watched)
    rng = random.Random(3)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (100, 41, 64, 90, 77)]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    requests = [request(prompt, 30, name=f"r{number}") for number, prompt in enumerate(prompts)]
    run_requests(runner, requests, num_blocks=22, recovery="swap", max_num_seqs=8)
    expected = reference(model, prompts, [30] * len(prompts), "cpu")
    assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected
    assert isinstance(disk, DiskTier)
    assert taken
    until = time.monotonic() + 20
    while not all(disk.contains(taken)):
        assert time.monotonic() < until
        time.sleep(0.01)
    runner.close()


def test_a_corrupt_block_is_found_by_its_checksum_and_computed_again(model_path: Path) -> None:
    runner = build_runner(model_path)
    host = host_of(runner)
    rng = random.Random(1)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(80)] for _ in range(3)]
    model = transformers.AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = reference(model, [*prompts, prompts[0]], [8] * 4, "cpu")
    store = host._store

    def store_badly(job: Job, asked: CopyJob, stream: torch.cuda.Stream | None) -> None:
        store(job, asked, stream)
        for slot in job.pairs[::3, 1].tolist():
            host.memory.slot(slot)[0] ^= 1

    host._store = store_badly  # type: ignore[method-assign]
    requests = [request(prompt, 8, name=f"r{i}") for i, prompt in enumerate([*prompts, prompts[0]])]
    scheduler, _ = run_requests(runner, requests, num_blocks=13, arrive_every=1000, recovery="swap")
    assert scheduler.kv.pool.counters.corrupt > 0
    assert [r.sequences[0].output_token_ids.tolist() for r in requests] == expected


def test_a_copy_that_goes_wrong_on_its_way_to_the_host_is_found(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = build_runner(model_path)
    device, host = runner._copier.tiers[DEVICE], host_of(runner)
    done: queue.SimpleQueue[Copied] = queue.SimpleQueue()
    host.report = done.put
    pairs = np.array([[3, 7]], np.int32)

    def copy_badly(target: np.ndarray, source: np.ndarray) -> None:
        np.copyto(target, source)
        target[0] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(host_copies, "copy_rows", copy_badly)
        host.begin(CopyJob(0, 1, DEVICE, HOST, pairs), device)
        assert done.get(timeout=10).bad == b""
    host.begin(CopyJob(0, 2, HOST, DEVICE, pairs[:, ::-1]), device)
    assert done.get(timeout=10).bad == pack_int32s([3])


def test_a_block_may_be_copied_and_then_loaded_into_in_one_step(model_path: Path) -> None:
    runner = build_runner(model_path)
    runner.reset(Welcome(1, 4, 64))
    done: queue.SimpleQueue[Copied] = queue.SimpleQueue()
    runner.report_to(done.put)
    keys = runner._pool.keys[0]
    keys[5] = 7.0
    runner.execute(StepPlan(1, 1, copies=(BlockCopies(DEVICE, HOST, pack_int32s([5, 0])),)))
    done.get(timeout=10)
    for step in range(2, 200):
        keys[5], keys[6] = 1.0, 0.0
        copy, load = BlockCopies(DEVICE, DEVICE, pack_int32s([5, 6])), BlockCopies(HOST, DEVICE, pack_int32s([0, 5]))
        runner.execute(StepPlan(1, step, copies=(copy, load)))
        done.get(timeout=10)
        assert (keys[6] == 1.0).all()
        assert (keys[5] == 7.0).all()


def test_a_link_that_hardly_moves_is_profiled_quickly_or_refused(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.perf_counter()
    build_runner(model_path, host_bandwidth="20KB", profile=True, host_memory="1MiB")
    assert time.perf_counter() - began < 20
    monkeypatch.setattr(profile, "_COPY_TIMEOUT", 0.2)
    with pytest.raises(ModelError, match="--host-bandwidth"):
        build_runner(model_path, host_bandwidth="1KB", profile=True, host_memory="1MiB")


def test_a_slow_link_takes_its_time(model_path: Path) -> None:
    runner = build_runner(model_path, host_bandwidth="1MB", profile=True, host_memory="1MiB")
    (host,), costs = runner.info.tiers, runner.info.costs
    for took in (host.load_block, host.store_block):
        assert took == pytest.approx(runner.info.bytes_per_block, rel=0.2), "microseconds at 1 MB/s"
    assert costs is not None
    assert costs.token > 0


def test_too_much_host_memory_is_refused(model_path: Path) -> None:
    with pytest.raises(ModelError, match="--host-memory 900TiB"):
        build_runner(model_path, host_memory="900TiB")
    with pytest.raises(ModelError, match="one KV block takes"):
        build_runner(model_path, host_memory="16")
