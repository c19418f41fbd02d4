"""The cost of placing a request in the scheduler: microseconds of CPU time per placement.

Prompts of 8,192 tokens. *Shared*: every executor holds the first 2,048 tokens of the prompt, a system prompt for
instance, and one of them holds all of it. *New*: no executor holds any of it. At every executor a prompt waits, and
each may fetch blocks from the others. Medians; with ``--json`` the numbers are written.
"""

import argparse
import random
import statistics
import time
from array import array
from typing import Any

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.routing.executor_view import ExecutorView, Placement
from pagewise_scheduler.core.routing.policies import ROUTING_NAMES, RoutingName, make_routing, place
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.peer import Peer, PrefixDirectory
from pagewise_shared.protocol import RequestParams, StepResult, pack_int32s
from pagewise_shared.sampling import SamplingParams

from benchmarks.record import record_file, write_record

PROMPT_TOKENS, SYSTEM_TOKENS, BLOCK_SIZE = 8192, 2048, 16
PARAMS = RequestParams(SamplingParams(temperature=0))


def tokens(rng: random.Random, count: int) -> "array[int]":
    return array("i", (rng.randrange(30_000) for _ in range(count)))


def executor(prompt: "array[int]", waiting: "array[int]") -> ExecutorView:
    """One that has served ``prompt``, whose pool is full, and where ``waiting`` waits."""
    scheduler = Scheduler(
        num_blocks=PROMPT_TOKENS // BLOCK_SIZE + 2,
        block_size=BLOCK_SIZE,
        max_num_seqs=64,
        max_num_batched_tokens=PROMPT_TOKENS,
        eviction="cost",
    )
    scheduler.add(Request("first", prompt, 1, PARAMS))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.update(StepResult(plan.epoch, plan.step, pack_int32s([5])))
    view = ExecutorView(scheduler)
    place(make_routing("ttft"), Request("waits", waiting, 1, PARAMS), [view], 0.0)
    return view


def measure(policy: RoutingName, executors: int, shared: bool, repeats: int) -> float:
    """Median microseconds."""
    rng, routing = random.Random(0), make_routing(policy)
    system = tokens(rng, SYSTEM_TOKENS)
    prompts = [system + tokens(rng, PROMPT_TOKENS - SYSTEM_TOKENS) for _ in range(executors)]
    views = [executor(prompt, system + tokens(rng, 64)) for prompt in prompts]
    directory = PrefixDirectory()
    for number, view in enumerate(views):
        own = Peer(f"executor-{number}", "format", view.scheduler, lambda: None)
        view.scheduler.recoveries.planner.join(directory, own)
    taken = []
    placement: Placement | None = None
    for number in range(repeats):
        prompt = prompts[number % executors][:] if shared else tokens(rng, PROMPT_TOKENS)
        request = Request(str(number), prompt, 64, PARAMS)
        began = time.thread_time()
        placement = place(routing, request, views, 0.01 * number)
        taken.append(time.thread_time() - began)
        placement.end(0.01 * number)
    return round(1e6 * statistics.median(taken), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--executors", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--json", type=record_file, help="file to write the numbers to")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"{'':>14}{'executors':>11}{'new':>9}{'shared':>9}   µs of CPU time per placement")
    for policy in ROUTING_NAMES:
        for executors in args.executors:
            found = {name: measure(policy, executors, name == "shared", args.repeats) for name in ("new", "shared")}
            rows.append({"policy": policy, "executors": executors} | found)
            print(f"{policy:>14}{executors:>11}{found['new']:>9}{found['shared']:>9}", flush=True)
    if args.json:
        write_record(args.json, {"prompt_tokens": PROMPT_TOKENS, "rows": rows})


if __name__ == "__main__":
    main()
