"""Models with several groups of layers in reports and consoles: pages, tables, snapshots, and lost ones."""

from itertools import pairwise

import msgspec
import pytest
from pagewise.memory_map import memory_map
from pagewise_scheduler.core.console.block_map import MarkedBlocks, group_cells
from pagewise_scheduler.core.memory_report import memory_report
from pagewise_scheduler.core.request_report import request_report
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.arena import WindowShape
from pagewise_shared.protocol import HOST
from pagewise_shared.reports import SnapshotReport, TableReport

from tests.scheduler.core.arenas import create
from tests.scheduler.core.builders import create_request
from tests.scheduler.core.checking_executor import CheckingExecutor
from tests.scheduler.core.driving import executor_for, run

WINDOW, STATES = WindowShape(9, 2), WindowShape(2, 7, state=True)


def serve(scheduler: Scheduler, executor: CheckingExecutor, prompt: list[int], max_tokens: int = 3) -> Request:
    request = create_request(prompt=prompt, max_tokens=max_tokens)
    scheduler.add(request)
    run(scheduler, executor)
    return request


def others(number: int) -> list[list[int]]:
    """Prompts of 130 tokens that have nothing in common."""
    return [[1000 * (other + 1) + i for i in range(130)] for other in range(number)]


def test_a_sequence_tells_its_blocks_in_each_group() -> None:
    scheduler = create(600, 1, (WINDOW, STATES))
    executor = executor_for(scheduler)
    request = create_request(prompt=[*range(90)], max_tokens=40)
    scheduler.add(request)
    for _ in range(12):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.update(executor.execute(plan))
    (sequence,) = request_report(request, scheduler, 1.0, 10).sequences
    full, window, states = sequence.groups
    assert full == TableReport("full", 0, sequence.num_blocks, sequence.num_blocks)
    assert (window.kind, window.window, window.pages) == ("window", 9, 2 * window.num_blocks)
    assert window.first + 4 * window.num_blocks == 4 * full.num_blocks
    assert (states.kind, states.pages) == ("state", 7 * states.num_blocks)
    assert states.tokens[-1] == sequence.num_computed_tokens // 4 * 4, "behind the last full block"
    device = memory_report("e", scheduler, 1.0, 10).device
    assert [one.in_use for one in device.groups][1:] == [window.pages, states.pages]


def test_the_tree_tells_where_snapshots_are() -> None:
    scheduler = create(600, 1, (WINDOW, STATES))
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(101)], 12)
    serve(scheduler, executor, [*range(101), 9, 9])
    report = memory_report("e", scheduler, 1.0, 100)
    found = [one for run in report.tree for one in run.snapshots]
    states = [one for one in found if one.kind == "state"]
    assert states[0] == SnapshotReport("state", 2, "device", 21, 1, used=True)
    assert {one.depth for one in states} == {21, 25, 26, 28}
    assert len(states) == report.device.groups[2].snapshots
    assert [one for one in found if one.kind == "window"]
    assert sum(one.places for one in states) == len(states), "states serve one place alone"


@pytest.mark.parametrize("host_pages", [0, 900])
def test_pages_of_maps_add_up(host_pages: int) -> None:
    scheduler = create(160, 1, (WINDOW, STATES), host_pages=host_pages, recovery="swap")
    executor = executor_for(scheduler)
    for prompt in others(4):
        serve(scheduler, executor, prompt)
    request = create_request(prompt=[*range(50)], max_tokens=40)
    scheduler.add(request)
    assert scheduler.schedule(0.0) is not None
    kv = scheduler.kv
    counts = MarkedBlocks(scheduler, kv.pool, 0.0).device_counts(kv)
    assert sum(msgspec.structs.astuple(counts)) == kv.num_total == 160
    for tier in kv.tiers.values():
        total = 160 if tier is kv.pool else host_pages
        single, legend = group_cells(kv, tier, 0, total, 1)
        assert [name for _, name in legend] == [
            *("full in use", "full cached", "window 9 in use", "window 9 cached", "state in use", "state cached"),
            "free",
        ]
        colours = single[::2]
        assert all(before <= after for before, after in pairwise(colours)), "in the order of the legend"
        groups = memory_report("e", scheduler, 1.0, 10).device.groups if tier is kv.pool else []
        for number, group in enumerate(groups):
            assert (colours.count(2 * number), colours.count(2 * number + 1)) == (group.in_use, group.cached)
        seven, _ = group_cells(kv, tier, 3, total - 3, 7)
        assert len(seven) == 2 * -(-(total - 3) // 7)
        for cell, (colour, share) in enumerate(zip(seven[::2], seven[1::2], strict=True)):
            covered = colours[3 + 7 * cell : 10 + 7 * cell]
            assert covered.count(colour) == max(map(covered.count, covered))
            assert share == 255 * covered.count(colour) // len(covered)


def test_snapshots_that_go_down_and_come_back_are_counted() -> None:
    scheduler = create(160, 1, (STATES, WINDOW), host_pages=900, recovery="swap")
    executor, counters = executor_for(scheduler), scheduler.kv.pool.counters
    answer = serve(scheduler, executor, [*range(120)], 12).sequences[0].output_token_ids.tolist()
    for prompt in others(4):
        serve(scheduler, executor, prompt)
    assert counters.snapshots_demoted >= 2
    assert counters.snapshots_loaded == 0
    assert counters.snapshots_demoted + counters.snapshots_unused <= counters.snapshots_taken
    host = memory_report("e", scheduler, 1.0, 100).tiers["host"]
    assert host.used == sum(one.in_use + one.cached for one in host.groups)
    assert 2 <= sum(one.snapshots for one in host.groups) <= counters.snapshots_demoted
    serve(scheduler, executor, [*range(120), *answer, 7, 7])
    assert counters.snapshots_loaded == 2, "of states, and of the window"


def test_states_that_came_back_spoilt_are_told_so() -> None:
    scheduler = create(160, 1, (STATES,), host_pages=900, recovery="swap")
    executor = executor_for(scheduler)
    prompt = [*range(120)]
    serve(scheduler, executor, prompt, 12)
    for other in others(4):
        serve(scheduler, executor, other)
    executor.spoilt_windows = set(range(900))
    serve(scheduler, executor, [*prompt, 7, 7])
    history = scheduler.kv.eviction_history
    reasons = {run.reason for run in history.lost._new.values() if run.policy}
    assert "corrupt" in reasons
    assert history.reason == "evicted"


def test_states_of_a_lost_executor_are_told_so() -> None:
    scheduler = create(600, 1, (STATES,))
    serve(scheduler, executor_for(scheduler), [*range(60)], 12)
    number = len(scheduler.kv.windows[0].at)
    before = len(scheduler.kv.eviction_history.lost)
    scheduler.kv.close("executor lost")
    lost = scheduler.kv.eviction_history.lost
    assert len(lost) - before == 17 + number, "its blocks and its snapshots"
    assert {run.reason for run in lost._new.values()} == {"executor lost"}


def test_a_terminal_draws_the_tree_with_snapshots() -> None:
    scheduler = create(600, 2, (WINDOW, STATES), host_pages=500)
    executor = executor_for(scheduler)
    serve(scheduler, executor, [*range(61)])
    for beyond in (8, 9):
        serve(scheduler, executor, [*range(30), *(100 * beyond + i for i in range(20))])
    report = memory_report("executor-0", scheduler, 1.0, 100)
    groups = report.device.groups
    lines = [*memory_map(msgspec.to_builtins(report))]
    assert lines[0] == "executor-0: 0 running, 0 waiting, blocks of 4 tokens"
    words = [line.split() for line in lines]
    assert words[2] == ["device", "full", "2", "0", str(groups[0].cached)]
    assert words[3] == ["device", "window", "9", "2", "0", str(groups[1].cached), str(groups[1].snapshots)]
    assert words[4] == ["device", "state", "7", "0", str(groups[2].cached), str(groups[2].snapshots)]
    assert words[5] == ["device", "none", str(report.device.free)]
    assert words[9] == ["host", "none", "500"]
    assert lines[10] == f"  prefix tree: {report.tree_blocks} blocks; * snapshots"
    assert lines[11].startswith("  `-- blocks 1-7: device 7  *7 (")
    assert "state, used: device" in lines[11]
    branches = lines[12:]
    assert [line[:10] for line in branches] == ["      |-- ", "      |-- ", "      `-- "]
    assert all("blocks 8-" in line and "*" in line for line in branches)


def test_other_models_have_no_groups() -> None:
    scheduler = Scheduler(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=32, tiers={HOST: 16})
    serve(scheduler, executor_for(scheduler), [*range(30)])
    report = memory_report("e", scheduler, 1.0, 10)
    assert report.device.groups == report.tiers["host"].groups == report.tree[0].snapshots == []
    cells, legend = group_cells(scheduler.kv, scheduler.kv.pool, 0, 40, 1)
    assert [name for _, name in legend] == ["full in use", "full cached", "free"]
    assert cells[::2].count(1) == report.device.cached == 8
    lines = [line.split() for line in memory_map(msgspec.to_builtins(report))]
    assert lines[2:4] == [["device", "all", "1", "0", "8", "32"], ["host", "all", "1", "0", "0", "16"]]
