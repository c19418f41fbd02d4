"""Memory by granularity: what is lost at the ends of sequences, and because whole pages are shared or nothing."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace

TRACES = Path(__file__).parents[1] / "traces"
FILES = {
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "conversations": "mooncake_conversation_first1000.jsonl.gz",
    "agents": "cc_agentic_max64k_min10req.rle.jsonl.gz",
    "ShareGPT": "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz",
}
TOKEN_OF_LAYER = 8 * 128 * 2
"""Bytes of K, or of V, of a token in one layer of Llama 3 8B in bfloat16."""
TOKEN = 2 * 32 * TOKEN_OF_LAYER
POOL_TOKENS = 40 * 2**30 // TOKEN
SIZES = (2, 16, 32, 64, 128, 256, 512, 1024)
PAGES = {
    "4 KiB, a layer": 4 * 2**10 // TOKEN_OF_LAYER,
    "64 KiB, a layer": 64 * 2**10 // TOKEN_OF_LAYER,
    "2 MiB, a layer": 2 * 2**20 // TOKEN_OF_LAYER,
    "2 MiB, all layers": 2 * 2**20 // TOKEN,
}
"""Tokens per page."""


def read(name: str) -> list[TraceRequest]:
    return read_trace(TRACES / FILES[name], rate=10.0)


class _Node:
    """A block of the trace after the blocks before it. ``tokens``: of it, as many as any request so far has had."""

    __slots__ = ("following", "start", "tokens")

    def __init__(self, start: int) -> None:
        self.following: dict[int, _Node] = {}
        self.start = start
        self.tokens = 0


def lost(trace: Iterable[TraceRequest], size: int) -> dict[str, float]:
    """What whole pages of ``size`` tokens lose, by arithmetic over a trace whose requests come one after the other.

    Nothing is ever evicted. ``tails``: share of the slots of all sequences, at their full length, that hold no token.
    ``memory``: what the pages of all sequences take, as a multiple of their distinct tokens, stored once each.
    ``reused``: share of the prompt tokens that an earlier request has left in full pages; the newest is always computed.
    """
    root = _Node(0)
    slots = held = distinct = pages = prompts = reused = 0
    for request in trace:
        node, known, matches = root, 0, True
        left = request.num_prompt_tokens
        for block in request.blocks:
            if left <= 0:
                break
            taken = min(left, request.block_tokens)
            left -= taken
            start = node.start + (request.block_tokens if node is not root else 0)
            node = node.following.setdefault(block, _Node(start))
            if matches:
                known = start + min(taken, node.tokens)
                matches = node.tokens >= taken == request.block_tokens
            if taken > node.tokens:
                pages += (start + taken) // size - (start + node.tokens) // size
                distinct += taken - node.tokens
                node.tokens = taken
        length = request.num_prompt_tokens + request.num_output_tokens
        shared = request.num_prompt_tokens - left  # the rest is the request's own
        distinct += length - shared
        pages += -(-length // size) - shared // size
        held += length
        slots += -(-length // size) * size
        prompts += request.num_prompt_tokens
        reused += min(known, request.num_prompt_tokens - 1) // size * size
    return {
        "tails": round(1 - held / slots, 4),
        "memory": round(pages * size / distinct, 4),
        "reused": round(reused / prompts, 4),
    }


def served(trace: list[TraceRequest], size: int) -> dict[str, Any]:
    """Serve a trace with the scheduler that serves, under a virtual clock, in 40 GiB of pages of ``size`` tokens."""
    costs = llama_3_8b(size)
    scheduler = Scheduler(
        num_blocks=POOL_TOKENS // size,
        block_size=size,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        costs=costs.prefill,
        eviction="cost",
    )
    runs: list[tuple[int, int]] = []

    def watch(_: float) -> None:
        tables = [sequence.table.blocks for sequence in scheduler.running]
        breaks = sum(after != before + 1 for table in tables for before, after in zip(table, table[1:], strict=False))
        runs.append((sum(map(len, tables)), breaks + len(tables)))

    outcome = Simulation([scheduler], costs, watch=watch).run(trace)
    done = outcome.served
    tokens = sum(sample.used for sample in outcome.samples)
    return {
        "hit_rate": round(
            sum(one.request.num_cached_tokens for one in done) / sum(one.trace.num_prompt_tokens for one in done), 4
        ),
        "tails": round(1 - tokens / sum(sample.allocated for sample in outcome.samples), 4),
        "running": round(statistics.mean(sample.running for sample in outcome.samples), 1),
        "first_token": round(statistics.mean(one.first_token - one.arrival for one in done), 3),
        "copied": scheduler.kv.pool.counters.copied,
        "preemptions": scheduler.num_preemptions,
        "refused": outcome.refused,
        "blocks_per_run": round(sum(blocks for blocks, _ in runs) / max(1, sum(count for _, count in runs)), 2),
    }
