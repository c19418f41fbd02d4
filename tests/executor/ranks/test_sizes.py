"""All ranks have the sizes of the one that has the least room, and none is faster than the slowest."""

from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from pagewise_executor import main, model_runner
from pagewise_executor.collectives import Ranks
from pagewise_executor.device_defaults import with_step_limits
from pagewise_executor.kv import kv_pool
from pagewise_executor.kv.kv_pool import KVPool, pool_size
from pagewise_executor.leading_runner import LeadingRunner
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.ranks.messages import Ready
from pagewise_executor.tiers import host as host_tier
from pagewise_executor.tiers.host import make_host_tier
from pagewise_executor.tiers.make_tiers import make_tiers
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import DISK, Hello

from tests.executor.ranks.groups import ThreadGroup, config_of
from tests.model_builders import build_model


def test_ranks_agree_on_blocks_and_on_the_longest_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    rooms = count(12, -1)  # each rank finds less than the one before, and less each time it looks
    monkeypatch.setattr(model_runner, "pool_size", lambda *_: next(rooms))
    group = ThreadGroup(tmp_path, 2, max_model_len="auto", num_blocks=None)
    first, second = group.runners
    assert (first._longest, second._longest) == (11 * 8, 11 * 8)
    assert [runner.info.num_blocks for runner in group.runners] == [9, 9]
    assert [runner.info.max_model_len for runner in group.runners] == [9 * 8, 9 * 8]
    group.close()


def test_an_executor_is_as_slow_as_its_slowest_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    choose = model_runner.choose_compute

    def choose_compute(config, loaded, *others):  # type: ignore[no-untyped-def]
        loaded.fallback = loaded.ranks.rank == 1
        return choose(config, loaded, *others)

    monkeypatch.setattr(model_runner, "choose_compute", choose_compute)
    group = ThreadGroup(tmp_path, 2)
    assert group.info.fallback
    group.close()


class Two(Ranks):
    """One of two ranks, without the other one. ``others``: the count of the other one."""

    def __init__(self, rank: int, number: int = 0, *, on_host: int = 2, others: int = 2**31) -> None:
        super().__init__(rank, 2, on_host)
        self._number, self._others = number, others
        self.told: list[int] = []

    def of_first(self, number: int) -> int:
        self.told.append(number)
        return number if self.first else self._number

    def least(self, count: int) -> int:
        return min(count, self._others)


CPU = torch.device("cpu")
POOL = KVPool([(1, 8)], 4, 8, torch.float32, CPU)


def test_ranks_share_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "free_memory", lambda _: 3 * 2**20)
    config = with_step_limits(ExecutorConfig(kv_memory="2MiB", tensor_parallel=2), None)
    with pytest.raises(
        ModelError, match="asks for 2048KiB on each of 2 ranks, and 3072KiB are free on cpu: lower --kv-memory"
    ):
        pool_size(config, 1024, CPU, 64, on_host=2)
    assert pool_size(config, 1024, CPU, 64, on_host=1) == 2048, "the other one is on another host"
    monkeypatch.setattr(kv_pool, "free_memory", lambda _: 4 * 2**20)
    assert pool_size(config, 1024, CPU, 64, on_host=2) == 2048


def test_ranks_share_the_host_tier_and_its_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "free_memory", lambda _: 3 * 2**20)
    config = ExecutorConfig(host_memory="4MiB", host_bandwidth="10MiB", tensor_parallel=2)
    for rank in range(2):
        with pytest.raises(ModelError, match="--host-memory 4MiB"):
            make_host_tier(config, POOL, None, "content", Two(rank))
    monkeypatch.setattr(host_tier, "free_memory", lambda _: 4 * 2**20)
    for rank in range(2):
        tier = make_host_tier(config, POOL, None, "content", Two(rank))
        assert tier.num_blocks == 2 * 2**20 // POOL.bytes_per_block
        assert tier._copies.bandwidth == 5 * 2**20


def test_ranks_on_two_hosts_share_neither_and_have_as_many_blocks_as_the_host_with_more_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host_tier, "free_memory", lambda _: 4 * 2**20)
    config = ExecutorConfig(host_memory="4MiB", host_bandwidth="10MiB", tensor_parallel=2)
    for blocks in (2**31, 3 * 2**20 // POOL.bytes_per_block):
        tier = make_host_tier(config, POOL, None, "content", Two(1, on_host=1, others=blocks))
        assert tier.num_blocks == min(blocks, 4 * 2**20 // POOL.bytes_per_block)
        assert tier._copies.bandwidth == 10 * 2**20
    with pytest.raises(ModelError, match="--host-memory 4MiB"):
        make_host_tier(config, POOL, None, "content", Two(1, on_host=1, others=0))


def test_the_files_of_weights_are_read_by_one_rank_to_tell_what_storage_holds(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.write_bytes(bytes(range(256)))
    config = ExecutorConfig(disk_cache=str(tmp_path / "disk"), profile=False)
    alone = make_tiers(config, POOL, "model", "format", [weights])
    first = Two(0)
    leads = make_tiers(config, POOL, "model", "format", [weights], ranks=first)
    assert leads[DISK].identity == alone[DISK].identity
    follows = make_tiers(config, POOL, "model", "format", [tmp_path / "not read"], ranks=Two(1, first.told[0]))
    assert np.int64(first.told[0]) == first.told[0]
    assert len(first.told) == 2
    for tiers in (alone, leads, follows):
        tiers[DISK].close()


def test_a_pool_that_is_too_small_is_told_of_as_each_rank_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        info = Hello(1, 0, "", "model", 100, 64, 8, 2, 2 * 1024)

    monkeypatch.setattr(main, "lead", lambda *_: Small())
    with pytest.raises(ModelError, match="needs 8 blocks, 8KiB: raise --kv-memory"):
        main._build_useful_runner(ExecutorConfig(tensor_parallel=2), None)


def test_a_rank_that_computes_otherwise_ends_the_start(tmp_path: Path) -> None:
    """The other rank is not there: it only reports that it is ready."""
    build_model("llama", tmp_path, num_hidden_layers=1)

    class Leads:
        size, rank = 2, 0

        def ready(self) -> list[Ready]:
            return [Ready("", "another", {})]

    with pytest.raises(ModelError, match=r"and 1 \(another\) do not compute the same"):
        LeadingRunner(Leads(), config_of(tmp_path, 1))  # type: ignore[arg-type]


@pytest.mark.interpreted
def test_every_rank_warms_up_its_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_model("llama", tmp_path, num_hidden_layers=1)
    config = config_of(tmp_path, 1, kernels="triton", max_num_seqs=1, cuda_graphs=False)
    group = ThreadGroup(tmp_path, 2, kernels="triton", max_num_seqs=1)
    copied: list[str] = []
    for name in ("gather", "scatter", "copy_blocks"):
        monkeypatch.setattr(KVPool, name, lambda *_, name=name: copied.append(name))

    class NoGraphs:
        adapters = None

        def warm_up(self) -> None:
            pass

        @property
        def decodes(self) -> "NoGraphs":
            return self

    for runner in group.runners:
        ModelRunner._capture(runner, NoGraphs(), with_step_limits(config, None))  # type: ignore[arg-type]
    assert copied == 2 * ["gather", "scatter", "copy_blocks"]
    group.close()
