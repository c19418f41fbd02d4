"""ExecutorRegistry, engines and router over a real socket: admission of executors, dropped ones, and that requests
survive."""

import asyncio
import gc
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_scheduler.core.memory.prefix_tree import CachedBlock
from pagewise_scheduler.server.sessions import MAX_BAD_FRAMES
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    DEVICE,
    HOST,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    BlockCopies,
    CancelCopies,
    Copied,
    Goodbye,
    Heartbeat,
    Refused,
    Rejoin,
    RemoteTier,
    StepError,
    StepPlan,
    StepResult,
    TierInfo,
    Welcome,
    decode_from_scheduler,
    encode,
)
from pagewise_shared.sampling import BeamParams

from tests.scheduler.server.played_gateway import FailedPromptError, RefusedRequestError
from tests.scheduler.server.stack import RawExecutor, executor, executors_of, flood, hello, joined, running


async def test_requests_are_served_and_blocks_come_back(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        first = await stack.generate([1, 2, 3])
        assert len(first) == 8
        assert await stack.generate([1, 2, 3]) == first
        (handle,) = stack.executors
        assert handle.view.load == 0
        async with asyncio.timeout(20):
            while handle.scheduler.kv.num_available != 64:
                await asyncio.sleep(0.01)


async def test_requests_of_an_executor_that_leaves_go_on_with_the_same_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        async with executor(tmp_path, "one", step_seconds=0.01):
            await stack.ready(1)
            expected = await stack.generate([5, 6, 7], max_tokens=60)
            moving = asyncio.create_task(stack.generate([5, 6, 7], max_tokens=60))
            await asyncio.sleep(0.2)
        assert not moving.done()
        async with executor(tmp_path, "two"):
            assert await moving == expected


async def test_an_executor_that_vanishes_without_a_word_loses_no_request(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello(vocab_size=4096))
        assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        raw.close()
        await asyncio.sleep(0.1)  # the socket notices; the next plan cannot be sent
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await stack.ready(0)
        async with executor(tmp_path):
            async with asyncio.timeout(10):
                assert len(await moving) == 8


async def test_a_step_that_does_not_return_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=20.0) as stack, executor(tmp_path, "stuck", step_seconds=3.0):
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        await stack.ready(0)
        async with executor(tmp_path, "quick"):
            async with asyncio.timeout(20):
                assert len(await moving) == 8


async def test_copies_that_fail_start_over_and_fail_nobody(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        assert isinstance(await raw.receive(), StepPlan)
        await raw.send(Copied(welcome.epoch, 1, DEVICE, HOST, error=StepError("internal", "the link is broken")))
        while not isinstance(answer := await raw.receive(), Welcome):
            assert isinstance(answer, StepPlan)
        assert answer.epoch > welcome.epoch
        await raw.send(Goodbye(answer.epoch, ""))
        async with executor(tmp_path):
            assert len(await moving) == 8
        raw.close()


async def test_a_copy_that_is_never_confirmed_is_not_waited_for(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw, welcome = await joined(tmp_path, tiers=(TierInfo(HOST, 8),))
        await stack.ready(1)
        (handle,) = stack.executors
        load = BlockCopies(HOST, DEVICE, b"12345678")
        handle.scheduler.recoveries.transfers.now = monotonic()
        handle.scheduler.recoveries.transfers.requested(1, [load], {})
        async with asyncio.timeout(10):
            while stack.executors:
                await raw.send(Heartbeat(welcome.epoch))
                await asyncio.sleep(0.05)
        raw.close()


@pytest.mark.parametrize("confirms", [True, False])
async def test_a_fetch_that_takes_too_long_is_cancelled(tmp_path: Path, confirms: bool) -> None:
    async with running(tmp_path, executor_timeout=20.0, gateway_timeout=20.0) as stack:
        raw, welcome = await joined(tmp_path)
        await stack.ready(1)
        (handle,) = stack.executors
        fetch = BlockCopies(DEVICE, DEVICE, b"12345678", RemoteTier("ipc://peer", 1))
        began = monotonic()
        handle.scheduler.recoveries.transfers.now = began - 4.5
        handle.scheduler.recoveries.transfers.requested(7, [fetch], {})
        async with asyncio.timeout(10):
            while not isinstance(message := await raw.receive(), CancelCopies):
                await raw.send(Heartbeat(welcome.epoch))
            assert (message.step, message.peer, monotonic() - began > 0.5) == (7, "ipc://peer", True)
            if confirms:
                await raw.send(Copied(welcome.epoch, 7, DEVICE, DEVICE, bad=b"1234", peer="ipc://peer"))
                while handle.scheduler.recoveries.transfers.oldest_due is not None:
                    await asyncio.sleep(0.01)
            began = monotonic()
            while stack.executors and monotonic() - began < 2.5:
                await raw.send(Heartbeat(welcome.epoch))
                await asyncio.sleep(0.05)
        assert len(stack.executors) == confirms
        raw.close()


async def test_executors_that_come_and_go_do_not_make_a_request_wait_longer(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=1.0) as stack:
        async with executor(tmp_path):
            await stack.ready(1)
        await stack.ready(0)
        waiting = asyncio.create_task(stack.generate(list(range(200))))
        began = monotonic()
        while not waiting.done():
            small = SimulatedRunner(ExecutorConfig(num_blocks=8, block_size=4))
            async with executor(tmp_path, "small", runner=small):
                await stack.ready(1)
            await stack.ready(0)
        with pytest.raises(FailedPromptError):
            await waiting
        assert monotonic() - began < 20


async def test_a_sender_that_never_ends_leaves_time_for_the_others(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, flood(executors_of(tmp_path)):
        most, before, until = 0.0, 0.0, monotonic() + 2
        while monotonic() < until:
            await asyncio.sleep(0)
            dropped = stack.dropped("undecodable")
            most, before = max(most, dropped - before), dropped
        assert before > 1000
        assert most <= 64, "frames that are looked at before anybody else has a turn"


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_a_peer_that_goes_away_while_nobody_reads_what_it_has_sent_aborts_nothing(
    tmp_path: Path, transport: str
) -> None:
    endpoint = "tcp://127.0.0.1:*" if transport == "tcp" else f"ipc://{tmp_path}/flooded.sock"
    script = Path(__file__).parent / "flooded_socket.py"
    done = subprocess.run([sys.executable, str(script), endpoint], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


async def test_simulated_executors_search_beams_too(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        assert len(await stack.generate([1, 2, 3], beam=BeamParams(2))) == 8


async def test_every_hypothesis_of_a_beam_search_counts(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        with pytest.raises(RefusedRequestError, match="at most 8 sequences may wait"):
            await stack.generate([1, 2, 3], beam=BeamParams(9))


async def test_an_executor_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        moving = asyncio.create_task(stack.generate([1, 2, 3]))
        assert isinstance(await raw.receive(), StepPlan)
        await stack.ready(0)
        async with executor(tmp_path):
            assert len(await moving) == 8
        await raw.send(StepResult(1, 1))
        while not isinstance(answer := await raw.receive(), Rejoin):
            assert isinstance(answer, StepPlan), "plans that were sent before it was given up"
        assert stack.dropped("unknown_sender") == 1
        raw.close()


async def test_what_is_known_of_an_executor_goes_with_it(tmp_path: Path) -> None:
    """Without waiting for a garbage collection, which is rare in a scheduler."""

    def num_nodes() -> int:
        return sum(type(one) is CachedBlock for one in gc.get_objects())

    async with running(tmp_path) as stack:
        async with executor(tmp_path):
            await stack.ready(1)
            for first in range(20):
                await stack.generate([first, *range(100)])
            known = weakref.ref(stack.executors[0])
            of_it = stack.executors[0].scheduler.kv.pool.tree.num_blocks
            assert of_it > 20
            gc.collect()
            gc.disable()
            before = num_nodes()
        try:
            await stack.ready(0)
            async with asyncio.timeout(20):
                while known() is not None:
                    await asyncio.sleep(0.01)
            assert num_nodes() <= before - of_it
        finally:
            gc.enable()


async def test_one_that_leaves_after_it_was_given_up_is_no_reason_for_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path) as stack:
        for number, message in enumerate((Goodbye(1, "stopping"), StepResult(1, 1))):
            raw = RawExecutor(tmp_path)
            await raw.send(message)
            assert isinstance(await raw.receive(), Rejoin)
            raw.close()
            assert stack.dropped("unknown_sender") == 1 + number
            assert ("has not joined" in caplog.text) is (number == 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"protocol_major": PROTOCOL_MAJOR + 1}, "speaks protocol"),
        ({"num_blocks": 0}, "which is not from"),
        ({"role": "cook"}, "there is no role 'cook', only prefill, decode, both"),
        ({"model_fingerprint": "other"}, "is not the fleet's model"),
    ],
)
async def test_who_does_not_fit_is_refused_with_a_reason(
    tmp_path: Path, fields: dict[str, object], reason: str
) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        raw = RawExecutor(tmp_path)
        await raw.send(hello(**fields))
        answer = await raw.receive()
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        raw.close()


async def test_another_minor_version_is_logged_with_who_joined(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with running(tmp_path):
        newer, _ = await joined(tmp_path, executor_id="newer", protocol_minor=PROTOCOL_MINOR + 1)
        same, _ = await joined(tmp_path, executor_id="same", protocol_minor=PROTOCOL_MINOR)
        newer.close()
        same.close()
    told = {line.split()[1]: line for line in caplog.messages if " joined: " in line}
    ours = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    assert f"(it speaks protocol {PROTOCOL_MAJOR}.{PROTOCOL_MINOR + 1}, this scheduler {ours})" in told["newer"]
    assert "protocol" not in told["same"]


async def test_garbage_and_stale_epochs_are_dropped_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        welcome = await raw.receive()
        assert isinstance(welcome, Welcome)
        await stack.ready(1)
        for junk in (b"", b"\xc1garbage", encode(Welcome(1, 1, 1))):
            await raw.send(junk)
        await raw.send(StepResult(welcome.epoch - 1, 1))
        await raw.send(Heartbeat(welcome.epoch))
        await raw.receive()
        async with asyncio.timeout(20):
            while stack.dropped("stale_epoch") < 1:
                await asyncio.sleep(0.01)
        assert stack.dropped("undecodable") == 3
        await stack.ready(1)
        for _ in range(MAX_BAD_FRAMES):
            await raw.send(b"\xc1")
        await stack.ready(0)
        raw.close()


async def test_a_failed_step_starts_over_under_a_new_epoch_and_fails_only_what_cannot_run_alone(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        raw = RawExecutor(tmp_path)
        await raw.send(hello())
        await raw.receive()
        await stack.ready(1)
        doomed = asyncio.create_task(stack.generate([1, 2, 3]))
        while not doomed.done():
            with suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    message = decode_from_scheduler(await raw.socket.recv())
                    if isinstance(message, StepPlan):
                        await raw.send(StepResult(message.epoch, message.step, error=StepError("internal", "broken")))
        with pytest.raises(FailedPromptError, match="broken"):
            await doomed
        raw.close()


async def test_admission(tmp_path: Path) -> None:
    async with running(tmp_path, placement_timeout=0.3) as stack:
        with pytest.raises(FailedPromptError, match="no executor could take the request") as failed:
            await stack.generate([1] * 100)  # the capacity of executors is not known yet
        assert failed.value.kind == "unavailable"
        async with executor(tmp_path):
            await stack.ready(1)
            with pytest.raises(RefusedRequestError) as error:
                await stack.generate([1, 2], max_tokens=10_000)
            assert error.value.kind == "never_fits"
        await stack.ready(0)
        with pytest.raises(FailedPromptError, match="no executor could take the request"):
            await stack.generate([1])
        waiting = [await stack.gateway.submit([1]) for _ in range(8)]
        with pytest.raises(RefusedRequestError) as error:
            await stack.generate([1])
        assert error.value.kind == "unavailable"
        assert stack.metric("requests_refused_total", reason="no_executor") == 1
        for request in waiting:
            with pytest.raises(FailedPromptError):
                await request.result()


async def test_an_executor_on_another_connection_is_the_same_and_serves_blocks_again(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        offer = hello(block_endpoint="ipc:///blocks", block_format="x")
        first, second = RawExecutor(tmp_path), RawExecutor(tmp_path)
        for raw in (first, second):
            await raw.send(offer)
            assert isinstance(await raw.receive(), Welcome)
        await stack.ready(1)
        async with asyncio.timeout(20):
            while len(stack.executors) != 1:
                await asyncio.sleep(0.01)
        (handle,) = stack.executors
        assert stack.registry.directory.peers["ipc:///blocks"].scheduler is handle.scheduler
        assert handle.scheduler.recoveries.planner.endpoint == "ipc:///blocks"
        first.close()
        second.close()


async def test_a_request_goes_to_an_executor_that_takes_its_length(tmp_path: Path) -> None:
    short = SimulatedRunner(ExecutorConfig(num_blocks=64, block_size=4, max_model_len=16))
    async with running(tmp_path) as stack, executor(tmp_path, "short", runner=short), executor(tmp_path, "long"):
        await stack.ready(2)
        for _ in range(6):
            assert len(await stack.generate(list(range(40)))) == 8
        assert {handle.scheduler.max_model_len for handle in stack.executors} == {16, 8192}


async def test_a_core_that_fails_takes_nobody_along(tmp_path: Path) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("broken")

    async with running(tmp_path) as stack, executor(tmp_path, "one", 0.05):
        await stack.ready(1)
        expected = await stack.generate([1, 2, 3])
        (handle,) = stack.executors
        serving = asyncio.create_task(stack.generate([1, 2, 3]))
        await asyncio.sleep(0.1)
        handle.scheduler.schedule = handle.scheduler.release_all = broken  # type: ignore[method-assign, assignment]
        assert await serving == expected, "it goes on when the executor has joined again"
