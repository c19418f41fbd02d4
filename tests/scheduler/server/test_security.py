"""Who is kept out of the fleet, over real sockets: unknown keys, plain text, replays, forged names, floods."""

import asyncio
import logging
import time
from pathlib import Path

import msgspec
import pytest
from pagewise_gateway.http.explanation import sentences
from pagewise_scheduler.server.executor_checks import MAX_EXECUTORS, MAX_FLEET_BLOCKS, incompatibility
from pagewise_scheduler.server.executor_registry import ExecutorRegistry
from pagewise_scheduler.server.sessions import JoinGuard
from pagewise_shared.curve import EXECUTOR, GATEWAY, SCHEDULER, Keys, public_file
from pagewise_shared.errors import ConfigError
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    Copied,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    MeasuredCosts,
    Refused,
    Rejoin,
    StepPlan,
    StepResult,
    TierInfo,
    Welcome,
    encode,
)
from pagewise_shared.protocol.limits import MAX_DEVICE_BLOCKS, MAX_ROWS
from pagewise_shared.reports import RequestReport

from tests.scheduler.server.stack import RawExecutor, Stack, executor, hello, running, until
from tests.shared.key_pairs import make_key_pairs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of keys with three executors' (and a socket's path)."""
    return make_key_pairs(make_key_pairs(tmp_path, SCHEDULER, EXECUTOR, "one", "two"), GATEWAY, kind="gateway")


def refused(stack: Stack, reason: str) -> float:
    return float(stack.metrics.connections_refused(reason)._value.get())


async def wait_until_refused(stack: Stack, reason: str, count: int) -> None:
    async with asyncio.timeout(20):
        while refused(stack, reason) < count:
            await asyncio.sleep(0.02)


async def joined(raw: RawExecutor, **fields: object) -> int:
    """Say Hello; the epoch of the Welcome."""
    await raw.send(hello(**{"vocab_size": 4096, "num_blocks": 64} | fields))
    welcome = await raw.receive()
    assert isinstance(welcome, Welcome)
    return welcome.epoch


# ---- keys ----------------------------------------------------------------------------------------------


async def test_executors_with_keys_serve(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        async with executor(folder, "a", keys=Keys(folder, EXECUTOR)), executor(folder, "b", keys=Keys(folder, "one")):
            await stack.ready(2)
            assert len(await stack.generate([1, 2, 3])) == 8
        assert refused(stack, "unknown_key") == refused(stack, "handshake") == 0


async def test_an_unknown_key_is_refused_until_it_is_added(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewise_shared.scheduler_connection._RETRY_SECONDS", 0.05)
    stranger = Keys(folder, "one")
    card = public_file(folder, "one").read_bytes()
    public_file(folder, "one").unlink()
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack, executor(folder, keys=stranger):
        await wait_until_refused(stack, "unknown_key", 8)
        assert not stack.router.capacity.max_model_len
        told = [record for record in caplog.records if "unknown key" in record.getMessage()]
        assert len(told) == 5, "not a line for each try"
        assert stranger.public.decode() in told[0].getMessage()
        assert sum("does not accept the key 'one'" in record.getMessage() for record in caplog.records) == 1
        public_file(folder, "one").write_bytes(card)
        await stack.ready(1)


async def test_a_key_that_is_revoked_is_cut_off_at_once_and_stays_out(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        raw = RawExecutor(folder, Keys(folder, "one"))
        epoch = await joined(raw)
        await stack.ready(1)
        await stack.gateway.submit([1, 2, 3], request_id="moves")
        public_file(folder, "one").unlink()
        async with asyncio.timeout(10):
            while stack.executors:
                await raw.send(Heartbeat(epoch))
                await asyncio.sleep(0.05)
        told = msgspec.json.decode((await stack.gateway.ask("request", "moves")).body, type=RequestReport)
        assert "because the key of the executor raw was revoked: " in " ".join(sentences(told))
        # The connection stays open, but its messages are ignored.
        await raw.send(hello())
        while not isinstance(answer := await raw.receive(), Refused):
            assert isinstance(answer, HeartbeatAck | Rejoin | StepPlan)
        assert "revoked" in answer.reason
        raw.close()
        again = RawExecutor(folder, Keys(folder, "one"))
        await again.send(hello())
        await wait_until_refused(stack, "unknown_key", 1)
        assert not await again.socket.poll(200)
        again.close()


async def test_plain_text_is_not_heard(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        raw = RawExecutor(folder)
        await raw.send(hello())
        await wait_until_refused(stack, "handshake", 1)
        assert not await raw.socket.poll(200)
        raw.close()
        async with executor(folder) as task:
            with pytest.raises(ConfigError, match="asks for a key and there is none"):
                await asyncio.wait_for(task, 10)
        assert not stack.router.capacity.max_model_len


async def test_who_wants_another_scheduler_gets_no_answer(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        keys = Keys(folder, "one")
        keys.scheduler = Keys(folder, "two").public
        raw = RawExecutor(folder, keys)
        await raw.send(hello())
        await wait_until_refused(stack, "handshake", 1)
        assert not await raw.socket.poll(200)
        raw.close()


async def test_an_executor_with_keys_tells_nothing_to_a_scheduler_without(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(folder) as stack:
        # Which end of an executor's connection notices is a matter of time, so a peer that sends chosen bytes and waits
        # shows the scheduler's part.
        _, writer = await asyncio.open_unix_connection(folder / "wire")
        writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32))
        await wait_until_refused(stack, "handshake", 1)
        writer.close()
        async with executor(folder, keys=Keys(folder, "one")), asyncio.timeout(20):
            while "no handshake with the scheduler" not in caplog.text:
                await asyncio.sleep(0.02)
        assert not stack.executors
        assert not stack.router.capacity.max_model_len


async def test_connections_that_executors_refused_are_counted_and_lies_bounded(tmp_path: Path) -> None:
    async with running(tmp_path, executor_timeout=20.0) as stack:
        raw = RawExecutor(tmp_path)
        epoch = await joined(raw)
        for told, counted in ((0, 0), (3, 3), (3, 3), (-5, 3), (1, 3), (5, 5), (2**62, 1005), (2**62, 1005), (0, 1005)):
            await raw.send(Heartbeat(epoch, told))
            assert await raw.receive() == HeartbeatAck(epoch)
            assert refused(stack, "unknown_key_blocks") == counted
        await raw.send(Heartbeat(epoch - 1, 2**63))
        assert await raw.receive() == HeartbeatAck(epoch)
        assert refused(stack, "unknown_key_blocks") == 1005, "of an earlier life"
        raw.close()


# ---- replays, names, identities ------------------------------------------------------------------------


@pytest.mark.parametrize("keyed", [False, True])
async def test_a_replayed_hello_is_another_executor_at_most(folder: Path, keyed: bool) -> None:
    one, two = (Keys(folder, "one"), Keys(folder, "two")) if keyed else (None, None)
    async with running(folder, keys=Keys(folder, SCHEDULER) if keyed else None) as stack:
        victim = RawExecutor(folder, one)
        said = hello(executor_id="victim", vocab_size=4096)
        await victim.send(said)
        first = await victim.receive()
        assert isinstance(first, Welcome)
        thief = RawExecutor(folder, two)
        await thief.send(encode(said))
        answer = await thief.receive()
        if keyed:
            assert isinstance(answer, Refused), "the name has an owner"
            assert "another key" in answer.reason
        else:
            assert isinstance(answer, Welcome)
            assert answer.epoch > first.epoch, "a life of its own"
        # The victim's life continues under its own epoch, whatever the other sends in its place.
        await thief.send(StepResult(first.epoch, 1))
        await thief.send(Goodbye(first.epoch, ""))
        await victim.send(Heartbeat(first.epoch))
        assert await victim.receive() == HeartbeatAck(first.epoch)
        await stack.ready(1)
        assert [handle.scheduler.epoch for handle in stack.executors] == [first.epoch]
        thief.close()
        victim.close()


async def test_messages_of_an_earlier_life_count_for_nothing(folder: Path) -> None:
    async with running(folder) as stack:
        raw = RawExecutor(folder)
        epoch = await joined(raw)
        await stack.ready(1)
        serving = asyncio.create_task(stack.generate([1, 2, 3]))
        plan = await raw.receive()
        assert isinstance(plan, StepPlan)
        for old in (epoch - 1, 0, 1 << 60):
            await raw.send(StepResult(old, plan.step, b"\0\0\0\0"))
            await raw.send(Copied(old, plan.step, HOST, DEVICE))
        async with asyncio.timeout(20):
            while stack.dropped("stale_epoch") < 6:
                await asyncio.sleep(0.01)
        assert not serving.done()
        assert stack.metrics.generation_tokens._value.get() == 0
        # Heartbeats of an earlier life do not keep this one alive.
        async with asyncio.timeout(10):
            while stack.executors:
                await raw.send(Heartbeat(epoch - 1))
                await asyncio.sleep(0.05)
        async with executor(folder):
            assert len(await serving) == 8
        raw.close()


async def test_the_name_of_another_executor_cannot_be_taken(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        victim, thief = RawExecutor(folder, Keys(folder, "one")), RawExecutor(folder, Keys(folder, "two"))
        epoch = await joined(victim, executor_id="gpu")
        await thief.send(hello(executor_id="gpu"))
        answer = await thief.receive()
        assert isinstance(answer, Refused)
        assert "executor gpu with another key is in already" in answer.reason
        # The name of a key is its owner's, whether it is there or not.
        await thief.send(hello(executor_id=EXECUTOR))
        answer = await thief.receive()
        assert isinstance(answer, Refused)
        assert "belongs to the key executor" in answer.reason
        assert await joined(thief, executor_id="two") > epoch
        assert stack.router.capacity.max_model_len
        thief.close()
        victim.close()


@pytest.mark.parametrize("keyed", [False, True])
async def test_the_identity_of_a_live_connection_cannot_be_taken(folder: Path, keyed: bool) -> None:
    one, two = (Keys(folder, "one"), Keys(folder, "two")) if keyed else (None, None)
    async with running(folder, keys=Keys(folder, SCHEDULER) if keyed else None) as stack:
        victim = RawExecutor(folder, one, identity=b"the same")
        epoch = await joined(victim)
        await stack.ready(1)
        thief = RawExecutor(folder, two, identity=b"the same")
        for message in (Heartbeat(epoch), StepResult(epoch, 1, b"\0\0\0\0"), Goodbye(epoch, "forged"), b"\xc1"):
            await thief.send(message)
        serving = asyncio.create_task(stack.generate([1, 2, 3], max_tokens=1))
        plan = await victim.receive()
        assert isinstance(plan, StepPlan), "plans go to the victim"
        await victim.send(StepResult(epoch, plan.step, b"\x07\0\0\0"))
        assert await serving == [7]
        await stack.ready(1)
        thief.close()
        victim.close()


async def test_the_identity_of_a_connection_that_is_gone_is_bound_to_its_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ExecutorRegistry, "probe", lambda fleet: None
    )  # or the member would be given up before the thief comes
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        victim = RawExecutor(folder, Keys(folder, "one"), identity=b"the same")
        epoch = await joined(victim)
        await stack.ready(1)
        victim.close()
        await asyncio.sleep(0.1)
        thief = RawExecutor(folder, Keys(folder, "two"), identity=b"the same")
        async with asyncio.timeout(10):
            while stack.dropped("wrong_key") < 30:
                await thief.send(Heartbeat(epoch))
                await thief.send(b"\xc1")
                await thief.send(hello())
                await asyncio.sleep(0.02)
        await stack.ready(0)  # silent, as it is gone: forged heartbeats did not keep it alive
        thief.close()


# ---- bounds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_blocks": 10**12}, "num_blocks is 1000000000000"),
        ({"tiers": (TierInfo(HOST, 10**12),)}, "its tier host has 1000000000000 blocks"),
        ({"tiers": (TierInfo(99, 1),)}, "there is no tier 99 below the device, only host"),
        ({"tiers": (TierInfo(HOST, 1),) * 2}, "its tiers are not one below the other: host comes after host"),
        ({"tiers": (TierInfo(HOST, MAX_FLEET_BLOCKS),)}, "the fleet would have"),
        ({"num_blocks": MAX_DEVICE_BLOCKS + 1}, f"num_blocks is {MAX_DEVICE_BLOCKS + 1}, which is not from"),
        ({"max_num_seqs": MAX_ROWS + 1}, f"max_num_seqs is {MAX_ROWS + 1}, which is not from"),
        ({"block_size": 1 << 40}, "block_size"),
        ({"max_model_len": 1 << 62}, "max_model_len"),
        ({"vocab_size": 1 << 62}, "vocab_size"),
        ({"max_num_seqs": -1}, "which is not from"),
        ({"bytes_per_block": -1}, "which is not from"),
        ({"executor_id": "x" * 100_000}, "executor_id is longer"),
        ({"executor_id": "a\nb"}, "executor_id"),
        ({"model_fingerprint": "x" * 100_000}, "model_fingerprint is longer"),
        ({"device": "x" * 100_000}, "device is longer"),
        ({"costs": MeasuredCosts(float("nan"), 0.0, 0.0)}, "measured costs"),
        ({"costs": MeasuredCosts(-1.0, 0.0, 0.0)}, "measured costs"),
        ({"costs": MeasuredCosts(1.0, float("inf"), 0.0)}, "measured costs"),
        ({"tiers": (TierInfo(HOST, 1, -1.0),)}, "measured costs of copies to and from its tier host"),
    ],
)
async def test_a_hello_with_absurd_values_is_refused(tmp_path: Path, fields: dict[str, object], reason: str) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello(**fields))
        answer = await raw.receive()
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        assert len(answer.reason) < 500
        assert not stack.router.capacity.max_model_len
        raw.close()


def test_a_fleet_has_a_greatest_size() -> None:
    small = hello(num_blocks=1)
    assert incompatibility(small, [small] * (MAX_EXECUTORS - 1), "simulated") is None
    assert "executors already" in str(incompatibility(small, [small] * MAX_EXECUTORS, "simulated"))
    half = hello(num_blocks=MAX_FLEET_BLOCKS // 2)
    assert incompatibility(half, [half], "simulated") is None
    assert "the fleet would have" in str(incompatibility(half, [half, small], "simulated"))


async def test_hellos_that_come_too_often_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        for _ in range(50):  # as from one that has waited for a scheduler for minutes
            await raw.send(hello())
        await raw.receive()
        await stack.ready(1)
        async with asyncio.timeout(20):
            while stack.dropped("too_many_hellos") < 49:
                await asyncio.sleep(0.01)
        assert len(stack.executors) == 1
        raw.close()


def test_each_key_has_an_allowance_of_hellos() -> None:
    guard = JoinGuard("executor", None)
    taken = sum(guard.in_time("a", None, 0.0) for _ in range(10_000))
    assert taken == 256
    assert guard.in_time("b", None, 0.0), "one does not use up what is another's"
    assert sum(guard.in_time("a", None, 1.0) for _ in range(100)) == 32
    assert not guard.in_time("c", 1.0, 1.5), "it has joined just now"
    assert guard.in_time("c", 1.0, 2.5)


async def test_one_that_does_not_read_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path, identity=b"deaf")
        await raw.send(Goodbye(0, ""))
        await until(lambda: stack.dropped("unknown_sender") == 1)
        frame = bytes(1024)
        sent = [stack.registry.socket.send_frame(b"deaf", frame) for _ in range(20_000)]
        assert sent[0]
        assert not sent[-1]
        raw.close()


async def test_a_message_is_one_frame(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.socket.send_multipart([b"", encode(hello())])
        async with asyncio.timeout(20):
            while stack.dropped("undecodable") < 1:
                await asyncio.sleep(0.01)
        assert not stack.router.capacity.max_model_len
        raw.close()


async def test_a_message_of_very_many_parts_holds_nobody_up(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, honest = RawExecutor(tmp_path), RawExecutor(tmp_path)
        await raw.socket.send_multipart([encode(hello())] * 200_000)
        await honest.send(hello(executor_id="honest"))
        longest, until_counted = 0.0, time.monotonic() + 20
        while stack.dropped("undecodable") < 1 or stack.registry.socket._has_more_parts:
            began = time.monotonic()
            assert began < until_counted
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - began)
        assert longest < 0.5, "reading all parts at once takes longer"
        assert isinstance(await honest.receive(), Welcome)
        assert stack.dropped("undecodable") == 1
        raw.close()
        honest.close()


async def test_identities_without_number_fill_neither_tables_nor_logs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with running(tmp_path) as stack:
        for number in range(40):
            raw = RawExecutor(tmp_path, identity=b"%d" % number)
            await raw.send(b"\xc1")
            raw.close()
        raw = RawExecutor(tmp_path)
        await raw.send(Goodbye(1, "x\n" * 1000))
        await raw.receive()
        raw.close()
        assert sum("dropped a frame" in record.getMessage() for record in caplog.records) <= 5
        assert len(stack.registry._bad_frames) <= 41
