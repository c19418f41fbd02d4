"""Windows of models with several groups of layers go to host memory, to the disk and to other executors, and return."""

import queue
import random
from pathlib import Path
from time import monotonic
from typing import Literal

import msgspec
import pytest
import torch
import transformers
from pagewise_executor.model_runner import ModelRunner
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.scheduling.scheduler import Scheduler
from pagewise_scheduler.core.tiers.peer import PrefixDirectory
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_scheduler.server.executor_checks import checked_inventory
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import Advise, Found, LookUp, Welcome, pack_int32s

from benchmarks.processes import free_port
from tests.cpu_kernels import auto_kernels
from tests.executor.driver import arena_of, drive, request, run_requests
from tests.executor.parity import check_mixture, check_recovery
from tests.executor.poisoned_runner import PoisonedRunner
from tests.executor.references import reference
from tests.executor.runners import build_runner, peers_at
from tests.model_builders import EAGER, VOCAB_SIZE, build_model, model_fixture

LENGTHS = (100, 41, 64)


FAMILIES = ("gemma3", "gpt_oss", "gemma4", "llama4", "olmo3", "ministral", "gemma4_moe", "gemma2", "gemma3n")
LONG = FAMILIES[4:]


model_path = model_fixture(*(pytest.param(one, marks=[pytest.mark.long] * (one in LONG)) for one in FAMILIES), seed=7)

gemma3 = model_fixture("gemma3", seed=7)

ahead_path = model_fixture("gemma3", "granitemoehybrid", seed=7)

MOVED = (
    *("gemma3", "llama4", "gpt_oss", "gemma4", "gemma4_moe", "olmo3", "ministral", "gemma2", "gemma3n"),
    *("deepseek_v3", "glm4_moe_lite", "mistral4", "glm4_moe", "minimax_m2", "qwen3_moe"),
)
"""Windows of two kinds, K and V that layers share, and one vector for both; and, as one group, latents and mixtures."""

moved_path = model_fixture(*(pytest.param(one, marks=[pytest.mark.long] * (one in MOVED[2:])) for one in MOVED), seed=7)


class Conversations:
    """Prompts, their next turns, and a model's answers to them."""

    def __init__(self, path: Path) -> None:
        rng = random.Random(3)
        first = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]
        eager = any(family in str(path) for family in EAGER)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager" if eager else "sdpa"
        )
        answers = reference(model, first, [8] * 3, "cpu")
        second = [[*prompt, *answer, 5, 6, 7] for prompt, answer in zip(first, answers, strict=True)]
        self._prompts = first, second
        self.expected = answers, reference(model, second, [8] * 3, "cpu")

    def turn(self, number: int) -> list[Request]:
        return [request(prompt, 8, name=f"{number}.{i}") for i, prompt in enumerate(self._prompts[number])]

    def check(self, turns: list[list[Request]]) -> None:
        for requests, expected in zip(turns, self.expected, strict=True):
            assert [one.sequences[0].output_token_ids.tolist() for one in requests] == expected


@pytest.mark.parametrize("mode", ["swap", "auto"])
def test_conversations_return_from_the_host(model_path: Path, mode: RecoveryMode) -> None:
    runner, num_loaded = check_recovery(model_path, mode, 17, n=2, host_memory="4MiB")
    assert runner.info.groups
    assert mode == "auto" or num_loaded > 0
    runner.close()


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        ("gemma3", 5),
        *(pytest.param(family, seed, marks=pytest.mark.long) for seed, family in enumerate(FAMILIES, 1)),
    ],
)
def test_everything_mixed_at_random(family: str, seed: int, tmp_path: Path) -> None:
    build_model(family, tmp_path / "model", seed=7)
    check_mixture(tmp_path / "model", seed, block_size=3, host_memory="300KiB", disk_cache=str(tmp_path / "disk"))


def test_windows_and_states_come_ahead_of_their_use(ahead_path: Path) -> None:
    runner = build_runner(ahead_path, host_memory="4MiB", verify_copies=True)
    conversations = Conversations(ahead_path)
    first, again = conversations.turn(0), conversations.turn(1)
    scheduler, _ = run_requests(runner, first, recovery="swap", eviction="cost")
    kinds: tuple[Literal["cold", "willneed"], ...] = ("cold", "willneed")
    for kind in kinds:
        for one in first:
            tokens = pack_int32s([*one.prompt_token_ids, *one.sequences[0].output_token_ids])
            advice = Advise(1, 1, kind, tokens=tokens, seconds=5.0)
            assert scheduler.features.advice.advise(advice, monotonic()).outcome == "accepted"
        drive(runner, scheduler, [])
    counters = scheduler.kv.pool.counters
    assert (num_loaded := counters.loaded) > 20
    drive(runner, scheduler, again)
    conversations.check([first, again])
    assert (counters.loaded, counters.corrupt) == (num_loaded, 0)
    cached = [one.num_cached_tokens for one in again]
    assert (cached[0], cached[2]) == (104, 64)  # states of the other one lie before its answer
    assert scheduler.kv.num_available == scheduler.kv.num_total
    runner.close()


@pytest.mark.parametrize("peer_blocks", [400, 22])
def test_windows_come_from_another_executor(moved_path: Path, peer_blocks: int) -> None:
    """With 22 blocks some of them are on the host of the other executor by then."""
    holder, fetcher = (build_runner(moved_path, exchange=peers_at(), host_memory="4MiB") for _ in range(2))
    conversations, directory = Conversations(moved_path), PrefixDirectory()
    first, again = conversations.turn(0), conversations.turn(1)
    theirs, _ = run_requests(holder, first, num_blocks=peer_blocks, recovery="swap", directory=directory)
    scheduler, _ = run_requests(fetcher, again, recovery="swap", directory=directory)
    conversations.check([first, again])
    counters = scheduler.kv.pool.counters
    assert counters.fetched > 10
    assert counters.fetch_failed == 0
    assert theirs.kv.num_available == theirs.kv.num_total
    assert scheduler.kv.num_available == scheduler.kv.num_total
    for runner in (holder, fetcher):
        runner.close()


def look_up(runner: ModelRunner, scheduler: Scheduler, asked: Request) -> None:
    """Ask the tier that finds blocks by their names how much it has of a request, as the server does."""
    (tier,) = scheduler.kv.hashed
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    runner.report_to(told.put)  # type: ignore[arg-type]
    root = scheduler.kv.pool.tree.root_hash(asked.params.cache_salt)
    runner.handle(LookUp(1, 7, tier, root, asked.prompt_token_ids.tobytes()))
    answer = told.get(timeout=20)
    assert isinstance(answer, Found)
    asked.stored[scheduler.kv.hashed[tier].identity] = answer.num_blocks


def check_stored(path: Path, **options: object) -> None:
    """An executor begins with the windows that another one has stored in the same store."""
    conversations = Conversations(path)
    first, again = conversations.turn(0), conversations.turn(1)
    runners = [build_runner(path, **options) for _ in range(2)]
    run_requests(runners[0], first, num_blocks=22, recovery="swap")
    scheduler, _ = run_requests(runners[1], [], recovery="swap")
    deadline = monotonic() + 60
    while sum(sum(one.stored.values()) for one in again) <= 10:  # until all writes have arrived
        assert monotonic() < deadline
        for one in again:
            look_up(runners[1], scheduler, one)
    drive(runners[1], scheduler, again)
    conversations.check([first, again])
    assert scheduler.kv.pool.counters.recalled > 10
    for runner in runners:
        runner.close()


@pytest.mark.parametrize("host_memory", [None, "300KiB"])
def test_windows_come_from_the_disk(moved_path: Path, tmp_path: Path, host_memory: str | None) -> None:
    """Another executor with the same folder finds where it can begin."""
    check_stored(moved_path, host_memory=host_memory, disk_cache=str(tmp_path))


@pytest.mark.parametrize("host_memory", [pytest.param(None, marks=pytest.mark.long), "300KiB"])
def test_windows_come_from_redis(moved_path: Path, tmp_path: Path, host_memory: str | None) -> None:
    pytest.importorskip("fakeredis")
    from tests.redis_servers import REAL, start_fake, start_real

    port = free_port()
    stop = (start_real if REAL is not None else start_fake)(tmp_path, port)
    check_stored(moved_path, host_memory=host_memory, store=f"redis://127.0.0.1:{port}/0")
    stop()


def test_pages_that_hold_nothing_are_never_read_beside_copies(gemma3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PoisonedRunner(
        ExecutorConfig(
            model=str(gemma3), device="cpu", dtype="float32", block_size=4, num_blocks=200, host_memory="600KiB",
            kernels=auto_kernels(), profile=False, verify_copies=True,
        )  # type: ignore[arg-type]
    )  # fmt: skip
    runner.attend_to(monkeypatch)
    conversations = Conversations(gemma3)
    first, again = conversations.turn(0), conversations.turn(1)
    scheduler, _ = run_requests(runner, first, num_blocks=30, max_num_batched_tokens=13, recovery="swap")
    drive(runner, scheduler, [request([3 + i] * 90, 8, f"between {i}") for i in range(3)])
    drive(runner, scheduler, again)
    conversations.check([first, again])
    assert scheduler.kv.pool.counters.loaded > 3
    assert scheduler.kv.pool.counters.corrupt == 0
    assert runner.most_poisoned > 5
    runner.close()


def test_a_new_scheduler_begins_where_the_last_one_ended(moved_path: Path) -> None:
    runner = build_runner(moved_path, host_memory="4MiB")
    conversations = Conversations(moved_path)
    first, again = conversations.turn(0), conversations.turn(1)
    run_requests(runner, first)
    info = msgspec.structs.replace(runner.info, inventory=runner.inventory())
    scheduler = Scheduler(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        tiers={tier.number: tier.num_blocks for tier in info.tiers},
        recovery="swap",
        shape=arena_of(info, 64),
    )
    scheduler.kv.expect(checked_inventory(info))
    runner.reset(Welcome(1, 8, 64, keeps_blocks=True))
    for one in again:
        scheduler.kv.restore(None, one.prompt_token_ids.tobytes)
    drive(runner, scheduler, again)
    conversations.check([first, again])
    assert [one.num_cached_tokens for one in again] == [(length + 7) // 8 * 8 for length in LENGTHS]
    runner.close()
