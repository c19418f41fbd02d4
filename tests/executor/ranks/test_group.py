"""An executor of two processes answers like one of one process: with its tiers, and all options of requests."""

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llguidance")
from pagewise_executor.leading_runner import LeadingRunner
from pagewise_executor.model_runner import ModelRunner
from pagewise_executor.plan_checks import InvalidPlanError
from pagewise_gateway.structured.grammars import regex_grammar
from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.core.tiers.recovery_plan import RecoveryMode
from pagewise_shared.block_hash import BlockName
from pagewise_shared.config import SpeculativeConfig
from pagewise_shared.model_files import resolve_model
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    BlockCopies,
    Copied,
    Found,
    Inventory,
    LookUp,
    NewSequence,
    StepPlan,
    Welcome,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import SamplingParams

from tests.executor.driver import request, run_requests
from tests.executor.ranks.groups import config_of, group_of

MODEL = resolve_model("pagewise-demo")
TIERS = {"host_memory": "4MiB", "verify_copies": True}
NGRAM = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1, disable_by_batch_size=4)
PHRASE = [40, 300, 512, 77, 1200, 9]


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def group(disk: Path) -> Iterator[LeadingRunner]:
    with group_of(MODEL, 2, disk_cache=str(disk), **TIERS) as runner:
        yield runner


@pytest.fixture(scope="module")
def one() -> Iterator[ModelRunner]:
    runner = ModelRunner(config_of(MODEL, 1, **TIERS))
    yield runner
    runner.close()


def prompts() -> list[list[int]]:
    """Conversations that come back after others have taken their blocks, some with more, some cut inside a block."""
    base = [
        [3 + (7 * number + 13 * place) % 4000 for place in range(length)] for number, length in enumerate((70, 64, 90))
    ]
    return [*base, [*base[0], 7, 8, 9], [*base[1][:43], 5], base[2], base[0][:60]]


def tokens(asked: list[Request]) -> list[list[int]]:
    return [sequence.output_token_ids.tolist() for each in asked for sequence in each.sequences]


@pytest.mark.parametrize("mode", ["swap", "both"])
def test_kv_comes_back_from_the_host_of_each_rank(group: LeadingRunner, one: ModelRunner, mode: RecoveryMode) -> None:
    found = []
    for runner in (group, one):
        asked = [request(prompt, 9, name=f"r{number}") for number, prompt in enumerate(prompts())]
        scheduler, _ = run_requests(
            runner, asked, num_blocks=16, max_num_batched_tokens=24, arrive_every=9, recovery=mode
        )
        assert scheduler.kv.pool.counters.loaded > 0
        assert scheduler.kv.num_available == 16
        found.append(tokens(asked))
    assert found[0] == found[1]


def kinds() -> list[dict[str, Any]]:
    few = tuple(PHRASE)
    return [
        {"allowed": few},
        {"temperature": 0.9, "seed": 5},
        {"temperature": 0.8, "seed": 6, "top_k": 40, "top_p": 0.9, "n": 2},
        {"temperature": 0.7, "seed": 7, "min_tokens": 6, "stop_token_ids": (PHRASE[3], 1)},
        {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 0.9, "seed": 4, "grammar": regex_grammar(r"[a-z]+ = \d+")},
    ]


@pytest.mark.parametrize("speculative", [None, NGRAM], ids=["", "drafts"])
def test_whatever_requests_ask_for(
    group: LeadingRunner, one: ModelRunner, speculative: SpeculativeConfig | None
) -> None:
    found = []
    for runner in (group, one):
        asked = [
            request([11 + number, *PHRASE * (2 + number % 3)], 24, f"r{number}", **kind)
            for number, kind in enumerate(kinds())
        ]
        scheduler, outputs = run_requests(
            runner, asked, max_num_seqs=4, max_num_batched_tokens=48, speculative=speculative
        )
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs.values()]
        found.append((tokens(asked), [round(value, 3) for value in logprobs]))
        if speculative is not None:
            assert scheduler.features.drafts.num_accepted_tokens > 0
    assert found[0] == found[1]
    assert found[0][1]


def new_sequence(row: int, count: int, first_block: int, root: bytes = b"") -> NewSequence:
    blocks = array("i", range(first_block, first_block + -(-count // 8)))
    return NewSequence(
        row, pack_int32s(range(5, 5 + count)), count, 0, blocks.tobytes(), SamplingParams(temperature=0.0), root=root
    )


def test_a_wrong_plan_is_refused_by_rank_0_and_the_others_hear_nothing_of_it(group: LeadingRunner) -> None:
    group.reset(Welcome(5, 4, 64))
    with pytest.raises(InvalidPlanError):
        group.execute(StepPlan(5, 1, joined=(new_sequence(0, 9, 9_999),), chunks=((0, 9),)))
    group.reset(Welcome(6, 4, 64))
    result = group.execute(StepPlan(6, 1, joined=(new_sequence(0, 9, 0),), chunks=((0, 9),))).result()
    assert result.error is None
    assert len(result.tokens) == 4


def test_a_draft_that_comes_too_early_is_refused_before_the_others_hear_of_it(group: LeadingRunner) -> None:
    group.reset(Welcome(3, 4, 64))
    group.execute(StepPlan(3, 1, joined=(new_sequence(0, 9, 0),), chunks=((0, 9),))).result()
    group.execute(StepPlan(3, 2))  # its result is not waited for
    with pytest.raises(InvalidPlanError, match="before its last token is known"):
        group.execute(StepPlan(3, 3, drafts=((0, pack_int32s([5])),)))
    group.reset(Welcome(4, 4, 64))  # all ranks have gone on from the same step


def test_the_device_of_all_ranks_is_told(group: LeadingRunner, one: ModelRunner) -> None:
    assert group.info.device == f"{one.info.device}, 2 ranks"
    assert group.info.bytes_per_block == one.info.bytes_per_block, "all parts of a block are as large as the whole"


@pytest.mark.parametrize("source", [DEVICE, HOST])
def test_what_all_ranks_hold_is_offered_stored_and_found(group: LeadingRunner, disk: Path, source: int) -> None:
    said: list[Any] = []
    group.report_to(said.append)
    group.reset(Welcome(7, 4, 64))
    root = bytes(range(source, source + 32))
    group.execute(StepPlan(7, 1, joined=(new_sequence(0, 33, 0, root),), chunks=((0, 33),))).result()
    group.execute(StepPlan(7, 2, left=(0,))).result()
    names = _names(group.inventory())
    assert sorted(names) == [0, 1, 2, 3]
    group.reset(Welcome(8, 4, 64, keeps_blocks=True))
    parents = [root, *(names[block] for block in range(3))]
    called = [BlockName(names[block], parents[block]) for block in range(4)]  # type: ignore[arg-type]
    pairs = array("i", [block for place in range(4) for block in (place, place)]).tobytes()
    copies = BlockCopies(source, DISK, pairs, names=b"".join(h + p for h, p in called))
    above = (BlockCopies(DEVICE, HOST, pairs),) if source == HOST else ()
    group.execute(StepPlan(8, 1, copies=(*above, copies))).result()
    assert not _wait_for(said, Copied, DISK).bad
    group.handle(LookUp(8, 1, DISK, root, pack_int32s(range(5, 38))))
    assert _wait_for(said, Found).num_blocks == 4
    files = [file for file in disk.rglob("*") if file.is_file() and file.stat().st_size >= 512]
    assert len(files) >= 8, "each rank has its own part of each block"
    folders = sorted({file.relative_to(disk).parts[0] for file in files})
    assert len(folders) == 2
    victim = next(
        file for file in files if file.relative_to(disk).parts[0] == folders[1] and names[1].hex()[:16] in file.name
    )
    victim.unlink()
    said.clear()
    back = BlockCopies(DISK, DEVICE, array("i", [0, 20, 1, 21, 2, 22, 3, 23]).tobytes(), names=copies.names)
    group.execute(StepPlan(8, 2, copies=(back,))).result()
    assert list(unpack_int32s(_wait_for(said, Copied, DEVICE).bad)) == [21], "one rank lacks its part of that block"


def _names(inventory: Inventory | None) -> dict[int, bytes]:
    assert inventory is not None
    named = next(tier for tier in inventory.tiers if tier.tier == DEVICE)
    return {
        block: named.hashes[32 * place : 32 * place + 32] for place, block in enumerate(unpack_int32s(named.blocks))
    }


def _wait_for(said: list[Any], kind: type[Any], target: int | None = None) -> Any:
    deadline = time.monotonic() + 30
    while not (found := [one for one in said if isinstance(one, kind) and (target is None or one.target == target)]):
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
    return found[0]
