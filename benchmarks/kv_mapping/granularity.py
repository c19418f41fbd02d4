"""Memory by granularity: the loss at the ends of sequences, and because only whole blocks are shared."""

import statistics
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.replay.costs import llama_3_8b
from pagewise_scheduler.replay.simulation import Simulation
from pagewise_scheduler.replay.traces import TraceRequest, read_trace

TRACES = {
    "synthetic": "mooncake_synthetic_trace.jsonl.gz",
    "conversations": "mooncake_conversation_trace.jsonl.gz",
    "agents": "cc_agentic_max64k_min10req.rle.jsonl.gz",
    "ShareGPT": "sharegpt_8k_filtered_stats_llama2_tokenizer.csv.gz",
}
LAYERS, KV_HEADS, HEAD_DIM = 32, 8, 128
"""Of Llama 3 8B."""
TOKEN_OF_LAYER = KV_HEADS * HEAD_DIM * 2
"""Bytes of K, or of V, of a token in one layer, in bfloat16."""
TOKEN = 2 * LAYERS * TOKEN_OF_LAYER
POOL_TOKENS = 40 * 2**30 // TOKEN
PAGES = {
    "4 KiB, a layer": 4 * 2**10 // TOKEN_OF_LAYER,
    "2 MiB, all layers": 2 * 2**20 // TOKEN,
    "64 KiB, a layer": 64 * 2**10 // TOKEN_OF_LAYER,
    "2 MiB, a layer": 2 * 2**20 // TOKEN_OF_LAYER,
}
"""The tokens of a page: of K or V of one layer, or of K and V of all layers. No block can be smaller."""


def read(name: str, limit: int | None = None) -> list[TraceRequest]:
    """The first requests of a trace; ShareGPT has no times, so its requests come 20 a second."""
    return read_trace(Path(__file__).parents[1] / "traces" / TRACES[name], limit=limit, rate=20.0)


class _Node:
    """A block of the trace after the blocks before it. ``tokens``: of it, as many as any request so far has had."""

    __slots__ = ("following", "start", "tokens")

    def __init__(self, start: int) -> None:
        self.following: dict[int, _Node] = {}
        self.start = start
        self.tokens = 0


def lost(trace: Iterable[TraceRequest], size: int) -> dict[str, float]:
    """The loss of blocks of ``size`` tokens, by arithmetic over a trace whose requests come one after the other.

    Nothing is ever evicted. ``tails``: share of the slots of all sequences, at their full length, that hold no token.
    ``memory``: the memory of the blocks of all sequences, as a multiple of their distinct tokens, stored once each.
    ``reused``: share of the prompt tokens that an earlier request has left in full blocks; the newest is always
    computed.
    """
    root = _Node(0)
    slots = held = distinct = blocks = prompts = reused = 0
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
                blocks += (start + taken) // size - (start + node.tokens) // size
                distinct += taken - node.tokens
                node.tokens = taken
        length = request.num_prompt_tokens + request.num_output_tokens
        shared = request.num_prompt_tokens - left  # the rest is the request's own
        distinct += length - shared
        blocks += -(-length // size) - shared // size
        held += length
        slots += -(-length // size) * size
        prompts += request.num_prompt_tokens
        reused += min(known, request.num_prompt_tokens - 1) // size * size
    return {
        "tails": round(1 - held / slots, 4),
        "memory": round(blocks * size / distinct, 4),
        "reused": round(reused / prompts, 4),
    }


def served(trace: list[TraceRequest], size: int) -> dict[str, Any]:
    """Serve a trace with the scheduler that serves, under a virtual clock, in 40 GiB of blocks of ``size`` tokens.

    ``hit_rate``: share of the prompt tokens that were cached. ``running``: sequences at a time. ``runs``: the most
    stretches of block tables at a time whose blocks are neighbours in the pool, too: each takes one map, or one for K
    and one for V of each layer.
    """
    costs = llama_3_8b(size)
    scheduler = Scheduler(
        num_blocks=POOL_TOKENS // size,
        block_size=size,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        costs=costs.prefill,
        eviction="cost",
    )
    runs: list[int] = []

    def watch(_: float) -> None:
        tables = [sequence.table.blocks for sequence in scheduler.running]
        runs.append(sum(bool(table) for table in tables))
        runs[-1] += sum(after != before + 1 for table in tables for before, after in pairwise(table))

    outcome = Simulation([scheduler], costs, watch=watch).run(trace)
    done = outcome.served
    used, allocated = (sum(getattr(sample, name) for sample in outcome.samples) for name in ("used", "allocated"))
    return {
        "hit_rate": round(
            sum(one.request.num_cached_tokens for one in done) / sum(one.trace.num_prompt_tokens for one in done), 4
        ),
        "tails": round(1 - used / allocated, 4),
        "running": round(statistics.mean(sample.running for sample in outcome.samples), 1),
        "requests_per_second": round(len(done) / outcome.seconds, 3),
        "runs": max(runs),
        "preemptions": scheduler.num_preemptions,
        "refused": outcome.refused,
    }
