"""Measures servers in turns, and makes one result of all rounds."""

import contextlib
import secrets
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import aiohttp

from pagewise.bench.caveats import caveats
from pagewise.bench.checks import calibration, check
from pagewise.bench.client import Client
from pagewise.bench.comparison import medians, paired_ratios
from pagewise.bench.load import Load, http_session
from pagewise.bench.metrics import Outcome, summarise
from pagewise.bench.progress import Progress
from pagewise.bench.report import command, machine, settings
from pagewise.bench.servers import BenchError, Server, servers_of
from pagewise.bench.texts import Texts
from pagewise.bench.workloads import Turn, Workload, longest_tokens

_WARM_UP_TOKENS = 16
_LOOKED_AT = 10_000
"""Sessions of a workload whose lengths are compared with what servers allow."""


@dataclass(slots=True)
class Measured:
    """A server and its rounds: the outcome of each request, and the metrics."""

    server: Server
    http: aiohttp.ClientSession
    outcomes: list[list[Outcome]] = field(default_factory=list)
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Lengths:
    """What the words of prompts are counted by."""

    tokens_per_word: float
    overhead: float


async def run(
    options: Namespace, workload: Workload, arguments: Sequence[str]
) -> tuple[dict[str, Any], dict[str, list[list[Outcome]]]]:
    """Run everything; returns the result and, by the servers' names, the outcomes of each round.

    Raises:
        BenchError: a server cannot be measured.
    """
    began = datetime.now(UTC)
    fields = {"temperature": options.temperature} | options.extra_body
    salt = options.salt or secrets.token_hex(4)
    async with contextlib.AsyncExitStack() as stack:
        every = [
            Measured(server, await stack.enter_async_context(http_session(server, options)))
            for server in servers_of(options)
        ]
        for one in every:
            one.server.ignores_eos = options.ignore_eos
            await check(one.http, one.server, fields, options.ready_check_timeout_sec)
            if options.ignore_eos and not one.server.ignores_eos:
                one.server.notes.append(
                    f"{one.server.name} refuses ignore_eos: its outputs end where the model ends them"
                )
        lengths = await _lengths(every[0], options, fields)
        _check_lengths(every, workload)
        for number in range(options.rounds):
            turn = number % len(every)
            for one in every[turn:] + every[:turn]:  # each is the first one in its turn
                place = f"{salt} {number} {every.index(one)}"
                await _round(one, workload, options, fields, lengths, place)
    result: dict[str, Any] = {
        "command": command(arguments),
        "began": began.isoformat(timespec="seconds"),
        "machine": machine(),
        "settings": settings(options) | {"salt": salt},
        "tokens_per_word": round(lengths.tokens_per_word, 4),
        "servers": [_result(one, every[0]) for one in every],
        "caveats": caveats(
            [one.server for one in every], {one.server.name: one.metrics for one in every}, options, workload.total
        ),
    }
    if options.save_detailed:
        for shown, one in zip(result["servers"], every, strict=True):
            shown["requests"] = [_detailed(outcomes) for outcomes in one.outcomes]
    return result, {one.server.name: one.outcomes for one in every}


async def _lengths(first: Measured, options: Namespace, fields: dict[str, Any]) -> Lengths:
    if options.tokens_per_word is not None:
        return Lengths(options.tokens_per_word, 0.0)
    return Lengths(*await calibration(first.http, first.server, fields))


def _check_lengths(every: Sequence[Measured], workload: Workload) -> None:
    if all(one.server.max_model_len is None for one in every):
        return
    longest = longest_tokens(workload.first(_LOOKED_AT))
    for one in every:
        limit = one.server.max_model_len
        if limit is not None and longest > limit:
            raise BenchError(
                f"{one.server.name}: the longest request has about {longest:,} tokens with its output, and "
                f"max_model_len of {one.server.model} is {limit:,}: ask for shorter ones"
            )


async def _round(
    one: Measured, workload: Workload, options: Namespace, fields: dict[str, Any], lengths: Lengths, salt: str
) -> None:
    client = Client(one.http, one.server, fields)

    def texts(salt: str) -> Texts:
        return Texts(salt, tokens_per_word=lengths.tokens_per_word, overhead=lengths.overhead)

    warm_up = [
        Turn(turn.parts, min(turn.output_tokens, _WARM_UP_TOKENS)) for turn in workload.first(options.num_warmups)
    ]
    if warm_up:
        await Load(client, texts(f"{salt} warm-up"), max_concurrency=options.max_concurrency).run(warm_up)
    title = (
        one.server.name
        if options.rounds == 1
        else f"{one.server.name}, round {len(one.metrics) + 1} of {options.rounds}"
    )
    with Progress(workload.total, title, quiet=options.disable_tqdm, seconds=options.duration) as progress:
        load = Load(
            client,
            texts(salt),
            max_concurrency=options.max_concurrency,
            duration=options.duration,
            on_end=progress.ended,
        )
        outcomes, health = await load.run(workload)
    metrics = summarise(outcomes, slos=dict(options.goodput), percents=options.metric_percentiles)
    one.outcomes.append(outcomes)
    one.metrics.append(metrics | {"client": health})


def _result(one: Measured, first: Measured) -> dict[str, Any]:
    server = one.server
    result: dict[str, Any] = {
        "name": server.name,
        "url": server.url,
        "endpoint": server.endpoint,
        "model": server.model,
        "version": server.version,
        "streams_usage": server.streams_usage,
        "ignores_eos": server.ignores_eos,
        "rounds": one.metrics,
        "medians": medians(one.metrics),
    }
    if one is not first:
        result["first_over_this"] = paired_ratios(first.metrics, one.metrics)
    return result


def _detailed(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Return what is kept of each request, with seconds from the first one that was sent."""
    start = min((one.sent for one in outcomes), default=0.0)
    return [
        {
            "due": round(one.due - start, 6),
            "sent": round(one.sent - start, 6),
            "end": round(one.end - start, 6),
            "events": [round(event - start, 6) for event in one.events],
            "input_tokens": one.prompt_tokens,
            "output_tokens": one.tokens,
            "cached_tokens": one.cached_tokens,
            "error": one.error or None,
        }
        for one in sorted(outcomes, key=lambda one: one.sent)
    ]


def file_name() -> str:
    """Return the name of a result that was given none."""
    return time.strftime("pagewise-bench-%Y%m%d-%H%M%S.json")
