"""Plans workloads: sessions of turns, which are the same for every server.

They are planned before the clock starts. A workload of a ``--duration`` has no last session, so it is planned as far
as it is asked for.
"""

import gzip
import itertools
import json
import math
import random
import zlib
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from pagewise_shared.traces import TraceError, TraceRequest, read_trace

from pagewise.bench.texts import Part, Words

_QUESTIONS_SHUFFLED = 10
"""Of each prefix, where there are questions without end."""

_GIVEN_TOKENS_PER_CHARACTER = 0.25
"""Of an answer in ShareGPT's file, whose tokens nobody has counted."""


class WorkloadError(Exception):
    """A workload cannot be made; the text says why."""


@dataclass(slots=True)
class Turn:
    """One request.

    Fields:
        parts: its prompt; of a later turn, what is new.
        output_tokens: how many tokens to generate.
        delay: seconds from the start of the run; of a later turn, from the end of the turn that it follows.
        continues: whether the prompts and answers before it in its session stand in front of its prompt.
        following: the turns that start when this one has ended.
    """

    parts: list[Part]
    output_tokens: int
    delay: float = 0.0
    continues: bool = False
    following: list["Turn"] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """About how many tokens its parts have, as far as they are random words."""
        return sum(part.tokens for part in self.parts if isinstance(part, Words))


class Workload:
    """Sessions, given by their first turns, in the order in which they begin. They can be read more than once.

    ``total``: how many turns they have; None: there is always another one.
    """

    def __init__(self, sessions: Iterable[Turn], *, endless: bool = False) -> None:
        self._planned: list[Turn] = [] if endless else list(sessions)
        self._further = iter(sessions) if endless else iter(())
        self.total = None if endless else sum(1 for _ in turns(self._planned))

    def __iter__(self) -> Iterator[Turn]:
        """Yield the sessions; those of an endless workload are planned when they are reached first."""
        for number in itertools.count():
            if number == len(self._planned):
                following = next(self._further, None)
                if following is None:
                    return
                self._planned.append(following)
            yield self._planned[number]

    def first(self, count: int) -> list[Turn]:
        """Return the first sessions, ``count`` at most."""
        return list(itertools.islice(self, count))


def turns(sessions: Iterable[Turn]) -> Iterator[Turn]:
    """Yield all turns of sessions, which are given by their first turns."""
    waiting = list(sessions)[::-1]
    while waiting:
        turn = waiting.pop()
        yield turn
        waiting.extend(reversed(turn.following))


def longest_tokens(sessions: Iterable[Turn]) -> int:
    """Return about how many tokens the longest context has, at its end."""
    longest = 0
    waiting = [(turn, 0) for turn in sessions]
    while waiting:
        turn, before = waiting.pop()
        context = (before if turn.continues else 0) + turn.prompt_tokens + turn.output_tokens
        longest = max(longest, context)
        waiting.extend((one, context) for one in turn.following)
    return longest


def arrivals(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield times from 0 on without end, in seconds, ``rate`` per second on average; infinite: all at once.

    Gaps are gamma-distributed with shape ``burstiness``: 1 is a Poisson process, less is burstier, more is steadier.
    """
    now = 0.0
    while True:
        yield now
        if not math.isinf(rate):
            now += rng.gammavariate(burstiness, 1 / (rate * burstiness))


def plan(options: Namespace) -> Workload:
    """Return the sessions of a workload. They depend on the options alone.

    Without ``num_prompts``, which a ``--duration`` need not have, there are all of a file, else sessions without end.

    Raises:
        WorkloadError: a file cannot be read, or holds nothing to ask for.
    """
    lengths = random.Random(f"lengths {options.seed}")  # noqa: S311  # nosec B311 # no secret
    sessions = _PLANS[options.dataset_name](options, lengths)
    if options.dataset_name != "trace":
        sessions = _arriving(sessions, options)
    of_file = options.dataset_name in ("custom", "trace") or (
        options.dataset_name == "sharegpt" and options.dataset_path is not None
    )
    workload = Workload(sessions, endless=options.num_prompts is None and not of_file)
    if not workload.first(1):
        raise WorkloadError(f"{options.dataset_path}: it holds no requests")
    return workload


def _arriving(sessions: Iterable[Turn], options: Namespace) -> Iterator[Turn]:
    """Yield the sessions with the times at which they begin."""
    rng = random.Random(f"arrivals {options.seed}")  # noqa: S311  # nosec B311 # no secret
    times = arrivals(options.request_rate, options.burstiness, rng)
    for session, time in zip(sessions, times, strict=False):
        session.delay = time
        yield session


def _numbers(count: int | None) -> Iterable[int]:
    """Return the numbers below ``count``; None: all of them."""
    return itertools.count() if count is None else range(count)


def _random(options: Namespace, rng: random.Random) -> Iterator[Turn]:
    def around(length: int) -> int:
        spread = options.random_range_ratio
        return max(1, rng.randint(math.floor(length * (1 - spread)), math.ceil(length * (1 + spread))))

    shared: list[Part] = [Words("prefix", options.random_prefix_len)] if options.random_prefix_len else []
    for number in _numbers(options.num_prompts):
        prompt = Words(f"prompt {number}", around(options.random_input_len))
        yield Turn([*shared, prompt], around(options.random_output_len))


def _prefixes(options: Namespace, rng: random.Random) -> Iterator[Turn]:
    """Every prefix is asked the same number of questions, in random order."""
    for number, group in enumerate(_groups(options, rng)):
        prefix = Words(f"prefix {group}", options.prefix_repetition_prefix_len)
        question = Words(f"question {number}", options.prefix_repetition_suffix_len)
        yield Turn([prefix, question], options.prefix_repetition_output_len)


def _groups(options: Namespace, rng: random.Random) -> Iterator[int]:
    """Yield the numbers of the prefixes; without an end, each has been asked as often after some questions of each."""
    groups = options.prefix_repetition_num_prefixes
    count = _QUESTIONS_SHUFFLED * groups if options.num_prompts is None else options.num_prompts
    while True:
        order = [number % groups for number in range(count)]
        rng.shuffle(order)
        yield from order
        if options.num_prompts is not None:
            return


def _multi_turn(options: Namespace, rng: random.Random) -> Iterator[Turn]:
    """Sessions that share a beginning; each has as many turns as the others, and users think between them."""
    count = options.multi_turn_num_turns
    shared: list[Part] = [Words("prefix", options.multi_turn_prefix_len)] if options.multi_turn_prefix_len else []
    for session in _numbers(None if options.num_prompts is None else math.ceil(options.num_prompts / count)):
        chain: list[Turn] = []
        for number in range(count):
            own = Words(f"session {session} turn {number}", options.multi_turn_input_len)
            thinking = rng.expovariate(1 / options.think_time) if options.think_time and number else 0.0
            parts: list[Part] = [own] if number else [*shared, own]
            chain.append(Turn(parts, options.multi_turn_output_len, thinking, continues=number > 0))
        for turn, following in itertools.pairwise(chain):
            turn.following.append(following)
        yield chain[0]


def _sharegpt(options: Namespace, rng: random.Random) -> Iterator[Turn]:
    """Lengths that were drawn from ShareGPT, or conversations of a file in its format."""
    if options.dataset_path is not None:
        yield from _given(options, rng)
        return
    text = resources.files("pagewise.bench").joinpath("sharegpt_lengths.csv").read_text()
    pairs = [tuple(map(int, line.split(","))) for line in text.splitlines()[1:]]
    for number in _numbers(options.num_prompts):
        prompt, output = pairs[rng.randrange(len(pairs))]
        yield Turn(
            [Words(f"prompt {number}", _scaled(prompt, options))],
            options.sharegpt_output_len or _scaled(output, options),
        )


def _given(options: Namespace, rng: random.Random) -> list[Turn]:
    """Texts of a file: ShareGPT's JSON, or JSON lines with a ``prompt`` and perhaps ``output_tokens``."""
    path: Path = options.dataset_path
    try:
        whole = path.read_bytes()
        text = (gzip.decompress(whole) if path.suffix == ".gz" else whole).decode()
        lines = [line for line in text.splitlines() if line.strip()]
        records = json.loads(text) if text.lstrip().startswith("[") else [json.loads(line) for line in lines]
        found = [_given_turn(record, options) for record in records]
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, EOFError, zlib.error) as error:
        raise WorkloadError(
            f"{path}: {type(error).__name__}: {error}. What is read are JSON lines with a prompt (and output_tokens), "
            "or ShareGPT's JSON with conversations"
        ) from error
    asked = [turn for turn in found if turn is not None]
    rng.shuffle(asked)
    return asked[: options.num_prompts]


def _given_turn(record: dict[str, Any], options: Namespace) -> Turn | None:
    if "conversations" in record:
        said = record["conversations"]
        if len(said) < 2:
            return None
        prompt, answer = str(said[0]["value"]), str(said[1]["value"])
        return Turn([prompt], options.sharegpt_output_len or max(1, round(len(answer) * _GIVEN_TOKENS_PER_CHARACTER)))
    return Turn([str(record["prompt"])], max(1, int(record.get("output_tokens") or options.custom_output_len)))


def _trace(options: Namespace, rng: random.Random) -> list[Turn]:
    """Requests at the times at which they were recorded; equal ids of blocks are equal words."""
    if options.dataset_path is None:
        raise WorkloadError("--dataset-name trace needs --dataset-path FILE: a trace that `pagewise replay` reads")
    rate = 1.0 if math.isinf(options.request_rate) else options.request_rate
    try:
        trace = read_trace(options.dataset_path, limit=options.num_prompts, rate=rate, seed=options.seed)
    except TraceError as error:
        raise WorkloadError(str(error)) from error
    planned = [
        Turn(_blocks(request, options), _scaled(request.num_output_tokens, options), request.arrival)
        for request in trace
    ]
    sessions = []
    for request, turn in zip(trace, planned, strict=True):
        if request.after >= 0:
            planned[request.after].following.append(turn)
        else:
            sessions.append(turn)
    start = min((session.delay for session in sessions), default=0.0)
    for session in sessions:
        session.delay = (session.delay - start) / options.trace_speed
    return sorted(sessions, key=lambda session: session.delay)


def _blocks(request: TraceRequest, options: Namespace) -> list[Part]:
    parts: list[Part] = []
    left, size = _scaled(request.num_prompt_tokens, options), _scaled(request.block_tokens, options)
    for block in request.blocks:
        if left <= 0:
            break
        parts.append(Words(f"block {block}", min(left, size)))
        left -= size
    if left > 0:
        parts.append(Words(f"own {request.unique}", left))
    return parts


def _scaled(tokens: int, options: Namespace) -> int:
    scale: float = options.length_scale
    return max(1, round(tokens * scale))


_PLANS = {
    "random": _random,
    "sharegpt": _sharegpt,
    "custom": _given,
    "prefix_repetition": _prefixes,
    "multi-turn": _multi_turn,
    "trace": _trace,
}
DATASETS = tuple(_PLANS)
"""The workloads that there are."""
