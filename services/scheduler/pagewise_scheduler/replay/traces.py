"""Reads request traces: Mooncake and agentic JSON lines, Azure and ShareGPT CSV, plain or gzipped.

Traces hold no text. A prompt is made of tokens that are equal where the trace says that prefixes are equal, and nowhere
else.
"""

import csv
import gzip
import json
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice, repeat
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

_MAX_TOKEN = 2**31 - 1
_MOST_LENGTH = 10_000_000


class TraceError(Exception):
    """A trace cannot be read; the text says which line and why."""


@dataclass(slots=True)
class TraceRequest:
    """One request of a trace.

    Fields:
        arrival: seconds from the trace's start; of a request that follows another, seconds after that one's end.
        recorded: seconds from the trace's start at which it came when it was recorded.
        num_prompt_tokens, num_output_tokens: at least 1 each.
        blocks: ids of the prompt's blocks of ``block_tokens`` tokens; equal ids are equal prefixes. The last may be
            cut short; what follows the last is the request's own.
        unique: what no other request shares is made of this number.
        tool_call: whether its answer called a tool, whose result comes with a later request.
        after: index of the request of the same session that has to end first, -1: none.
    """

    arrival: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: list[int] = field(default_factory=list)
    block_tokens: int = 512
    unique: int = 0
    after: int = -1
    tool_call: bool = False
    recorded: float = 0.0

    def prompt(self) -> "array[int]":
        """The prompt's tokens."""
        tokens: array[int] = array("i")
        for block in self.blocks:
            tokens.extend(repeat(block, self.block_tokens))
        del tokens[self.num_prompt_tokens :]
        tokens.extend(repeat(_MAX_TOKEN - self.unique, self.num_prompt_tokens - len(tokens)))
        return tokens


def read_trace(path: Path, *, limit: int | None = None, rate: float = 1.0, seed: int = 0) -> list[TraceRequest]:
    """All requests of a trace (at most ``limit``), in the order of the file: by arrival, or session after session.

    ``rate``: Poisson arrivals per second, for traces without arrival times.

    Raises:
        TraceError: it cannot be read, or its format is none of those known.
    """
    try:
        with _open(path) as file:
            first = file.readline()
            file.seek(0)
            if first.lstrip().startswith("{"):
                record = json.loads(first)
                rows = (json.loads(line) for line in file if line.strip())
                requests = _agentic(rows) if "requests" in record else _mooncake(rows)
            else:
                reader = csv.DictReader(file)
                names = set(reader.fieldnames or ())
                if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
                    requests = _azure(reader)
                elif {"num_prefill_tokens", "num_decode_tokens"} <= names:
                    requests = _sharegpt(reader, rate, random.Random(seed))  # noqa: S311  # nosec B311 # no secret
                else:
                    raise TraceError(f"{path}: neither a known CSV nor JSON lines, it begins with {first[:80]!r}")
            taken: list[TraceRequest] = []
            for request in islice(requests, limit):
                _check(request, len(taken))
                request.num_prompt_tokens = max(1, request.num_prompt_tokens)
                request.num_output_tokens = max(1, request.num_output_tokens)
                request.recorded = request.recorded or request.arrival
                request.unique = len(taken)
                taken.append(request)
            return taken
    except (OSError, KeyError, TypeError, ValueError, AttributeError, EOFError, zlib.error, csv.Error) as error:
        raise TraceError(f"{path}: {type(error).__name__}: {error}") from error


def _check(request: TraceRequest, number: int) -> None:
    """Raises TraceError if a request's values make no sense."""
    lengths = request.num_prompt_tokens, request.num_output_tokens
    if not all(isinstance(length, int) and 0 <= length < _MOST_LENGTH for length in lengths):
        raise TraceError(f"request {number}: lengths are whole numbers below {_MOST_LENGTH}, not {lengths}")
    ids = request.blocks
    if not isinstance(ids, list) or not all(isinstance(one, int) and 0 <= one < _MAX_TOKEN // 2 for one in ids):
        raise TraceError(f"request {number}: block ids are whole numbers between 0 and {_MAX_TOKEN // 2}")
    if not (isinstance(request.arrival, int | float) and isfinite(request.arrival)):
        raise TraceError(f"request {number}: {request.arrival} is no time of arrival")


def _open(path: Path) -> TextIO:
    return gzip.open(path, "rt") if path.suffix == ".gz" else path.open()


def _mooncake(rows: Iterable[dict[str, Any]]) -> Iterator[TraceRequest]:
    """Stamps may be quantised: requests of one bin are spread evenly up to the next."""
    bin_rows: list[dict[str, Any]] = []

    def spread(until: float) -> Iterator[TraceRequest]:
        start = bin_rows[0]["timestamp"]
        step = (until - start) / len(bin_rows)
        for number, row in enumerate(bin_rows):
            yield TraceRequest(
                (start + number * step) / 1000, row["input_length"], row["output_length"], row["hash_ids"]
            )

    for row in rows:
        if bin_rows and row["timestamp"] > bin_rows[0]["timestamp"]:
            yield from spread(row["timestamp"])
            bin_rows.clear()
        bin_rows.append(row)
    if bin_rows:
        yield from spread(bin_rows[0]["timestamp"])


def _azure(rows: Iterable[dict[str, str]]) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in rows:
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # it counts 100 ns, we microseconds
        start = start or stamp
        yield TraceRequest((stamp - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _sharegpt(rows: Iterable[dict[str, str]], rate: float, rng: random.Random) -> Iterator[TraceRequest]:
    now = 0.0
    for row in rows:
        now += rng.expovariate(rate)
        yield TraceRequest(now, int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"])))


def _agentic(rows: Iterable[dict[str, Any]]) -> Iterator[TraceRequest]:
    """Sessions start as they do in the trace; within one, a request comes its think time after the one before ended.

    A subagent's requests are a chain of their own that starts when the request before it ended.
    """
    index = 0
    next_id = 1
    for row in rows:
        names: dict[int, int] = {}
        chains: list[tuple[int, list[dict[str, Any]]]] = [(-1, row["requests"])]
        while chains:
            previous, members = chains.pop()
            for member in members:
                if member.get("type") == "subagent":
                    chains.append((previous, member.get("requests", [])))
                    continue
                blocks = []
                for start, count in member.get("hash_runs", []):
                    for local in range(start, start + count):
                        if local not in names:
                            names[local] = next_id
                            next_id += 1
                        blocks.append(names[local])
                think = float(member.get("think_time") or 0.0)
                recorded = float(member.get("t", 0.0))
                yield TraceRequest(
                    think if previous >= 0 else recorded,
                    member["in"],
                    member["out"],
                    blocks,
                    row["block_size"],
                    after=previous,
                    tool_call=member.get("stop") == "tool_use",
                    recorded=recorded,
                )
                previous, index = index, index + 1
