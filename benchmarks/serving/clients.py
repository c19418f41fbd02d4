"""HTTP clients that stream completions from an OpenAI-compatible server, and when their tokens came."""

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from benchmarks.serving.workloads import Work


@dataclass
class Timing:
    """Seconds from the start of one request, how many tokens it got, and how many its prompt has and had cached."""

    first_token: float
    end: float
    gaps: list[float]
    tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0


async def one_request(
    session: aiohttp.ClientSession, url: str, work: Work, delay: float = 0.0, model: str | None = None
) -> Timing:
    """Send one request after ``delay`` seconds. ``model``: for servers that want its name."""
    await asyncio.sleep(delay)
    body = {
        **({"model": model} if model else {}),
        "prompt": work.prompt,
        "max_tokens": work.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if event["choices"]:
                    arrivals.append(time.perf_counter())
                usage = event.get("usage") or usage
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Timing(
        arrivals[0] - began,
        time.perf_counter() - began,
        gaps,
        usage.get("completion_tokens", 0),
        usage.get("prompt_tokens", 0),
        cached,
    )


async def drive(url: str, works: list[Work], rate: float | None, seed: int, model: str | None = None) -> list[Timing]:
    """Send all requests at once, or as a Poisson process of ``rate`` per second."""
    rng = random.Random(seed)
    delays, at = [], 0.0
    for _ in works:
        delays.append(at)
        at += rng.expovariate(rate) if rate else 0.0
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        return await asyncio.gather(
            *(one_request(session, url, work, delay, model) for work, delay in zip(works, delays, strict=True))
        )


def percentile(values: list[float], share: float) -> float:
    """The value below which ``share`` of them lie."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
