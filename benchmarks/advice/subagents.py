"""A trace of coding agents with sub-agents: made up, from the statistics of the agentic trace.

A person gives an agent one task after the other. The agent answers with calls of tools until it is done; then the
person reads, and comes back or not. To *delegate* is a tool too: sub-agents begin with the whole prompt of their parent
and a task of their own, run side by side, and end. The parent goes on a second after the one that takes the longest.

First prompts, growth of prompts and lengths of answers are drawn from the agentic trace, and so are the think times of
people. Names of tools are not in the trace. Their durations have log-normal distributions, whose mixture has the
quantiles of the think times after tool calls there: half of them below 6 s, 90 % below 17 s, 95 % below a minute.
"""

import random
from math import log
from typing import NamedTuple

from pagewise_scheduler.replay.traces import TraceRequest

_SYSTEM_TOKENS = 14_656
"""The beginning that all agents share: tools and system prompt."""
_MOST_TOKENS, _LONGEST_THINKING = 120_000, 3600.0
_TOKEN_SECONDS = 0.005
"""The seconds of a token of an answer, roughly, from which it follows which sub-agent ends last."""
_DELEGATE = "delegate"


class Tool(NamedTuple):
    """How often a tool is called, the median of its durations in seconds, and the deviation of their logarithm."""

    weight: float
    median: float
    deviation: float


TOOLS = {
    "read_file": Tool(0.50, 4.5, 0.3),
    "edit_file": Tool(0.25, 6.0, 0.3),
    "web_search": Tool(0.10, 13.0, 0.4),
    "run_tests": Tool(0.06, 60.0, 0.4),
    "ask_approval": Tool(0.04, 120.0, 1.0),
    _DELEGATE: Tool(0.05, 1.0, 0.0),
}
_OF_SUB_AGENTS = ("read_file", "edit_file", "web_search", "run_tests")
_CALLS, _SUB_CALLS, _TASKS_GO_ON, _SUB_AGENTS = 12.0, 5.0, 0.73, (2, 5)
"""Mean numbers of calls for a task and in a sub-agent, how often a person comes back, and how many sub-agents there
are."""


class Turns(NamedTuple):
    """Requests in the order in which they are made; the session and the called tool of each; parents of sessions."""

    requests: list[TraceRequest]
    sessions: list[int]
    tools: list[tuple[str, ...]]
    parents: dict[int, int]


class _Statistics(NamedTuple):
    """Values of the agentic trace."""

    first: list[int]
    growth: list[int]
    outputs: list[int]
    people: list[float]


def _statistics(trace: list[TraceRequest]) -> _Statistics:
    followed = [(trace[one.after], one) for one in trace if one.after >= 0]
    return _Statistics(
        [one.num_prompt_tokens for one in trace if one.after < 0],
        [max(16, one.num_prompt_tokens - before.num_prompt_tokens) for before, one in followed],
        [one.num_output_tokens for one in trace],
        [min(one.arrival, _LONGEST_THINKING) for before, one in followed if not before.tool_call],
    )


class _Agents:
    def __init__(self, trace: list[TraceRequest], seed: int) -> None:
        self._rng, self._found = random.Random(seed), _statistics(trace)
        self._block = trace[0].block_tokens
        self._system = list(range(1, 1 + _SYSTEM_TOKENS // self._block))
        self._num_blocks = len(self._system)
        self.made = Turns([], [], [], {})

    def root(self, start: float) -> None:
        """Add an agent that a person starts at a time."""
        session, rng = self._begin(), self._rng
        blocks, size, after, thinks = self._system, _SYSTEM_TOKENS, -1, start
        added = max(500, rng.choice(self._found.first) - _SYSTEM_TOKENS)
        while size + added < _MOST_TOKENS:
            calls = 1 + int(rng.expovariate(1 / _CALLS))
            for name in [*self._named(list(TOOLS), calls), ""]:
                blocks, size = self._grown(blocks, size, added)
                after = self._turn(session, blocks, size, after, thinks, name)
                added, thinks = rng.choice(self._found.growth), self._duration(name)
                if name == _DELEGATE:
                    last = max(self._sub_agent(session, blocks, size, after) for _ in range(rng.randint(*_SUB_AGENTS)))
                    after = last[1]
            if rng.random() > _TASKS_GO_ON:
                return
            thinks = rng.choice(self._found.people)

    def _sub_agent(self, parent: int, blocks: list[int], size: int, after: int) -> tuple[float, int]:
        """Returns about how long it takes, and its last request."""
        session, seconds, thinks = self._begin(), 0.0, 0.0
        self.made.parents[session] = parent
        for name in [*self._named(_OF_SUB_AGENTS, 1 + int(self._rng.expovariate(1 / _SUB_CALLS))), ""]:
            blocks, size = self._grown(blocks, size, self._rng.choice(self._found.growth))
            after = self._turn(session, blocks, size, after, thinks, name)
            seconds += thinks + _TOKEN_SECONDS * self.made.requests[after].num_output_tokens
            thinks = self._duration(name)
        return seconds, after

    def _begin(self) -> int:
        return len(self.made.requests)

    def _named(self, names: "list[str] | tuple[str, ...]", count: int) -> list[str]:
        return self._rng.choices(names, [TOOLS[name].weight for name in names], k=count)

    def _duration(self, name: str) -> float:
        tool = TOOLS.get(name)
        return self._rng.lognormvariate(log(tool.median), tool.deviation) if tool is not None else 0.0

    def _grown(self, blocks: list[int], size: int, added: int) -> tuple[list[int], int]:
        """Append tokens to a prompt that no other prompt has."""
        size += added
        first = self._num_blocks + 1
        self._num_blocks += size // self._block - len(blocks)
        return [*blocks, *range(first, self._num_blocks + 1)], size

    def _turn(self, session: int, blocks: list[int], size: int, after: int, thinks: float, name: str) -> int:
        made, output = self.made, self._rng.choice(self._found.outputs)
        unique = len(made.requests)
        made.requests.append(TraceRequest(thinks, size, output, blocks, self._block, unique, after, bool(name)))
        made.sessions.append(session)
        made.tools.append((name,) if name else ())
        return unique


def sub_agents(trace: list[TraceRequest], num_sessions: int, gap: float, seed: int = 1) -> Turns:
    """Make agents, of which a person starts one every ``gap`` seconds on average. ``trace``: the agentic one."""
    agents, arrivals = _Agents(trace, seed), random.Random(seed + 1)
    start = 0.0
    for _ in range(num_sessions):
        start += arrivals.expovariate(1 / gap)
        agents.root(start)
    return agents.made
