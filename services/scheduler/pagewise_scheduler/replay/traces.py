"""Reads request traces: Mooncake and agentic JSON lines, Azure and ShareGPT CSV, plain or gzipped.

Traces contain no text. Prompts are made of tokens that are equal exactly where the trace has equal prefixes.
"""

import csv
import gzip
import random
import zlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, count, groupby, islice, pairwise, repeat
from math import isfinite
from operator import attrgetter
from pathlib import Path
from typing import Annotated, TextIO

import msgspec
from msgspec import Meta, Struct

_MAX_TOKEN = 2**31 - 1
_MOST_LENGTH = 10_000_000

_Length = Annotated[int, Meta(ge=0, lt=_MOST_LENGTH)]
_BlockId = Annotated[int, Meta(ge=0, lt=_MAX_TOKEN // 2)]


class TraceError(Exception):
    """A trace cannot be read; the text names the file and the reason."""


@dataclass(slots=True)
class TraceRequest:
    """One request of a trace.

    Fields:
        arrival: seconds from the trace's start; if the request follows another, seconds after the end of that one.
        recorded: seconds from the trace's start at which it came when it was recorded.
        num_prompt_tokens, num_output_tokens: at least 1 each.
        blocks: ids of the prompt's blocks of ``block_tokens`` tokens; equal ids are equal prefixes. The last block may
            be cut short. The tokens behind it belong to this request alone.
        unique: a number that no other request has; the request's own tokens are made of it.
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


class _MooncakeRow(Struct):
    timestamp: float  # milliseconds
    input_length: _Length
    output_length: _Length
    hash_ids: list[_BlockId]


class _AgenticRow(Struct):
    requests: "list[_AgenticRequest]"
    block_size: Annotated[int, Meta(ge=1)]


class _AgenticRequest(Struct):
    """A request, or a subagent with requests. ``hash_runs``: first id and number of consecutive block ids."""

    type: str = ""
    requests: "list[_AgenticRequest]" = []
    input: _Length = msgspec.field(name="in", default=0)
    output: _Length = msgspec.field(name="out", default=0)
    hash_runs: list[tuple[int, _Length]] = []
    think_time: float | None = None
    t: float = 0.0
    stop: str | None = None
    api_time: float | None = None


def read_trace(path: Path, *, limit: int | None = None, rate: float = 1.0, seed: int = 0) -> list[TraceRequest]:
    """All requests of a trace (at most ``limit``), in the order of the file: by arrival, or session after session.

    ``rate``: Poisson arrivals per second, for traces without arrival times.

    Raises:
        TraceError: it cannot be read, or has an unknown format.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            taken: list[TraceRequest] = []
            for request in islice(_requests(file, rate, seed), limit):
                _check(request, len(taken))
                request.num_prompt_tokens = max(1, request.num_prompt_tokens)
                request.num_output_tokens = max(1, request.num_output_tokens)
                request.recorded = request.recorded or request.arrival
                request.unique = len(taken)
                taken.append(request)
            return taken
    except (OSError, TypeError, ValueError, EOFError, zlib.error, csv.Error, msgspec.MsgspecError) as error:
        raise TraceError(f"{path}: {error}") from error


def _requests(file: TextIO, rate: float, seed: int) -> Iterator[TraceRequest]:
    first = file.readline()
    file.seek(0)
    if first.lstrip().startswith("{"):
        lines = (line for line in file if line.strip())
        if "requests" in msgspec.json.decode(first):
            return _agentic(msgspec.json.decode(line, type=_AgenticRow) for line in lines)
        return _mooncake(msgspec.json.decode(line, type=_MooncakeRow) for line in lines)
    reader = csv.DictReader(file)
    names = set(reader.fieldnames or ())
    if {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= names:
        return _azure(reader)
    if {"num_prefill_tokens", "num_decode_tokens"} <= names:
        return _sharegpt(reader, rate, random.Random(seed))  # noqa: S311  # nosec B311 # no secret
    raise ValueError(f"neither a known CSV nor JSON lines, it begins with {first[:80]!r}")


def _check(request: TraceRequest, number: int) -> None:
    lengths = request.num_prompt_tokens, request.num_output_tokens
    if not all(0 <= length < _MOST_LENGTH for length in lengths):
        raise ValueError(f"request {number}: lengths are whole numbers below {_MOST_LENGTH}, not {lengths}")
    if not isfinite(request.arrival):
        raise ValueError(f"request {number}: {request.arrival} is no time of arrival")


def _mooncake(rows: Iterable[_MooncakeRow]) -> Iterator[TraceRequest]:
    """Timestamps may be quantised: requests with equal ones are spread evenly up to the next one."""
    bins = (list(members) for _, members in groupby(rows, attrgetter("timestamp")))
    for members, following in pairwise(chain(bins, [None])):
        assert members is not None
        start = members[0].timestamp
        step = max(0.0, following[0].timestamp - start) / len(members) if following is not None else 0.0
        for number, row in enumerate(members):
            arrival = start + number * step
            yield TraceRequest(arrival / 1000, row.input_length, row.output_length, row.hash_ids)


def _azure(rows: Iterable[dict[str, str]]) -> Iterator[TraceRequest]:
    start: datetime | None = None
    for row in rows:
        stamp = datetime.fromisoformat(row["TIMESTAMP"][:26])  # the trace counts 100 ns, datetime microseconds
        start = start or stamp
        yield TraceRequest((stamp - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _sharegpt(rows: Iterable[dict[str, str]], rate: float, rng: random.Random) -> Iterator[TraceRequest]:
    now = 0.0
    for row in rows:
        now += rng.expovariate(rate)
        yield TraceRequest(now, int(float(row["num_prefill_tokens"])), int(float(row["num_decode_tokens"])))


def _agentic(rows: Iterable[_AgenticRow]) -> Iterator[TraceRequest]:
    """Sessions start as they do in the trace. Within one, a request comes its think time after the one before ended.

    A subagent's requests are a chain of their own that starts when the request before it ended. Of some streamed
    answers the trace has neither the reason of their ends, most of which are calls of tools, nor the duration. The
    think time after such an answer counts from an earlier one, so at most the time between the two requests counts.
    """
    index, names = 0, count(1)
    for row in rows:
        name_of: defaultdict[int, int] = defaultdict(lambda: next(names))  # block ids are a session's own
        chains = [(-1, row.requests)]
        while chains:
            previous, members = chains.pop()
            before: _AgenticRequest | None = None
            for member in members:
                if member.type == "subagent":
                    chains.append((previous, member.requests))
                    continue
                think_time = member.think_time or 0.0
                if before is not None and before.api_time is None:
                    think_time = min(think_time, member.t - before.t)
                blocks = [name_of[local] for start, size in member.hash_runs for local in range(start, start + size)]
                yield TraceRequest(
                    think_time if previous >= 0 else member.t,
                    member.input,
                    member.output,
                    blocks,
                    row.block_size,
                    after=previous,
                    tool_call=member.stop in ("tool_use", "", None),
                    recorded=member.t,
                )
                before, previous, index = member, index, index + 1
