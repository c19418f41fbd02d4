"""Random walks through conversations with hybrid models by HTTP, as clients leave and processes are killed: no token is
wrong."""

import asyncio
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import anyio
import httpx
import openai
import pytest

from benchmarks.chaos.harness import settled
from benchmarks.chaos.workload import client_of
from benchmarks.processes import Cluster, Process, running
from benchmarks.scrape import total
from tests.executor.random_texts import Texts
from tests.executor.references import Answer, check_answers
from tests.model_builders import FEW_LAYERS, build_model
from tests.structured import VOCAB_SIZE, save_tokenizer

MOST_OUTPUT, MOST_LIVE = 40, 10
SCHEDULER_OPTIONS = (
    *("--executor-timeout=3", "--step-timeout=10", "--gateway-timeout=3"),
    *("--max-num-batched-tokens=64", "--recovery=swap"),
)
EXECUTOR_OPTIONS = ("--num-blocks=40", "--block-size=8", "--host-memory=1MiB", "--verify-copies", "--dtype=float32")
NUM_EXECUTORS = 2
EVENTS = ("snapshots_taken", "snapshots_used", "evicted", "demoted", "loaded", "fetched", "corrupt")

Kind = Literal["kill executor", "drain executor", "kill scheduler", "kill gateway"]


@dataclass(eq=False)
class Asked:
    """A request. ``patience``: the seconds after which its client leaves; None: it waits for all tokens. ``cut``: the
    client has left, or the gateway was killed. ``tokens``, ``logprobs``, ``reasons``: of each output, as they came."""

    name: str
    prompt: list[int]
    body: dict[str, Any]
    patience: float | None
    cut: bool = False
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def answers(self) -> list[Answer]:
        prompt, greedy = tuple(self.prompt), self.body["temperature"] == 0
        return [
            Answer(f"{self.name} [{index}]", prompt, tokens, self.logprobs[index], greedy)
            for index, tokens in self.tokens.items()
        ]

    def check_ends(self) -> None:
        """Each output has ended for a reason that holds, unless it was cut."""
        most, stops = self.body["max_tokens"], self.body["extra_body"]["stop_token_ids"]
        assert self.cut or sorted(self.reasons) == [*range(self.body["n"])], self
        for index, tokens in self.tokens.items():
            assert not any(token in stops for token in tokens[:-1]), self
            match self.reasons.get(index):
                case "length":
                    assert len(tokens) == most, self
                case "stop":
                    assert tokens[-1] in stops, self
                case reason:
                    assert reason is None, self
                    assert len(tokens) <= most, self


class Walk:
    """Clients of a cluster. ``counts``: events of all its blocks so far."""

    def __init__(self, cluster: Cluster, model: str, seed: int) -> None:
        self._cluster, self._model, self._rng = cluster, model, random.Random(seed)
        self._texts = Texts(self._rng)
        self._executors = list(cluster.executors)
        self._gateway_lives = asyncio.Event()
        self._gateway_lives.set()
        self.asked: list[Asked] = []
        self.counts = Counter[str]()

    async def run(self, num_requests: int, disturbances: list[Kind]) -> None:
        """Ask, with as many requests around each disturbance, and see all of them to their end."""
        room, share = asyncio.Semaphore(MOST_LIVE), num_requests // len(disturbances)
        async with client_of(self._cluster.url) as client, asyncio.TaskGroup() as tasks:
            for kind in disturbances:
                await asyncio.to_thread(self._cluster.wait_ready, NUM_EXECUTORS)
                moment = len(self.asked) + self._rng.randrange(4, share)
                disturbed = tasks.create_task(self._disturb(kind, moment))
                for _ in range(share):
                    await room.acquire()
                    task = tasks.create_task(self._ask(client, self._request()))
                    task.add_done_callback(lambda _: room.release())
                await disturbed
        await asyncio.to_thread(self._cluster.wait_ready, NUM_EXECUTORS)
        assert await settled(self._cluster) == []
        self._count()

    def _request(self) -> Asked:
        rng, number = self._rng, len(self.asked)
        body = {
            "max_tokens": rng.randrange(1, rng.choice((8, MOST_OUTPUT))),
            "temperature": 0 if rng.random() < 0.6 else 1,
            "seed": number,
            "n": rng.choice((1, 1, 1, 2, 4)),
            "logprobs": 0,
            "extra_body": {
                "stop_token_ids": self._texts.random(rng.choice((0, 0, 5))),
                "priority": rng.choice((0, 0, 0, 1)),
                "cache_salt": rng.choice((None, None, None, None, "a")),
                "ignore_eos": True,
                "return_token_ids": True,
            },
        }
        patience = rng.uniform(0, 1) if rng.random() < 0.15 else None
        self.asked.append(asked := Asked(f"r{number}", self._texts.prompt(), body, patience))
        return asked

    async def _ask(self, client: openai.AsyncOpenAI, asked: Asked) -> None:
        await self._gateway_lives.wait()
        try:
            # asyncio's timeout would interrupt the client as it closes connections, and leave those open that it holds.
            with anyio.fail_after(asked.patience):
                stream = await client.completions.create(
                    model=self._model, prompt=asked.prompt, stream=True, **asked.body
                )
                async with stream:
                    async for chunk in stream:
                        self._take(asked, chunk)
        except TimeoutError:
            assert asked.patience is not None
            asked.cut = True
        except (openai.APIConnectionError, httpx.TransportError):
            if self._gateway_lives.is_set():
                raise
            asked.cut = True
        if asked.tokens:
            self._texts.tell([*asked.prompt, *self._rng.choice([*asked.tokens.values()])])

    @staticmethod
    def _take(asked: Asked, chunk: Any) -> None:
        for choice in chunk.choices:
            if new := choice.model_dump()["token_ids"]:
                asked.tokens.setdefault(choice.index, []).extend(new)
                asked.logprobs.setdefault(choice.index, []).extend(choice.logprobs.token_logprobs)
            if choice.finish_reason is not None:
                asked.reasons[choice.index] = choice.finish_reason

    async def _disturb(self, kind: Kind, moment: int) -> None:
        """End a process once so many requests have been asked, and start another one."""
        cluster = self._cluster
        while len(self.asked) < moment:
            await asyncio.sleep(0.01)
        match kind:
            case "kill scheduler":
                self._count()
                await self._end(cluster.scheduler, signal.SIGKILL)
                await asyncio.to_thread(cluster.start_scheduler)
            case "kill gateway":
                self._gateway_lives.clear()
                await self._end(cluster.gateways["gateway-0"], signal.SIGKILL)
                await asyncio.to_thread(cluster.start_gateway)
                self._gateway_lives.set()
            case "kill executor" | "drain executor":
                number = self._rng.randrange(NUM_EXECUTORS)
                await self._end(self._executors[number], signal.SIGKILL if "kill" in kind else signal.SIGTERM)
                self._executors[number] = cluster.start_executor(f"first-{number}")

    def _count(self) -> None:
        """Add the counts of a scheduler that ends to those of earlier ones."""
        samples = self._cluster.scrape()
        for event in EVENTS:
            self.counts[event] += int(total(samples, "kv_block_events_total", event=event))
        for name in ("request_moves", "num_preemptions"):
            self.counts[name] += int(total(samples, f"{name}_total"))

    @staticmethod
    async def _end(process: Process, number: signal.Signals) -> None:
        process.signal(number)
        code = await asyncio.to_thread(process.wait, 60)
        assert code == (0 if number == signal.SIGTERM else -number), process.tail()


async def walk(family: str, folder: Path, num_requests: int, seed: int, disturbances: list[Kind]) -> Counter[str]:
    """Check a walk, and return the counts of events of all executors."""
    build_model(family, model := folder / family, seed=7, vocab_size=VOCAB_SIZE, **FEW_LAYERS[family])
    save_tokenizer(model)
    cluster = Cluster(
        folder / "cluster",
        model=str(model),
        scheduler_options=SCHEDULER_OPTIONS,
        # Not /dev/shm: memory of killed executors would stay there.
        executor_options=(*EXECUTOR_OPTIONS, f"--host-memory-dir={folder}"),
    )
    with running(cluster, NUM_EXECUTORS):
        walked = Walk(cluster, str(model), seed)
        await walked.run(num_requests, disturbances)
    answers = [answer for asked in walked.asked for answer in asked.answers()]
    num_tokens, num_cut = sum(len(answer.tokens) for answer in answers), 0
    for asked in walked.asked:
        asked.check_ends()
        num_cut += asked.cut
    difference, counts = check_answers(model, answers), walked.counts
    print(f"{family}: {num_requests} requests, {num_cut} cut off, {num_tokens} tokens, {difference:.1e}: {counts}")
    assert num_tokens > 5 * num_requests
    assert num_cut > 0
    assert counts["corrupt"] == 0
    assert min(counts[name] for name in ("snapshots_used", "evicted", "demoted", "request_moves")) > 0
    return counts


@pytest.mark.timeout(300)
async def test_conversations_as_processes_are_killed(tmp_path: Path) -> None:
    await walk("qwen3_next", tmp_path, 60, 1, ["kill executor", "kill scheduler", "kill gateway"])


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
async def test_conversations_at_length_as_processes_are_killed(family: str, tmp_path: Path) -> None:
    counts = await walk(family, tmp_path, 500, 2, 3 * [*get_args(Kind)])
    assert min(counts[name] for name in ("loaded", "fetched")) > 0
