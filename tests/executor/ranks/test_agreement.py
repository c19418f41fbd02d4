"""An operation that every rank does for itself is confirmed once, when all have done it."""

import logging

import pytest
from msgspec.structs import replace
from pagewise_executor.ranks.agreement import Agreement, Answer, common_blocks, common_device, computes
from pagewise_executor.ranks.messages import Ready
from pagewise_shared.block_hash import HASH_BYTES
from pagewise_shared.errors import ModelError
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    AdapterLoaded,
    Copied,
    Found,
    Hello,
    Inventory,
    NamedBlocks,
    StepError,
    StoredDropped,
    pack_int32s,
    unpack_int32s,
)


def copied(step: int = 1, bad: tuple[int, ...] = (), seconds: float = 0.0, error: str = "", epoch: int = 3) -> Copied:
    failed = StepError("internal", error) if error else None
    return Copied(epoch, step, HOST, DEVICE, elapsed_us=int(seconds * 1e6), bad=pack_int32s(bad), error=failed)


def agreement(size: int = 3) -> tuple[Agreement, list[Answer]]:
    reported: list[Answer] = []
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


def test_blocks_are_deleted_when_every_rank_has_deleted_its_parts() -> None:
    agreed, reported = agreement(2)
    agreed.add(0, StoredDropped(3, 7, 12))
    assert not reported
    agreed.add(1, StoredDropped(3, 7, 10, "read-only"))
    assert reported == [StoredDropped(3, 7, 12, "read-only")]


def test_ranks_may_be_steps_apart_and_confirm_the_same_copies_twice() -> None:
    agreed, reported = agreement(2)
    for step in (1, 2, 2):
        agreed.add(0, copied(step))
    agreed.add(1, copied(2))
    agreed.add(1, copied(1))
    assert [message.step for message in reported if isinstance(message, Copied)] == [2, 1]
    agreed.add(1, copied(2))
    assert len(reported) == 3


def test_copies_of_groups_of_layers_are_confirmed_apart() -> None:
    agreed, reported = agreement(2)
    agreed.add(0, Copied(3, 1, HOST, DEVICE, bad=pack_int32s([5])))
    agreed.add(0, Copied(3, 1, HOST, DEVICE, group=1))
    agreed.add(1, Copied(3, 1, HOST, DEVICE, group=1))
    assert reported == [Copied(3, 1, HOST, DEVICE, group=1)]
    agreed.add(1, Copied(3, 1, HOST, DEVICE))
    assert reported[1:] == [Copied(3, 1, HOST, DEVICE, bad=pack_int32s([5]))]


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


def test_an_adapter_is_loaded_where_all_ranks_have_it() -> None:
    agreed, reported = agreement(2)
    agreed.add(1, AdapterLoaded(1, 7, 300, from_host=True))
    assert not reported
    agreed.add(0, AdapterLoaded(1, 7, 100, from_host=False, evicted=(b"one", b"two")))
    agreed.add(0, AdapterLoaded(1, 8, evicted=(b"one",)))
    agreed.add(1, AdapterLoaded(1, 8, evicted=(b"two",), error="no such folder"))
    assert reported == [
        AdapterLoaded(1, 7, 300, from_host=False, evicted=(b"one", b"two")),
        AdapterLoaded(1, 8, evicted=(b"one", b"two"), error="no such folder"),
    ]


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


def test_ranks_that_number_their_blocks_each_for_itself_agree_on_hashes_and_new_numbers() -> None:
    def inventory(*groups: str) -> Inventory:
        """Blocks of the device by one letter of their hashes, numbered in this order."""
        named = []
        for group, held in enumerate(groups):
            hashes = b"".join(one.encode() * HASH_BYTES for one in held)
            named.append(NamedBlocks(DEVICE, pack_int32s(range(len(held))), hashes, group))
        return Inventory(tuple(named))

    common = common_blocks([inventory("abcd", "xy"), inventory("dxbc", "y")], renumber=True)
    assert common == inventory("bcd", "y")


H100 = Hello(1, 0, "", "model", 100, 64, 8, 10, 1024, device="NVIDIA H100", dtype="bfloat16", kernels="triton")


def ready(info: Hello) -> Ready:
    return Ready("", info.device, computes(info))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(H100, kernels="torch"), "kernels: triton and torch"),
        (replace(H100, model_fingerprint="model-exact-inputs"), "weights: model and model-exact-inputs"),
        (replace(H100, bytes_per_block=512), "bytes of a block: 1024 and 512"),
        (replace(H100, dtype="float16"), "data type: bfloat16 and float16"),
    ],
)
def test_ranks_that_do_not_compute_the_same_are_refused(other: Hello, what: str) -> None:
    old = replace(other, device="NVIDIA A100")
    with pytest.raises(ModelError, match=rf"3: ranks 0 \(NVIDIA H100\) and 2 \(NVIDIA A100\) .*\({what}\)"):
        common_device(H100, [ready(H100), ready(old)])


def test_devices_of_two_models_that_compute_the_same_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    assert common_device(H100, [ready(H100)]) == "NVIDIA H100, 2 ranks"
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        name = common_device(H100, [ready(H100), ready(replace(H100, device="NVIDIA L40S"))])
    assert name == "NVIDIA H100, NVIDIA L40S, 3 ranks"
    assert "as slow as the slowest: NVIDIA H100, NVIDIA L40S" in caplog.text
