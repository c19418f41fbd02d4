"""The cost of a step of pure decodes in the scheduler: schedule + encode + decode + update, in microseconds.

No model and no socket: the results are as an executor would answer. Blocks are allocated as sequences grow, full ones
enter the prefix cache, every token is checked for stops, and the garbage collector is tuned, as in service. Then the
cost of the KV memory by itself.
Prints tables and, with ``--json``, writes the numbers.
"""

import argparse
import gc
import statistics
import time
from array import array
from dataclasses import dataclass, field

from pagewise_scheduler.core.memory.prefix_tree import PrefixTree, block_keys
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.device import BlockPool
from pagewise_scheduler.core.tiers.kv_cache_manager import KVCacheManager
from pagewise_shared.protocol import (
    RequestParams,
    StepResult,
    decode_from_executor,
    decode_from_scheduler,
    encode,
    pack_int32s,
)
from pagewise_shared.sampling import SamplingParams
from pagewise_shared.service_process import tune_garbage_collector

from benchmarks.record import record_file, write_record

PROMPT_TOKENS = 128
BLOCK_SIZE = 16


@dataclass
class Sink:
    """Where sequences tell their tokens, as they do to the frame of a gateway."""

    streams: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def start(num_seqs: int, max_tokens: int, sink: Sink) -> Scheduler:
    """A scheduler whose ``num_seqs`` sequences have all finished their prefill, and tell their tokens to ``sink``."""
    scheduler = Scheduler(
        num_blocks=num_seqs * (-(-(PROMPT_TOKENS + max_tokens) // BLOCK_SIZE) + 2),
        block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
    )
    params = RequestParams(SamplingParams(temperature=0, stop_token_ids=(2, 7)))
    for number in range(num_seqs):
        # Lengths differ by up to a block, so that block boundaries spread over the steps. Nothing is shared.
        prompt = array("i", [number + 10, *[5] * (PROMPT_TOKENS - 1 + number % BLOCK_SIZE)])
        scheduler.add(request := Request(f"r{number}", prompt, max_tokens, params, arrival_time=float(number)))
        request.sequences[0].sink, request.sequences[0].stream = sink, number
    answered = 0
    while scheduler.num_waiting or answered < num_seqs:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        record = scheduler.steps_in_flight[-1]
        answered = len(record.sampled)
        scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s([5] * answered)))
    return scheduler


def measure(num_seqs: int, steps: int, repeats: int) -> list[float]:
    """Microseconds per step, one mean per repeat of ``steps`` steps."""
    means = []
    for _ in range(repeats):
        sink = Sink()
        scheduler = start(num_seqs, steps + 64, sink)
        gc.collect()  # the scheduler of the repeat before
        tune_garbage_collector()
        tokens = pack_int32s([5] * num_seqs)
        began = time.perf_counter()
        for _ in range(steps):
            assert not scheduler.features.messages(0.0)
            plan = scheduler.schedule(0.0)
            assert plan is not None
            received = decode_from_scheduler(encode(plan))
            result = StepResult(plan.epoch, received.step, tokens, elapsed_us=1000)  # type: ignore[union-attr]
            scheduler.update(decode_from_executor(encode(result)))  # type: ignore[arg-type]
            sink.streams, sink.tokens = [], []
        means.append((time.perf_counter() - began) / steps * 1e6)
    return means


def measure_memory(repeats: int) -> dict[str, float]:
    """Look-ups of an 8,192-token prompt that is cached (cold and known tokens), and blocks taken and given back."""
    num_tokens = 8192
    prompt = array("i", range(num_tokens))
    cached, hits, shared, cycles = [], [], [], []
    for _ in range(repeats):
        kv = KVCacheManager(num_blocks=4096, block_size=BLOCK_SIZE)
        table = kv.new_table()
        kv.grow(table, num_tokens)
        began = time.perf_counter()
        kv.cache_full_blocks(table, num_tokens, lambda start, stop: prompt[start:stop].tobytes())
        cached.append(time.perf_counter() - began)
        kv.free(table, None)
    for _ in range(repeats):
        began = time.perf_counter()
        tree = kv.pool.tree
        blocks = tree.walk(tree.root_of(None), block_keys(prompt.tobytes(), BLOCK_SIZE, num_tokens - 1))
        found = kv.begin_with(None, blocks, prompt[len(blocks) * BLOCK_SIZE : num_tokens - 1].tobytes())
        hits.append(time.perf_counter() - began)
        assert found.num_tokens == num_tokens - 1
        table = kv.new_table()
        kv.take(table, found)
        shared.append(time.perf_counter() - began)
        kv.free(table, None)
        pool = BlockPool(4096, PrefixTree(BLOCK_SIZE))
        began = time.perf_counter()
        for _ in range(20):
            pool.release(pool.reserve(4000)[0])
        cycles.append((time.perf_counter() - began) / 80_000)
    return {
        "lookup_8192_tokens_us": round(statistics.median(hits) * 1e6, 1),
        "lookup_and_take_8192_tokens_us": round(statistics.median(shared) * 1e6, 1),
        "cache_full_block_us": round(statistics.median(cached) / (num_tokens / BLOCK_SIZE) * 1e6, 2),
        "allocate_and_release_million_blocks_per_second": round(1e-6 / statistics.median(cycles), 2),
    }


def measure_long(num_tokens: int) -> dict[str, float]:
    """One sequence of ``num_tokens`` tokens: the cost of a chunk early and late, of a decode at the end, and of a full
    hit."""
    chunk = 2048
    scheduler = Scheduler(
        num_blocks=num_tokens // BLOCK_SIZE + 64, block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=chunk
    )
    prompt = array("i", range(num_tokens))
    params = RequestParams(SamplingParams(temperature=0))
    scheduler.add(Request("first", prompt, 400, params))
    times = []
    for _ in range(num_tokens // chunk + 300):
        began = time.perf_counter()
        plan = scheduler.schedule(0.0)
        assert plan is not None
        encode(plan)
        sampled = len(scheduler.steps_in_flight[-1].sampled)
        scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s([5] * sampled), elapsed_us=1000))
        times.append((time.perf_counter() - began) * 1e6)
    scheduler.abort("first")
    scheduler.add(Request("second", prompt, 4, params))
    began = time.perf_counter()
    plan = scheduler.schedule(0.0)
    assert plan is not None
    encode(plan)
    hit = time.perf_counter() - began
    assert [size for _, size in plan.chunks] == [1]
    chunks = num_tokens // chunk
    return {
        "tokens": num_tokens,
        "chunk_early_us": round(statistics.median(times[1:17]), 1),
        "chunk_late_us": round(statistics.median(times[chunks - 16 : chunks - 1]), 1),
        "decode_us": round(statistics.median(times[chunks + 4 :]), 1),
        "full_hit_ms": round(hit * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps per repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows = []
    for num_seqs in (64, 256, 1024):
        means = measure(num_seqs, args.steps, args.repeats)
        median = statistics.median(means)
        rows.append(
            {
                "running_sequences": num_seqs,
                "us_per_step_median": round(median, 1),
                "us_per_step_min": round(min(means), 1),
                "us_per_sequence_median": round(median / num_seqs, 3),
            }
        )
    print(f"{'running':>8} {'us/step':>9} {'min':>9} {'us/step/sequence':>17}")
    for row in rows:
        print(
            f"{row['running_sequences']:>8} {row['us_per_step_median']:>9} {row['us_per_step_min']:>9} "
            f"{row['us_per_sequence_median']:>17}"
        )
    memory = measure_memory(args.repeats)
    for name, value in memory.items():
        print(f"{name:>48} {value:>9}")
    long = measure_long(262_144)
    print("one sequence of 262,144 tokens: " + ", ".join(f"{name} {value}" for name, value in long.items()))
    if args.json:
        write_record(args.json, {"rows": rows, "memory": memory, "long_context": long})


if __name__ == "__main__":
    main()
