"""A hundred streams of every kind, through the real ``openai`` client: requests, and times of tokens."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import openai

PREFIX = "class Account:\n    def __init__(self, owner, balance):\n        self.owner = owner\n" * 4
"""The text with which the conversations of one kind begin."""

LOGPROB_TOLERANCE = 2e-3
"""The same token in another batch: float32 sums in another order."""


CLIENT_SECONDS = 600.0
"""Most that a client waits for bytes: outputs that are chosen at the end come after many executors, on busy cores."""


@dataclass(frozen=True)
class Case:
    """One request. ``body`` is the client's; ``told_at_end``: its outputs are chosen among several."""

    kind: str
    body: dict[str, Any]
    told_at_end: bool = False

    @property
    def chat(self) -> bool:
        return "messages" in self.body


@dataclass
class Choice:
    """One output, put together from its chunks. ``times``: when they came."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    times: list[float] = field(default_factory=list)


@dataclass
class Outcome:
    """The result of a stream. ``request_id``: the server's, known from the first chunk on. ``gateway``: that it
    asked."""

    case: Case
    request_id: str = ""
    gateway: str = ""
    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False

    def differences(self, other: "Outcome") -> list[str]:
        """How it is not the same as ``other``."""
        found = []
        if sorted(self.choices) != sorted(other.choices):
            found.append(f"choices {sorted(self.choices)} and {sorted(other.choices)}")
        for index in self.choices.keys() & other.choices.keys():
            mine, theirs = self.choices[index], other.choices[index]
            found += [
                f"{name} of choice {index}: {getattr(mine, name)!r} and {getattr(theirs, name)!r}"
                for name in ("tokens", "text", "finish_reason")
                if getattr(mine, name) != getattr(theirs, name)
            ]
            if not _close(mine.logprobs, theirs.logprobs):
                found.append(f"log-probabilities of choice {index}: {mine.logprobs} and {theirs.logprobs}")
        if self.completion_tokens != other.completion_tokens:
            found.append(f"{self.completion_tokens} and {other.completion_tokens} completion tokens")
        return [f"{self.case.kind}: {difference}" for difference in found]

    def begins(self, whole: "Outcome") -> bool:
        """Whether the text that came before it was cut off is the beginning of ``whole``."""
        return all(
            index in whole.choices and whole.choices[index].tokens[: len(choice.tokens)] == choice.tokens
            for index, choice in self.choices.items()
        )

    def longest_gap(self, begins_before: float, ends_after: float) -> tuple[float, float] | None:
        """The longest wait for a token of a running output around some moment; None: nothing of it ran then."""
        gaps = [
            (before, after)
            for choice in self.choices.values()
            for before, after in zip(choice.times, choice.times[1:], strict=False)
            if before < begins_before and after > ends_after
        ]
        return max(gaps, key=lambda gap: gap[1] - gap[0], default=None)


def _close(mine: list[float | None], theirs: list[float | None]) -> bool:
    if len(mine) != len(theirs):
        return False
    return all(
        a == b if a is None or b is None else math.isclose(a, b, abs_tol=LOGPROB_TOLERANCE)
        for a, b in zip(mine, theirs, strict=True)
    )


def make_cases(count: int, max_tokens: int) -> list[Case]:
    """``count`` requests, nine kinds in turn."""
    makers: list[Callable[[int, int], Case]] = [
        lambda i, n: _completion("greedy", i, n, temperature=0),
        lambda i, n: _completion("sampled", i, n, temperature=0.9, top_p=0.9, seed=i),
        lambda i, n: _completion(
            "penalties", i, n, temperature=0.8, seed=i, presence_penalty=0.5, frequency_penalty=0.3,
            repetition_penalty=1.1, top_k=50,
        ),
        lambda i, n: _completion("three outputs", i, n // 2, temperature=1.0, seed=i, n=3),
        lambda i, n: _completion("beam search", i, n // 4, temperature=0, n=3, use_beam_search=True, at_end=True),
        lambda i, n: _completion("shared prefix", i, n, prefix=PREFIX, temperature=0),
        lambda i, n: _completion("log-probabilities", i, n, temperature=0.7, seed=i, logprobs=3, echo=i % 20 > 9),
        lambda i, n: _completion("stop strings", i, 2 * n, temperature=1.0, seed=i, stop=["return", "\n\n\n"]),
        _conversation,
    ]  # fmt: skip
    return [makers[i % len(makers)](i, max_tokens + 7 * (i % 5)) for i in range(count)]


def _completion(kind: str, number: int, max_tokens: int, prefix: str = "", at_end: bool = False, **more: Any) -> Case:
    own = (
        "temperature",
        "top_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "n",
        "logprobs",
        "stop",
        "echo",
    )
    extra = {name: more.pop(name) for name in list(more) if name not in own}
    extra |= {"return_token_ids": True, "ignore_eos": kind != "stop strings"}
    prompt = f"{prefix}def method_{number}(self, value):\n    "
    return Case(kind, {"prompt": prompt, "max_tokens": max_tokens, **more, "extra_body": extra}, at_end)


def _conversation(number: int, max_tokens: int) -> Case:
    return Case(
        "chat",
        {
            "messages": [
                {"role": "system", "content": PREFIX},
                {"role": "user", "content": f"Write a function named read_{number}."},
            ],
            "max_tokens": max_tokens,
            "temperature": 0.8,
            "seed": number,
            "logprobs": True,
            "top_logprobs": 2,
            "extra_body": {"return_token_ids": True},
        },
    )


def client_of(url: str, retries: int = 0, key: str = "none") -> openai.AsyncOpenAI:
    """A client for many streams at once, patient enough for an executor to start. ``key``: its API key."""
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, timeout=CLIENT_SECONDS)


async def stream(client: openai.AsyncOpenAI, case: Case, outcome: Outcome) -> Outcome:
    """Run one request to its end, filling ``outcome`` as chunks come."""
    api: Any = client.chat.completions if case.chat else client.completions
    options = {"model": "pagewise-demo", "stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await api.create(**options, **case.body):
        now = monotonic()
        outcome.request_id = chunk.id.split("-", 1)[1]
        if chunk.usage is not None:
            outcome.completion_tokens = chunk.usage.completion_tokens
            outcome.prompt_tokens = chunk.usage.prompt_tokens
            outcome.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens
        for part in chunk.choices:
            choice = outcome.choices.setdefault(part.index, Choice())
            choice.times.append(now)
            choice.text += (part.delta.content or "") if case.chat else part.text
            choice.tokens += (part.model_extra or {}).get("token_ids") or []
            choice.finish_reason = part.finish_reason or choice.finish_reason
            if part.logprobs is not None:
                listed = part.logprobs.content if case.chat else part.logprobs.token_logprobs
                choice.logprobs += [entry.logprob for entry in listed] if case.chat else listed
    assert all(choice.finish_reason in ("stop", "length") for choice in outcome.choices.values()), outcome
    outcome.done = True
    return outcome


async def references(url: str, cases: list[Case], key: str = "none") -> list[Outcome]:
    """The answers of an undisturbed server, ten at a time. ``key``: the API key to ask with."""
    room = asyncio.Semaphore(10)

    async def one(client: openai.AsyncOpenAI, case: Case) -> Outcome:
        async with room:
            return await stream(client, case, Outcome(case))

    async with client_of(url, key=key) as client:
        return list(await asyncio.gather(*(one(client, case) for case in cases)))
