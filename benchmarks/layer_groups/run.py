"""Sequences that one GPU's memory serves at the same time, with one group of layers and with groups.

The real scheduler core, with models at their real sizes and without weights. Two tables: sequences of equal length in
a fixed number of GiB; and, under a load of short and long sequences in an eighth of it, the share that nothing can use.
"""

import argparse
import random
from array import array
from collections import deque
from itertools import count
from typing import Any

import torch
from pagewise_executor.kv.kv_pool import bytes_per_block
from pagewise_scheduler.core.requests.request import Request, RequestSequence
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.server.executor_handle import MAX_STEPS_IN_FLIGHT
from pagewise_shared.protocol import RequestParams, StepResult, pack_int32s
from pagewise_shared.sampling import SamplingParams
from tqdm import tqdm

from benchmarks.layer_groups.models import BLOCK_SIZE, MODELS, Model, scheduler_of
from benchmarks.record import record_file, write_record

STEP_TOKENS = OUTPUT_TOKENS = 2048
LENGTHS = (8192, 32_768, 131_072 - OUTPUT_TOKENS)
"""Tokens of prompts. The longest leaves room for an answer below the models' limit of 131,072."""
_SAMPLING = SamplingParams(temperature=0.0)


def request_of(number: int, num_tokens: int, num_output_tokens: int) -> Request:
    """A request whose prompt shares no prefix with others."""
    prompt = array("i", range(number << 18, (number << 18) + num_tokens))
    return Request(str(number), prompt, num_output_tokens, RequestParams(_SAMPLING), arrival_time=float(number))


def advance(scheduler: Scheduler, results: "deque[StepResult]") -> None:
    """Plan up to two steps ahead, and return the oldest."""
    while len(results) < MAX_STEPS_IN_FLIGHT and (plan := scheduler.schedule(0.0)) is not None:
        sampled = len(scheduler.steps_in_flight[-1].sampled)
        results.append(StepResult(plan.epoch, plan.step, pack_int32s([1] * sampled)))
    if results:
        scheduler.update(results.popleft())


def served(model: Model, num_bytes: int, num_tokens: int, *, grouped: bool) -> int:
    """The number of sequences that decode at the same time behind prompts of ``num_tokens`` tokens.

    Requests come until one finds no room and no prompt is computed any more.
    """
    scheduler = scheduler_of(model, num_bytes, STEP_TOKENS, grouped=grouped, kind=Scheduler)
    most, results = 0, deque[StepResult]()
    for number in count():
        if not scheduler.fits(num_tokens, OUTPUT_TOKENS):
            return 0
        scheduler.add(request_of(number, num_tokens, OUTPUT_TOKENS))
        while scheduler.num_waiting or len(scheduler.prefilling):
            advance(scheduler, results)
            most = max(most, len(scheduler.decoding))
            full = scheduler.num_waiting and not len(scheduler.prefilling)
            if scheduler.num_preemptions or full:
                return most
    raise AssertionError


class Watched(Scheduler):
    """A scheduler that notes the largest share of memory that was available when it preempted a sequence."""

    most_available = 0.0

    def preempt(self, sequence: RequestSequence, reason: str, *others: RequestSequence) -> None:
        """See ``Scheduler``."""
        self.most_available = max(self.most_available, self.kv.num_available / self.kv.num_total)
        super().preempt(sequence, reason, *others)


def mixed(model: Model, num_bytes: int, num_requests: int, seed: int) -> dict[str, float]:
    """Serve prompts of 128 to 16,384 tokens with answers of 256 to 8,192.

    Returns two shares of the memory in per cent, each the largest of the run: the empty parts of used pages, and the
    memory that was available when a sequence was preempted.
    """
    rng, layout = random.Random(seed), model.layout
    scheduler = scheduler_of(model, num_bytes, STEP_TOKENS, grouped=True, kind=Watched)
    for number in range(num_requests):
        scheduler.add(request_of(number, int(2 ** rng.uniform(7, 14)), int(2 ** rng.uniform(8, 13))))
    results, wasted = deque[StepResult](), 0
    empty = [
        group.pages_per_block * layout.page_bytes
        - bytes_per_block([group.shape] * len(group.layers), BLOCK_SIZE, torch.bfloat16)
        for group in layout.groups
    ]
    while scheduler.requests:
        advance(scheduler, results)
        used = scheduler.kv.pool.num_used, *(group.num_used for group in scheduler.kv.windows)
        wasted = max(wasted, sum(blocks * size for blocks, size in zip(used, empty, strict=True)))
    return {
        "preemptions": scheduler.num_preemptions,
        "wasted_percent": round(100 * wasted / num_bytes, 2),
        "available_at_preemptions_percent": round(100 * scheduler.most_available, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=int, default=64, help="memory for KV (default: 64)")
    parser.add_argument("--requests", type=int, default=100, help="of the load of short and long sequences")
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    num_bytes, rows = args.gib << 30, list[dict[str, Any]]()
    print(f"{'':<16}{'KV of a token':>22}" + "".join(f"{f'{length:,} tokens':>24}" for length in LENGTHS))
    for name, model in tqdm(MODELS.items(), desc="serving", unit=" models", disable=None):
        sizes = {length: [served(model, num_bytes, length, grouped=one) for one in (False, True)] for length in LENGTHS}
        rows.append(
            {
                "model": name,
                "pages_per_block": [group.pages_per_block for group in model.layout.groups],
                "page_waste_percent": round(100 * model.layout.waste, 2),
                "kv_bytes_per_token_before": model.before,
                "served": {
                    str(length): {"before": before, "groups": after} for length, (before, after) in sizes.items()
                },
                "mixed": mixed(model, num_bytes // 8, args.requests, 0),
            }
        )
        shown = "".join(f"{before:>12} -> {after:<8}" for before, after in sizes.values())
        print(f"{name:<16}{model.before / 1024:>18.5g} KiB{shown}")
        print(f"{'':<16}{rows[-1]['mixed']}")
    if args.json:
        numbers = {"gib": args.gib, "step_tokens": STEP_TOKENS, "requests": args.requests, "rows": rows}
        write_record(args.json, numbers, clock="virtual")


if __name__ == "__main__":
    main()
