"""The scheduler without HTTP: router, fleet and engines in a process of their own, under a closed loop.

    python -m benchmarks.scaling.core --listen ENDPOINT --executors N --streams N

Requests begin once all executors have joined, and each stream reads its deltas, text included, as a
handler of HTTP would. Prints ``listening http://HOST:PORT`` like the scheduler; only /metrics answers
there.
"""

import argparse
import asyncio
import random
import uuid
from array import array
from time import monotonic

import prometheus_client
import uvloop
from pagewise_scheduler.actors.fleet import Fleet
from pagewise_scheduler.actors.router import Router
from pagewise_scheduler.generation import GenerationRequest
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.service import calm_garbage_collector
from pagewise_scheduler.text.tokenizer import Tokenizer
from pagewise_shared.config import DEMO_MODEL
from pagewise_shared.logs import configure_logging
from pagewise_shared.model_files import resolve_model
from pagewise_shared.sampling import SamplingParams

from benchmarks.scaling.load import OUTPUT_TOKENS, random_prompt

_SAMPLING = SamplingParams(temperature=0)


async def one_stream(router: Router, rng: random.Random) -> None:
    """One request after the other."""
    while True:
        prompt = array("i", random_prompt(rng))
        request = GenerationRequest(uuid.uuid4().hex, prompt, OUTPUT_TOKENS, _SAMPLING, arrival_time=monotonic())
        async for deltas in router.submit(request):
            for _ in deltas:
                pass


async def drive(router: Router, executors: int, streams: int) -> None:
    while (capacity := router.capacity()) is None or capacity.ready_executors < executors:
        await asyncio.sleep(0.05)
    rng = random.Random(streams)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(streams):
            tasks.create_task(one_stream(router, rng))


async def run(listen: str, executors: int, streams: int) -> None:
    metrics = Metrics("core")
    router = Router(Tokenizer.load(resolve_model(DEMO_MODEL)), metrics, max_waiting=100_000, max_waiting_tokens=10**9)
    fleet = Fleet(
        listen, router, metrics, max_num_seqs=1024, max_num_batched_tokens=8192, max_model_len=None,
        executor_timeout=60.0, step_timeout=60.0,
    )  # fmt: skip
    server, _ = prometheus_client.start_http_server(0, "127.0.0.1", metrics.registry)
    calm_garbage_collector()
    print(f"listening http://127.0.0.1:{server.server_port}", flush=True)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(fleet.run())
        tasks.create_task(router.run())
        tasks.create_task(drive(router, executors, streams))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--listen", required=True, help="ZeroMQ endpoint that executors connect to")
    parser.add_argument("--executors", type=int, required=True, help="how many to wait for")
    parser.add_argument("--streams", type=int, required=True, help="requests at once")
    args = parser.parse_args()
    configure_logging("error", "core")
    uvloop.run(run(args.listen, args.executors, args.streams))


if __name__ == "__main__":
    main()
