"""Puts a closed loop of requests on a server that runs, as the tutorials do.

    python -m benchmarks.serving.load --requests 48 --concurrency 8 --input 160 --output 96

Prompts are random tokens. With ``--prefixes``, each begins with one of so many shared prefixes. ``docs/bench.md`` names
the load generators that measure servers.
"""

import argparse
import asyncio
import random
import time

import aiohttp

from benchmarks.serving.clients import Timing, one_request, percentile
from benchmarks.serving.workloads import Work, random_tokens


async def closed_loop(url: str, works: list[Work], concurrency: int) -> list[Timing]:
    """Send all requests, at most ``concurrency`` of them at a time."""
    room = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(work: Work) -> Timing:
            async with room:
                return await one_request(session, url, work)

        return await asyncio.gather(*map(one, works))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt, behind its prefix")
    parser.add_argument("--output", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--prefixes", type=int, default=0, help="shared prefixes")
    parser.add_argument("--prefix", type=int, default=256, help="tokens of each shared prefix")
    parser.add_argument("--seed", type=int, help="makes the same prompts again")
    args = parser.parse_args()
    rng = random.Random(args.seed)
    prefixes = [random_tokens(rng, args.prefix) for _ in range(args.prefixes)] or [[]]
    works = [Work(rng.choice(prefixes) + random_tokens(rng, args.input), args.output) for _ in range(args.requests)]
    began = time.perf_counter()
    timings = asyncio.run(closed_loop(args.url, works, args.concurrency))
    seconds = time.perf_counter() - began
    tokens, prompts = sum(one.tokens for one in timings), sum(one.prompt_tokens for one in timings)
    gaps = [gap for one in timings for gap in one.gaps] or [0.0]
    print(f"{len(timings)} requests in {seconds:.1f} s, {tokens / seconds:.1f} output tokens/s")
    for name, values in (("TTFT", [one.first_token for one in timings]), ("ITL", gaps)):
        print(f"{name} median {1e3 * percentile(values, 0.5):.1f} ms, p99 {1e3 * percentile(values, 0.99):.1f} ms")
    print(f"prompt tokens from cache: {sum(one.cached_tokens for one in timings) / prompts:.0%}")


if __name__ == "__main__":
    main()
