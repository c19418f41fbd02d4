"""How the scheduler holds up when sequences need more memory than there is."""

from pathlib import Path

import pytest
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace
from pagewise_shared.protocol import HOST

TRACE = Path(__file__).parents[3] / "benchmarks" / "traces" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz"


def tokens_per_second(trace: list[TraceRequest], pool_tokens: int, host_tokens: int, mode: RecoveryMode) -> float:
    costs = llama_3_8b(16)
    scheduler = Scheduler(
        num_blocks=pool_tokens // 16,
        block_size=16,
        max_num_seqs=len(trace),
        max_num_batched_tokens=8192,
        tiers={HOST: host_tokens // 16},
        costs=costs.prefill,
        recovery=mode,
        eviction="cost",
    )
    outcome = Simulation([scheduler], costs).run(trace)
    assert len(outcome.served) == len(trace), "everybody finishes"
    assert scheduler.kv.num_available == scheduler.kv.pool.num_blocks
    return sum(request.num_output_tokens for request in trace) / outcome.seconds


@pytest.mark.parametrize("mode", ["recompute", "swap", "auto"])
def test_three_times_the_load_costs_less_than_a_fifth_of_the_goodput(mode: RecoveryMode) -> None:
    trace = read_trace(TRACE, limit=128)
    for request in trace:
        request.arrival = 0.0
    working_set = sum(request.num_prompt_tokens + request.num_output_tokens for request in trace)
    relaxed = tokens_per_second(trace, int(working_set / 0.9), 0, "auto")
    crowded = tokens_per_second(trace, working_set // 3, working_set, mode)
    assert crowded >= 0.8 * relaxed
