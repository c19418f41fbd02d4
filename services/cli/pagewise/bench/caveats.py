"""Finds what limits the numbers of a benchmark. The same rules apply to every server."""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from pagewise.bench.comparison import NEEDED_ROUNDS
from pagewise.bench.servers import Server

_PROMPT_ERROR = 0.05
_OUTPUT_ERROR = 0.01
_TOKENS_PER_EVENT = 1.05
_FOUND_IN_CACHES = 0.02
_OVERTIME = 0.1


def caveats(
    servers: Sequence[Server], rounds: dict[str, list[dict[str, Any]]], options: Namespace, total: int | None
) -> list[str]:
    """Return sentences about what limits the numbers, or makes them differ between servers.

    ``rounds``: the metrics of each server's rounds, by its name, each with the ``client`` part of the load generator.
    ``total``: how many requests the workload has; None: it has no end.
    """
    said: list[str] = []
    for server in servers:
        said += server.notes
        said += _of_server(server, rounds[server.name], options)
        if options.duration is not None:
            said += _of_duration(server.name, rounds[server.name], options.duration, total)
    if len(servers) > 1:
        said += _between(servers, rounds)
    return said


def _of_server(server: Server, rounds: list[dict[str, Any]], options: Namespace) -> list[str]:
    name = server.name
    reasons = dict.fromkeys(reason for one in rounds for reason in one["client"]["reasons"])
    said = [f"the load generator was the bottleneck while it measured {name}: {reason}" for reason in reasons]
    if failed := sum(one["failed"] for one in rounds):
        total = failed + sum(one["completed"] for one in rounds)
        said.append(f"{failed} of {total} requests to {name} failed: latencies are those of the others")
    done = sum(one["completed"] for one in rounds)
    counted = all(one["output_tokens_counted_by"] == "usage" for one in rounds)
    if counted and abs((share := _share_of_output(rounds)) - 1) > _OUTPUT_ERROR:
        said.append(f"{name} generated {share:.0%} of the tokens asked for: outputs end early there")
    if done and counted and any((one["tokens_per_event"] or 1) > _TOKENS_PER_EVENT for one in rounds):
        most = max(one["tokens_per_event"] or 1 for one in rounds)
        said.append(f"an event of {name} carries {most:.2f} tokens: its ITL is between events, TPOT is between tokens")
    said += _of_prompts(name, rounds, options)
    if server.is_local:
        said.append(f"{name} shares this machine's cores with the load generator")
    return said


def _share_of_output(rounds: list[dict[str, Any]]) -> float:
    """Return the generated tokens over those that were asked for; 1 if none were."""
    asked, got = (sum(one[key] for one in rounds) for key in ("output_tokens_asked_for", "output_tokens"))
    return float(got / asked) if asked else 1.0


def _of_duration(name: str, rounds: list[dict[str, Any]], duration: float, total: int | None) -> list[str]:
    """Say what a bound on the time has left out, and how much of the time was spent on the last requests."""
    said = []
    started = [one["completed"] + one["failed"] for one in rounds]
    if total is not None and (left := sum(total - count for count in started)):
        said.append(f"{left} of {total * len(rounds)} requests to {name} did not start within {duration:g} s")
    longest = max((one["duration_seconds"] for one in rounds), default=0.0)
    if longest > (1 + _OVERTIME) * duration:
        said.append(
            f"the last requests to {name} ended {longest - duration:.1f} s after the {duration:g} s of --duration, and "
            "rates are over this time too: with a longer duration it matters less"
        )
    return said


def _of_prompts(name: str, rounds: list[dict[str, Any]], options: Namespace) -> list[str]:
    """Say where prompts have other lengths than asked for, or were in a cache that should not know them."""
    said = []
    planned = [one["input_tokens_asked_for"] for one in rounds]
    if planned and None not in planned:
        ratio = sum(one["input_tokens"] for one in rounds) / sum(planned)
        if abs(ratio - 1) > _PROMPT_ERROR:
            said.append(f"prompts have {ratio:.2f} times the tokens asked for, as {name} counts them")
    alone = options.dataset_name in ("random", "sharegpt", "custom") and not options.random_prefix_len
    found = max((one["cached_share"] or 0.0 for one in rounds), default=0.0)
    if alone and found > _FOUND_IN_CACHES:
        said.append(f"{name} found {found:.0%} of the prompts in its cache, though they share nothing on purpose")
    return said


def _between(servers: Sequence[Server], rounds: dict[str, list[dict[str, Any]]]) -> list[str]:
    said = []
    if len(next(iter(rounds.values()))) < NEEDED_ROUNDS:
        said.append(
            f"with fewer than {NEEDED_ROUNDS} rounds, no ratio can be told from noise: --rounds {NEEDED_ROUNDS}"
        )
    tokens = {server.name: sum(one["input_tokens"] or 0 for one in rounds[server.name]) for server in servers}
    completed = {sum(one["completed"] for one in rounds[server.name]) for server in servers}
    known = [count for count in tokens.values() if count]
    if len(completed) == 1 and len(known) > 1 and max(known) > (1 + _PROMPT_ERROR) * min(known):
        counts = ", ".join(f"{name} {count:,}" for name, count in tokens.items())
        said.append(f"servers count the same prompts differently ({counts} tokens): compare requests, not tokens")
    whole = [_share_of_output(rounds[server.name]) for server in servers]
    if len({server.ignores_eos for server in servers}) > 1 and any(abs(share - 1) > _OUTPUT_ERROR for share in whole):
        said.append("not all servers support ignore_eos, so outputs may differ in length: compare TPOT, not E2E")
    return said
