"""Executors' messages are checked beyond their types: nonsense is refused or dropped, and others are not affected."""

import asyncio
from dataclasses import astuple
from pathlib import Path

import pytest
from pagewise_scheduler.core.tiers.arena import ArenaShape, WindowShape
from pagewise_scheduler.core.tiers.cost_model import CopyCosts, Costs
from pagewise_scheduler.server import executor_checks
from pagewise_scheduler.server.executor_checks import (
    MAX_FLEET_BLOCKS,
    check_copies,
    checked_inventory,
    checked_tokens,
    costs_of,
    hello_error,
    shape_of,
)
from pagewise_scheduler.server.sessions import ImpossibleError
from pagewise_shared.block_hash import BlockHash
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    DEVICE,
    DISK,
    HOST,
    TIER_NAMES,
    Copied,
    Inventory,
    LayerGroup,
    MeasuredCosts,
    NamedBlocks,
    PromptLogprobs,
    Refused,
    StepPlan,
    StepResult,
    TierInfo,
    TokenLogprobs,
    Welcome,
    pack_float32s,
    pack_int32s,
)
from pagewise_shared.sampling import BeamParams

from tests.scheduler.server.stack import RawExecutor, executor, hello, running

OFFERS = [
    {"num_blocks": 0},
    {"num_blocks": MAX_FLEET_BLOCKS + 1},
    {"num_blocks": 2**62},
    {"tiers": (TierInfo(HOST, -1),)},
    {"tiers": (TierInfo(HOST, 0),)},
    {"tiers": (TierInfo(HOST, 2**62),)},
    {"tiers": (TierInfo(DEVICE, 1),)},
    {"tiers": (TierInfo(-1, 1),)},
    {"tiers": (TierInfo(len(TIER_NAMES), 1),)},
    {"tiers": (TierInfo(HOST, 1), TierInfo(HOST, 1))},
    {"tiers": (TierInfo(HOST, 1, float("nan")),)},
    {"tiers": (TierInfo(HOST, 1, 0.0, -1.0),)},
    {"tiers": (TierInfo(HOST, 1, block_bytes=-1),)},
    {"tiers": (TierInfo(HOST, 1, dtype="a\nb"),)},
    {"tiers": (TierInfo(HOST, 1, 0.0, 0.0, 0.0, float("inf")),)},
    {"block_size": 2**62},
    {"max_model_len": 2**62},
    {"vocab_size": 2**62},
    {"max_num_seqs": -1},
    {"max_num_batched_tokens": -1},
    {"bytes_per_block": -1},
    {"executor_id": "x" * 257},
    {"executor_id": "a\n12:00:00 INFO forged"},
    {"device": "\x1b[31m"},
    {"block_endpoint": "tcp://" + "x" * 300},
    {"block_endpoint": " ".join(["tcp://" + "x" * 200] * 90)},
    {"block_format": "a\nb"},
    {"costs": MeasuredCosts(float("nan"), 0, 0)},
    {"costs": MeasuredCosts(0, 0, -1.0)},
    {"costs": MeasuredCosts(0, float("inf"), 0)},
    {"num_pages": 16},
    *(
        {"no_segments": "groups", "num_pages": 33, "num_blocks": 16, "groups": (LayerGroup(4, 2), LayerGroup(8, 1, 5))}
        | bad
        for bad in (
            {"num_pages": 0},
            {"num_pages": -1},
            {"num_pages": 2**40},
            {"num_pages": 34},
            {"num_blocks": 15},
            {"page_bytes": -1},
            {"no_segments": ""},
            {"groups": (LayerGroup(4, 2),)},
            {"groups": (LayerGroup(4, 2, 5), LayerGroup(8, 1, 5))},
            {"groups": (LayerGroup(4, 2, 0, True), LayerGroup(8, 1, 5))},
            {"groups": (LayerGroup(4, 2), LayerGroup(8, 1))},
            {"groups": (LayerGroup(4, 2), LayerGroup(8, 1, -5))},
            {"groups": (LayerGroup(4, 2), LayerGroup(8, 1, 2**40))},
            {"groups": (LayerGroup(4, 2), LayerGroup(8, 0, 5))},
            {"groups": (LayerGroup(4, 2), LayerGroup(8, 34, 5))},
            {"groups": (LayerGroup(0, 2), LayerGroup(8, 1, 5))},
        )
    ),
]


@pytest.mark.parametrize("fields", OFFERS, ids=repr)
def test_offers_that_make_no_sense(fields: dict[str, object]) -> None:
    assert hello_error(hello()) is None
    good = hello(costs=MeasuredCosts(1.0, 0.0, 0.0), tiers=(TierInfo(HOST, 1, 2.0, 3.0, 4.0, 5.0),))
    assert hello_error(good) is None
    assert hello_error(hello(**fields)) is not None


def test_groups_of_layers_make_the_shape_of_an_arena() -> None:
    groups = (LayerGroup(4, 2), LayerGroup(8, 1, 5), LayerGroup(8, 3, 8, chunked=True))
    offer = hello(num_pages=33, num_blocks=16, page_bytes=7, groups=groups, no_segments="groups")
    assert hello_error(offer) is None
    assert shape_of(hello(), 8) is None
    assert shape_of(offer, 8) == ArenaShape(33, 2, (WindowShape(5, 1), WindowShape(8, 3, chunked=True)), 8)


def test_what_was_measured_of_a_tier_is_where_the_scheduler_begins() -> None:
    measured = TierInfo(HOST, 1, 2.0, 3.0, 4.0, 5.0)
    costs = costs_of(hello(tiers=(measured,)))
    assert astuple(costs.of_tier(HOST)) == pytest.approx((2e-6, 3e-6, 4e-6, 5e-6))
    assert (costs.token, costs.fetch_block) == (Costs().token, Costs().fetch_block), "nothing was measured of the rest"
    costs = costs_of(hello(costs=MeasuredCosts(1.0, 2.0, 3.0), bytes_per_block=10**6, tiers=(TierInfo(HOST, 1),)))
    assert (costs.step, costs.token, costs.fetch_block) == pytest.approx((1e-6, 2e-6, 1e-3))
    assert costs.of_tier(HOST) == CopyCosts()


def entry(
    index: int = 0,
    token: int = 1,
    logprob: float = -1.0,
    rank: int = 1,
    ids: tuple[int, ...] = (),
    logprobs: tuple[float, ...] = (),
) -> TokenLogprobs:
    return TokenLogprobs(index, token, logprob, rank, pack_int32s(ids), pack_float32s(logprobs))


ONE = pack_int32s([1])
RESULTS = [
    StepResult(1, 1, b"abc"),
    StepResult(1, 1, pack_int32s([-1])),
    StepResult(1, 1, pack_int32s([100])),
    StepResult(1, 1, ONE, elapsed_us=-1),
    StepResult(1, 1, ONE, (entry(1),)),
    StepResult(1, 1, ONE, (entry(), entry())),
    StepResult(1, 1, ONE, (entry(token=100),)),
    StepResult(1, 1, ONE, (entry(logprob=float("nan")),)),
    StepResult(1, 1, ONE, (entry(rank=0),)),
    StepResult(1, 1, ONE, (entry(ids=(1, 2), logprobs=(-1.0,)),)),
    StepResult(1, 1, ONE, (entry(ids=(-1,), logprobs=(-1.0,)),)),
    StepResult(1, 1, ONE, (entry(ids=(1,), logprobs=(float("inf"),)),)),
    StepResult(1, 1, ONE, (entry(ids=(1, 2), logprobs=(-1.0, float("nan"))),)),
    StepResult(1, 1, ONE, (TokenLogprobs(0, 1, -1.0, 1, b"1", b"1"),)),
    StepResult(1, 1, ONE, (), (PromptLogprobs(0, (entry(64),)),)),
    StepResult(1, 1, ONE, (), (PromptLogprobs(0, (entry(2), entry(2))),)),
]


@pytest.mark.parametrize("result", RESULTS, ids=range(len(RESULTS)))
def test_results_that_cannot_be(result: StepResult) -> None:
    good = entry(ids=(1, 2), logprobs=(-0.1, float("-inf")))
    prompt = PromptLogprobs(0, (entry(1), entry(2)))
    assert checked_tokens(StepResult(1, 1, ONE, (good,), (prompt,), 5), hello()) == [1]
    with pytest.raises(ImpossibleError):
        checked_tokens(result, hello())


def test_copies_that_cannot_be() -> None:
    check_copies(Copied(1, 1, HOST, DEVICE, "", 5, ONE))
    for copied in (Copied(1, 1, HOST, DEVICE, "", -5), Copied(1, 1, HOST, DEVICE, "", 5, b"abc")):
        with pytest.raises(ImpossibleError):
            check_copies(copied)


def held(tier: int, blocks: list[int], group: int = 0, hashes: str = "") -> NamedBlocks:
    """Blocks with hashes of one letter each, by default a, b and so on."""
    letters = hashes or "abcdefgh"[: len(blocks)]
    return NamedBlocks(tier, pack_int32s(blocks), b"".join(letter.encode() * 32 for letter in letters), group)


GROUPS: dict[str, object] = {
    "groups": (LayerGroup(2, 2), LayerGroup(6, 3, window=16)), "num_pages": 20, "num_blocks": 10,
    "no_segments": "windows", "tiers": (TierInfo(HOST, 12), TierInfo(DISK, 0)),
}  # fmt: skip


def test_an_inventory_is_checked_by_group() -> None:
    name, other = BlockHash(b"a" * 32), BlockHash(b"b" * 32)
    one = Inventory((held(DEVICE, [9, 0]), held(DEVICE, [5], 1), held(HOST, [3], 1)))
    assert checked_inventory(hello(inventory=one, **GROUPS)) == [
        {DEVICE: {name: 9, other: 0}},
        {DEVICE: {name: 5}, HOST: {name: 3}},
    ]
    assert checked_inventory(hello(**GROUPS)) == [{}, {}]
    twice = Inventory((held(DEVICE, [1, 2], hashes="aa"),))
    assert checked_inventory(hello(inventory=twice)) == [{DEVICE: {name: 2}}], "one group may have two equal blocks"
    for tiers in (
        (held(DEVICE, [10]),),
        (held(DEVICE, [6], 1),),
        (held(HOST, [4], 1),),
        (held(DEVICE, [-1], 1),),
        (held(DEVICE, [1], 2),),
        (held(DEVICE, [1], -1),),
        (held(DISK, [1]),),
        (held(DEVICE, [1, 1]),),
        (held(DEVICE, [1, 2], hashes="aa"),),
        (held(HOST, [1], 1), held(HOST, [2], 1)),
        (held(HOST, [0, 1, 2, 3]), held(HOST, [0, 1], 1)),
    ):
        with pytest.raises(ProtocolError):
            checked_inventory(hello(inventory=Inventory(tiers), **GROUPS))


@pytest.mark.parametrize(
    "fields",
    [{"max_num_seqs": -1}, {"tiers": (TierInfo(HOST, 2**62),)}, {"vocab_size": 99}],
    ids=["seqs", "host", "vocabulary"],
)
async def test_a_fleet_refuses_an_impossible_offer_and_goes_on(tmp_path: Path, fields: dict[str, object]) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        raw = RawExecutor(tmp_path)
        await raw.send(hello(**({"vocab_size": 4096} | fields)))
        assert isinstance(await raw.receive(), Refused)
        raw.close()
        assert len(await stack.generate([1, 2, 3])) == 8


async def test_a_full_fleet_refuses_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_checks, "MAX_EXECUTORS", 1)
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        raw = RawExecutor(tmp_path)
        await raw.send(hello(vocab_size=4096))
        answer = await raw.receive()
        raw.close()
        assert isinstance(answer, Refused)
        assert "executors already" in answer.reason


@pytest.mark.parametrize("beam", [False, True])
async def test_an_executor_that_answers_nonsense_is_given_up_and_its_request_goes_on(
    tmp_path: Path, beam: bool
) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello(vocab_size=4096))
        assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3], beam=BeamParams(2) if beam else None))
        while not isinstance(plan := await raw.receive(), StepPlan):
            pass
        # A beam search without candidates would wait for ever; a token that does not exist would poison the others.
        await raw.send(StepResult(plan.epoch, plan.step, pack_int32s([7 if beam else 2**31 - 1])))
        await stack.ready(0)
        assert stack.dropped("out_of_step" if beam else "impossible") == 1
        raw.close()
        async with executor(tmp_path), asyncio.timeout(20):
            assert len(await moving) == 8
