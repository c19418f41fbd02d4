"""Loading and computing at once on a GPU, in simulated time, with speeds that were measured on an H200.

Scheduler, worker and host tier are the real ones; only the device is simulated, with its streams and their cost on the
host. Times are predictions for a real device.
"""

from collections.abc import Iterator
from statistics import median

import numpy as np
import pytest
from pagewise_executor.block_copies import CopyJob
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_shared.protocol import DEVICE, HOST

from tests.executor.streams.bench import H200, H200_SLOW, QWEN3, qwen3_on_h200
from tests.executor.streams.device import Operation, Speeds

LINKS = [pytest.param(H200, id="fast"), pytest.param(H200_SLOW, id="slow")]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.parametrize("tokens", [128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536])
@pytest.mark.parametrize("speeds", LINKS)
def test_auto_takes_the_best_way_and_both_at_once_adds_the_two_rates(
    patch: pytest.MonkeyPatch, speeds: Speeds, tokens: int
) -> None:
    bench = qwen3_on_h200(patch, tokens, speeds)
    auto = median([bench.recover("auto")[0] for _ in range(10 if tokens <= 2048 else 5)][-3:])
    cached = bench.first_token()
    load, compute, both = (bench.recover(mode)[0] for mode in ("swap", "recompute", "both"))  # type: ignore[arg-type]
    bench.close()
    assert auto <= 1.05 * min(load, compute, both), (auto, load, compute, both)
    if tokens >= 2048:
        assert both <= 0.9 * min(load, compute), (both, load, compute)
    if tokens >= 8192:  # shorter prompts wait for messages and for the interpreter lock as long as for the device
        together = 1 / (1 / (load - cached) + 1 / (compute - cached))
        assert both - cached <= 1.1 * together, (both, cached, load, compute)
    if tokens >= 16_384:
        assert both <= 1.1 / (1 / load + 1 / compute), (both, load, compute)


def test_what_was_measured_wrongly_is_corrected_within_ten_recoveries(patch: pytest.MonkeyPatch) -> None:
    """It starts with the costs of a link of 49 GB/s in front of one of 33 GB/s, as on the H200."""
    wrong = Costs(1.09e-3, 3.0e-6, 0.53e-9, tiers={HOST: CopyCosts(171e-6, 37.4e-6, 171e-6, 37.4e-6)})
    bench = qwen3_on_h200(patch, 16_384, H200_SLOW, wrong)
    for _ in range(10):
        bench.recover("auto")
    for mode in ("swap", "both"):
        report = bench.recover(mode)[1]
        assert report.predicted == pytest.approx(report.ended - report.began, rel=0.1)
    bench.close()


def test_the_front_takes_no_longer_for_what_is_loaded_behind_it(patch: pytest.MonkeyPatch) -> None:
    bench = qwen3_on_h200(patch, 32_768, H200)
    bench.recover("both")
    steps = [(began, ended) for began, ended, _, name in sorted(bench.device.log) if name.startswith("step")]
    copies = sorted((began, ended) for began, ended, _, name in bench.device.log if name == "copy in")
    computed, start = 0.0, 0
    for _, _, _, name in sorted(bench.device.log):
        if name.startswith("step"):
            size = int(name.removeprefix("step of "))
            start = 32_752 if size == 16 else start  # the tokens behind the loaded ones
            computed += QWEN3.step + QWEN3.token * size + QWEN3.attention * size * (start + size / 2)
            start += size
    bench.close()
    assert sum(ended - began for began, ended in steps) <= 1.05 * computed
    link = sum(ended - began for began, ended in copies)
    assert copies[-1][1] - copies[0][0] <= 1.03 * link, "the link rests"
    assert copies[0][0] <= steps[0][0] + 1e-3, "it works from the first step on"


def test_a_load_waits_for_what_reads_its_blocks_and_for_no_step(patch: pytest.MonkeyPatch) -> None:
    bench = qwen3_on_h200(patch, 128, H200)
    machine, device, runner = bench.machine, bench.device, bench.runner
    done: list[float] = []
    pool, host = runner.pool, runner.host
    pool.cells[3], pool.cells[5] = "three", "five"
    host.report = lambda message: done.append(machine.now)

    def begin(step: int, source: int, target: int, pair: tuple[int, int]) -> None:
        host.begin(CopyJob(1, step, source, target, np.array([pair], np.int32)), runner.copier.tiers[DEVICE])

    device.issue(Operation("compute", 50e-3, name="a long step"))
    began = machine.now
    begin(1, DEVICE, HOST, (3, 7))
    pool.copy_blocks(np.array([[5, 6]], np.int32))
    begin(2, HOST, DEVICE, (7, 4))  # the stored block comes back to another place
    machine.wait(lambda: len(done) == 1)
    assert machine.now - began < 2e-3, "the store waits for no step"
    begin(3, HOST, DEVICE, (7, 5))  # which the copy inside the device still has to read
    machine.wait(lambda: len(done) == 3)
    assert machine.now - began > 50e-3
    assert [pool.cells[block] for block in (3, 4, 5, 6)] == ["three", "three", "three", "five"]
    assert not device.races
    bench.close()
