"""What every rank does for itself is confirmed once, when all have done it."""

from pagewise_executor.ranks.agreement import Agreement, common_blocks
from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    Copied,
    Found,
    Inventory,
    NamedBlocks,
    StepError,
    pack_int32s,
    unpack_int32s,
)


def copied(step: int = 1, bad: tuple[int, ...] = (), seconds: float = 0.0, error: str = "", epoch: int = 3) -> Copied:
    failed = StepError("internal", error) if error else None
    return Copied(epoch, step, HOST, DEVICE, elapsed_us=int(seconds * 1e6), bad=pack_int32s(bad), error=failed)


def agreement(size: int = 3) -> tuple[Agreement, list[Copied | Found]]:
    reported: list[Copied | Found] = []
    return Agreement(size, reported.append), reported


def test_copies_are_confirmed_when_the_last_rank_has_made_them() -> None:
    agreed, reported = agreement()
    agreed.add(2, copied(seconds=0.1, bad=(5,)))
    agreed.add(0, copied(seconds=0.3))
    assert not reported
    agreed.add(1, copied(seconds=0.2, bad=(4, 5)))
    (message,) = reported
    assert isinstance(message, Copied)
    assert message.elapsed_us == 300_000
    assert list(unpack_int32s(message.bad)) == [4, 5], "what is bad anywhere is bad"
    assert message.error is None


def test_copies_that_one_rank_could_not_make_have_failed() -> None:
    agreed, reported = agreement(2)
    agreed.add(0, copied())
    agreed.add(1, copied(error="no room"))
    assert isinstance(reported[0], Copied)
    assert reported[0].error == StepError("internal", "no room")


def test_ranks_may_be_steps_apart_and_confirm_the_same_copies_twice() -> None:
    agreed, reported = agreement(2)
    for step in (1, 2, 2):
        agreed.add(0, copied(step))
    agreed.add(1, copied(2))
    agreed.add(1, copied(1))
    assert [message.step for message in reported if isinstance(message, Copied)] == [2, 1]
    agreed.add(1, copied(2))
    assert len(reported) == 3


def test_what_was_said_of_another_epoch_is_forgotten() -> None:
    agreed, reported = agreement(2)
    agreed.add(0, copied(epoch=3))
    agreed.add(0, copied(epoch=4))
    agreed.reset(4)
    agreed.add(1, copied(epoch=3))
    assert not reported
    agreed.add(1, copied(epoch=4))
    assert [message.epoch for message in reported] == [4]


def test_a_prefix_is_stored_as_far_as_every_rank_has_it() -> None:
    agreed, reported = agreement()
    for rank, count in enumerate((7, 3, 9)):
        agreed.add(rank, Found(1, 12, count))
    assert reported == [Found(1, 12, 3)]


def test_the_inventory_is_what_all_ranks_hold_in_the_same_blocks() -> None:
    def inventory(*tiers: dict[int, int]) -> Inventory:
        named = [
            NamedBlocks(tier, pack_int32s(held), b"".join(bytes([name]) * HASH_BYTES for name in held.values()))
            for tier, held in enumerate(tiers)
        ]
        return Inventory(tuple(named))

    common = common_blocks([inventory({1: 10, 2: 20, 3: 30}, {7: 70}), inventory({1: 10, 2: 21, 4: 30}, {8: 70})])
    assert common == inventory({1: 10})
    assert common_blocks([inventory({1: 10}), None]) is None
    assert common_blocks([inventory({1: 10}), inventory({1: 10})]) == inventory({1: 10})
