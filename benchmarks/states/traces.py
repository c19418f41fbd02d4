"""Traces of conversations on models with states, and the knowledge of a trace that an oracle has."""

import random
from array import array
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field, replace

from pagewise_scheduler.replay.simulation import SAMPLED
from pagewise_scheduler.replay.traces import TraceRequest

from benchmarks.eviction.run import load
from benchmarks.states.models import BLOCK_SIZE

OUTPUT_TOKENS = 16
"""Most tokens of an answer of a recorded trace: the prompts behind it have its text, but not these tokens."""
_TEMPLATE = 12
"""Tokens at the end of a prompt that begin the answer; a thinking model's template has others in the next turn."""


@dataclass(slots=True)
class Turn(TraceRequest):
    """A request of a synthetic conversation."""

    tokens: "array[int]" = field(default_factory=lambda: array("i"))

    def prompt(self) -> "array[int]":
        """The prompt's tokens."""
        return self.tokens[:]


def recorded(name: str, num_requests: int) -> list[TraceRequest]:
    """The first requests of a recorded trace, with answers cut short."""
    return [
        replace(one, num_output_tokens=min(one.num_output_tokens, OUTPUT_TOKENS)) for one in load(name)[:num_requests]
    ]


def conversations(num_sessions: int, seed: int = 0, *, systems: int = 6) -> list[TraceRequest]:
    """Sessions of up to ten turns, interleaved. Each begins with one of ``systems`` system prompts of 1,000 to 4,000
    tokens, shifted by 1 to 600 tokens. Half of the sessions think: their next turn has neither the answer's first
    tokens nor the end of the template."""
    rng = random.Random(seed)  # nosec B311 # no secret
    names = iter(range(1, 1 << 29))

    def text(low: int, high: int) -> "array[int]":
        return array("i", [next(names)] * rng.randint(low, high))

    prefixes = [text(1000, 4000) + text(1, 600) for _ in range(systems)]
    turns: list[TraceRequest] = []
    for _ in range(num_sessions):
        history, thinks, at = prefixes[int(systems * rng.random() ** 2)][:], rng.random() < 0.5, rng.random() * 3000
        for _ in range(rng.choice((1, 1, 2, 3, 5, 10))):
            history += text(20, 600)
            size = rng.randint(16, 80)
            prompt = history + array("i", [-5 + (1 << 30)] * _TEMPLATE)
            turns.append(Turn(at, len(prompt), size, recorded=at, tokens=prompt))
            at += rng.expovariate(1 / 60)
            history = history + text(40, 400) if thinks else prompt + array("i", [SAMPLED] * size)
    return sorted(turns, key=lambda one: one.recorded)


def edited(num_documents: int, seed: int = 0) -> list[TraceRequest]:
    """Prompts of 4,000 to 24,000 tokens that come up to six times, each time with other tokens from a random place in
    their last 70 percent on, as if a file had been edited there. No prompt says where the next one leaves it."""
    rng = random.Random(seed)  # nosec B311 # no secret
    names = iter(range(1, 1 << 29))
    turns: list[TraceRequest] = []
    for _ in range(num_documents):
        size, at = rng.randint(4000, 24000), rng.random() * 3000
        text = array("i", [next(names)] * size)
        for _ in range(rng.choice((1, 2, 2, 3, 4, 6))):
            turns.append(Turn(at, size, 64, recorded=at, tokens=text))
            kept = rng.randint(size * 3 // 10, size - 1)
            text, at = text[:kept] + array("i", [next(names)] * (size - kept)), at + rng.expovariate(1 / 60)
    return sorted(turns, key=lambda one: one.recorded)


class Future:
    """The knowledge that an oracle has of a trace whose requests run one after the other.

    ``paths``: of each request, a number for each full block of its prompt and of its answer; equal numbers are equal
    prefixes. ``begins``: of each request, the blocks of its prompt that requests before it have computed, less one if
    nothing of it would remain.
    """

    def __init__(self, trace: list[TraceRequest]) -> None:
        self.paths: list[array[int]] = []
        self.begins: list[int] = []
        self._begun: dict[int, list[int]] = defaultdict(list)
        self._used: dict[int, list[int]] = defaultdict(list)
        known: dict[tuple[int, bytes], int] = {}
        for index, request in enumerate(trace):
            prompt = request.prompt()
            data = (prompt + array("i", [SAMPLED] * (request.num_output_tokens - 1))).tobytes()
            path, parent, begin = array("i"), 0, 0
            for start in range(0, len(data) - 4 * BLOCK_SIZE + 1, 4 * BLOCK_SIZE):
                before = len(known)
                parent = known.setdefault((parent, data[start : start + 4 * BLOCK_SIZE]), before + 1)
                path.append(parent)
                begin += len(known) == before and begin == len(path) - 1
            begin = min(begin, (len(prompt) - 1) // BLOCK_SIZE)
            self.paths.append(path)
            self.begins.append(begin)
            if begin:
                self._begun[path[begin - 1]].append(index)
            for block in path[:begin]:
                self._used[block].append(index)

    def next_begin(self, block: int, index: int) -> int | None:
        """The request behind ``index`` that begins behind a block."""
        return _next(self._begun.get(block, []), index)

    def next_use(self, block: int, index: int) -> int | None:
        """The request behind ``index`` whose prefix has a block."""
        return _next(self._used.get(block, []), index)


def _next(uses: list[int], index: int) -> int | None:
    following = bisect_right(uses, index)
    return uses[following] if following < len(uses) else None
