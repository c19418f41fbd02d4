"""Gateways over real sockets: requests from Submit to the last token, gateways that die, and schedulers that do."""

import asyncio
from pathlib import Path
from time import monotonic

import msgspec
import pytest
from pagewise_executor.simulated import SimulatedRunner
from pagewise_shared.config import ExecutorConfig
from pagewise_shared.protocol import (
    FinishStream,
    KeyLimits,
    Prompt,
    Rejoin,
    RequestParams,
    StreamFinished,
    StreamProgress,
    Submit,
    unpack_int32s,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.scheduler.server.played_gateway import (
    GREEDY,
    PlayedGateway,
    PlayedRequest,
    RefusedRequestError,
    prompts_of,
)
from tests.scheduler.server.stack import executor, gateway, gateways_of, int32s, running, until

SEEDED = SamplingParams(temperature=1.0, seed=7)
OF_K = RequestParams(GREEDY, key="k")


def a_runner(step_seconds: float = 0.0, **options: int) -> SimulatedRunner:
    return SimulatedRunner(ExecutorConfig(**({"num_blocks": 256, "block_size": 4} | options)), step_seconds)


# ---- requests ------------------------------------------------------------------------------------------


async def test_a_gateway_is_told_what_executors_can_hold(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        fleet = stack.gateway.fleet
        assert (fleet.ready_executors, fleet.max_model_len, fleet.vocab_size) == (0, 0, 0)
        async with executor(tmp_path):
            await until(lambda: stack.gateway.fleet.ready_executors == 1)
            fleet = stack.gateway.fleet
            assert (fleet.max_model_len, fleet.vocab_size) == (256, 4096)
            async with gateway(tmp_path, "second") as second:
                assert second.fleet.max_model_len == 256
        await until(lambda: stack.gateway.fleet.ready_executors == 0)
        assert stack.gateway.fleet.max_model_len == 256, "what is known stays known"


async def test_the_outputs_of_several_prompts_come_under_their_streams(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2], [3, 4, 5], n=2, sampling=SEEDED, max_tokens=6)
        outputs = await request.result()
        alone = await (await stack.gateway.submit([3, 4, 5], n=2, sampling=SEEDED, max_tokens=6)).result()
        assert outputs[2:] == alone
        assert len({tuple(tokens) for tokens in outputs}) == 4
        assert [started.stream for started in request.started] == [request.stream, request.stream + 2]
        assert all(finished.reason == "length" for finished in request.finished.values())
        assert all(started.queue_us >= 0 and started.prefill_us >= 0 for started in request.started)
        await stack.all_free()


async def test_a_stop_token_is_told_with_the_token(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        tokens = await stack.generate([1, 2, 3])
        sampling = SamplingParams(temperature=0, stop_token_ids=(tokens[3],))
        request = await stack.gateway.submit([1, 2, 3], sampling=sampling)
        assert await request.result() == [tokens[:4]]
        assert request.finished[0] == StreamFinished(request.stream, "stop", tokens[3])


async def test_log_probabilities_come_with_their_tokens(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        sampling = SamplingParams(temperature=0, logprobs=2)
        request, other = await stack.gateway.submit([1, 2, 3], sampling=sampling), await stack.gateway.submit([4])
        (tokens,) = await request.result()
        await other.result()
        assert [entry.token_id for entry in request.logprobs] == tokens
        assert all(len(entry.top_ids) == 2 * 4 for entry in request.logprobs)
        assert not other.logprobs


async def test_a_prompt_alone_is_computed_and_told(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], max_tokens=0)
        assert await request.result() == [[]]
        assert request.finished[0].reason == "length"
        assert len(request.started) == 1


async def test_a_beam_search_comes_whole_in_the_frame_that_finishes_it(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        limits = KeyLimits(tokens_per_minute=1000)
        request = await stack.gateway.submit([1, 2, 3], beam=BeamParams(3), n=2, key="k", limits=limits)
        outputs = await request.result()
        assert [len(tokens) for tokens in outputs] == [8, 8]
        (frame,) = (frame for frame in stack.gateway.frames if frame.finished)
        assert len(unpack_int32s(frame.tokens)) == 16
        assert len(frame.finished) == 2
        # Refused attempts are charged for, too.
        assert 20 < stack.metric("key_tokens_total", key="k", kind="generation") <= 24
        await stack.all_free()


async def test_an_output_that_a_stop_string_ends_gives_its_blocks_back_and_the_others_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], n=2, max_tokens=100)
        await request.until_tokens(8)
        handle = stack.executors[0]
        assert handle.scheduler.num_running == 2
        await stack.gateway.finish(request, 0)
        await until(lambda: handle.scheduler.num_running == 1)
        cut = len(request.tokens[0])
        await stack.gateway.send(FinishStream(stack.gateway.epoch, request.stream))
        await stack.gateway.send(FinishStream(stack.gateway.epoch, 12345))
        await request.result()
        assert len(request.tokens[1]) == 100
        assert len(request.tokens[0]) == cut < 100
        assert not any(
            finished.stream == request.stream for frame in stack.gateway.frames for finished in frame.finished
        )
        await stack.all_free()
        assert handle.view.load == 0


async def test_an_abort_frees_the_blocks_of_all_prompts(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3], [4, 5, 6], n=3, max_tokens=40)
        await request.until_tokens(4)
        await stack.gateway.abort(request)
        await stack.all_free()
        assert stack.executors[0].scheduler.requests == []
        assert stack.router.waiting.sequences == 0
        assert not stack.gateways.names
        frames = len(stack.gateway.frames)
        await asyncio.sleep(0.1)
        assert len(stack.gateway.frames) == frames, "nobody reads it: nothing is told"


async def test_a_request_that_waits_for_an_executor_can_be_aborted_and_finished(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        aborted, other = await stack.gateway.submit([1, 2, 3]), await stack.gateway.submit([4, 5, 6])
        await until(lambda: stack.router.waiting.sequences == 2)
        await stack.gateway.abort(aborted)
        await until(lambda: stack.router.waiting.sequences == 1)
        async with executor(tmp_path):
            assert len((await other.result())[0]) == 8


async def test_two_requests_of_one_name_are_two(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.005), gateway(tmp_path, "b") as second:
        await stack.ready(1)
        one = await stack.gateway.submit([1, 2, 3], [4], request_id="same")
        two = await second.submit([1, 2, 3], [4], request_id="same")
        assert await one.result() == await two.result()


# ---- frames --------------------------------------------------------------------------------------------


async def test_a_round_has_one_frame_for_each_gateway(tmp_path: Path) -> None:
    async with (
        running(tmp_path) as stack,
        executor(tmp_path, "e", step_seconds=0.02),
        gateway(tmp_path, "second") as second,
    ):
        await stack.ready(1)
        requests = [
            await played.submit([number, 1], max_tokens=30) for number in range(2) for played in (stack.gateway, second)
        ]
        rounds = 0
        flush = stack.gateways.flush

        def counting() -> None:
            nonlocal rounds
            rounds += 1
            flush()

        stack.gateways.flush = counting  # type: ignore[method-assign]
        for request in requests:
            await request.result()
        for played in (stack.gateway, second):
            assert sum(len(unpack_int32s(frame.tokens)) for frame in played.frames) == 60
            assert len(played.frames) <= rounds
            # Both sequences of a gateway decode in the same steps: a step is one frame at most, not one for each.
            assert len(played.frames) <= 45


async def test_what_comes_back_together_goes_out_together(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "e"):
        await stack.ready(1)
        sent: list[bytes] = []
        send = stack.gateways.socket.send_frame

        def counting(identity: bytes, frame: bytes) -> bool:
            sent.append(identity)
            return send(identity, frame)

        stack.gateways.socket.send_frame = counting  # type: ignore[method-assign]
        requests = [await stack.gateway.submit([number], max_tokens=1) for number in range(4)]
        for request in requests:
            await request.result()
        assert len(sent) <= 4 + 2, "heartbeats are answered, too"


# ---- lost gateways -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["breaks", "goodbye"])
async def test_a_gateway_that_dies_takes_its_requests_along_and_nobody_elses(tmp_path: Path, how: str) -> None:
    options = {"gateway_timeout": 30.0, "max_num_seqs": 8}
    async with running(tmp_path, **options) as stack, executor(tmp_path, runner=a_runner(0.01)):
        await stack.ready(1)
        handle = stack.executors[0]
        dying = PlayedGateway(gateways_of(tmp_path), "dying")
        await dying.join()
        await until(lambda: len(stack.gateways) == 2)
        mine = await stack.gateway.submit([1, 2, 3], max_tokens=150)
        for number in range(3):
            await dying.submit([9, number], max_tokens=500)
        await dying.submit()
        await until(lambda: handle.scheduler.num_running == 4)
        began = monotonic()
        await dying.close(goodbye=how == "goodbye")
        await until(lambda: handle.scheduler.num_running == 1)
        assert monotonic() - began < 15.0
        assert len(stack.gateways) == 1
        assert len((await mine.result())[0]) == 150
        await stack.all_free()
        assert stack.metric("gateways_ready") == 1
        assert not stack.gateways.names


async def test_a_gateway_that_falls_silent_is_given_up_and_may_come_back(tmp_path: Path) -> None:
    async with running(tmp_path, gateway_timeout=0.5) as stack, executor(tmp_path, runner=a_runner(0.01)):
        await stack.ready(1)
        silent = PlayedGateway(gateways_of(tmp_path), "silent")
        await silent.join()
        await silent.submit([1, 2, 3], max_tokens=800)
        handle = stack.executors[0]
        await until(lambda: handle.scheduler.num_running == 1)
        await silent.stop_reading()
        await until(lambda: handle.scheduler.num_running == 0)
        assert len(stack.gateways) == 1
        await stack.all_free()
        epoch = silent.epoch
        await silent.submit([7])  # it does not know yet
        while not isinstance(await silent.receive(), Rejoin):
            pass
        await silent.join()
        assert silent.epoch > epoch
        assert len((await (await silent.submit([1, 2, 3])).result())[0]) == 8
        await silent.close()


async def test_a_gateway_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    options = {"gateway_timeout": 30.0, "max_waiting": 100_000, "max_num_seqs": 64}
    async with running(tmp_path, **options) as stack, executor(tmp_path, runner=a_runner(num_blocks=4096)):
        await stack.ready(1)
        deaf = PlayedGateway(gateways_of(tmp_path), "deaf")
        await deaf.join()
        await deaf.stop_reading()
        await deaf.submit([1, 2, 3], n=4, max_tokens=8000)
        mine = await stack.gateway.submit([4, 5, 6], max_tokens=100)
        (session,) = (session for session in stack.gateways if session.name == "deaf")
        async with asyncio.timeout(60):
            while len(stack.gateways) == 2:
                # More than steps bring, so that ZeroMQ's queue for it is full sooner.
                session.peer.outputs.streams += [0] * 50_000
                session.peer.outputs.tokens += [0] * 50_000
                await asyncio.sleep(0.001)
        assert len((await mine.result())[0]) == 100
        await stack.all_free()
        await deaf.close()


# ---- schedulers that die -------------------------------------------------------------------------------


async def interrupted(path: Path, prompts: list[list[int]], enough: int, **fields: object) -> tuple[PlayedRequest, ...]:
    """A request that one scheduler finishes, and one that it is killed under once ``enough`` tokens have come."""
    async with running(path) as stack, executor(path, runner=a_runner(0.005)):
        await stack.ready(1)
        whole = await stack.gateway.submit(*prompts, **fields)  # type: ignore[arg-type]
        await whole.result()
        cut = await stack.gateway.submit(*prompts, **fields)  # type: ignore[arg-type]
        await cut.until_tokens(enough)
        await stack.gateway.stop_reading()
        return whole, cut


@pytest.mark.parametrize(
    ("sampling", "n"), [(GREEDY, 1), (SEEDED, 1), (SEEDED, 3)], ids=["greedy", "seeded", "several"]
)
async def test_a_request_goes_on_at_the_next_scheduler_with_the_same_tokens(
    tmp_path: Path, sampling: SamplingParams, n: int
) -> None:
    whole, cut = await interrupted(tmp_path, [[1, 2, 3], [4, 5]], 12, sampling=sampling, n=n, max_tokens=30)
    assert not cut.done
    before = [list(tokens) for tokens in cut.tokens]
    assert any(before)
    async with running(tmp_path) as stack:
        again = await stack.gateway.resubmit(cut)
        await until(lambda: stack.router.waiting.sequences == 2 * n, 5)
        async with executor(tmp_path, runner=a_runner()):
            outputs = await again.result()
            assert outputs == whole.tokens
            assert all(tokens[: len(had)] == had for tokens, had in zip(outputs, before, strict=True))
            await stack.all_free()


async def gateway_from_before(path: Path, ready_executors: int) -> PlayedGateway:
    """A gateway to which the scheduler before reported so many executors."""
    played = PlayedGateway(gateways_of(path), "from before")
    played.ready_executors = ready_executors
    await played.join()
    return played


async def test_requests_wait_for_the_executors_that_served_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewise_scheduler.server.router.REJOIN_SECONDS", 60.0)
    async with running(tmp_path) as stack:
        old = await gateway_from_before(tmp_path, 2)
        requests = [await old.submit([number], max_tokens=20) for number in range(4)]
        async with executor(tmp_path, runner=a_runner()):
            await stack.ready(1)
            requests.append(await old.submit([9], max_tokens=20))
            await until(lambda: stack.router.waiting.sequences == 5)
            await asyncio.sleep(0.6)  # ticks go by
            assert not any(request.started for request in requests)
            async with executor(tmp_path, "another", runner=a_runner()):
                for request in requests:
                    await request.result()
                placed = [handle.scheduler.last_step for handle in stack.executors]
                assert all(placed), "those that waited are placed among all that are there"
            # One that leaves later is not waited for.
            assert await stack.generate([5])
        await old.close()


@pytest.mark.parametrize("starting", [True, False])
async def test_executors_that_do_not_come_back_are_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starting: bool
) -> None:
    if not starting:  # only a scheduler that has just started waits at all
        monkeypatch.setattr("pagewise_scheduler.server.router.STARTING_SECONDS", 0.0)
        monkeypatch.setattr("pagewise_scheduler.server.router.REJOIN_SECONDS", 60.0)
    async with running(tmp_path) as stack, executor(tmp_path, runner=a_runner()):
        await stack.ready(1)
        old = await gateway_from_before(tmp_path, 3)
        request = await old.submit([1, 2], max_tokens=3)
        async with asyncio.timeout(20):
            await request.result()
        await old.close()


async def test_an_output_that_had_ended_is_not_generated_again(tmp_path: Path) -> None:
    whole, _ = await interrupted(tmp_path, [[1, 2, 3]], 1, sampling=SEEDED, n=2, max_tokens=20)
    progress = (
        StreamProgress(int32s(*whole.tokens[0][:5]), finished=True),  # by a stop string
        StreamProgress(int32s(*whole.tokens[1][:7])),
    )
    async with running(tmp_path) as stack, executor(tmp_path, runner=a_runner()):
        await stack.ready(1)
        prompts = (Prompt(int32s(1, 2, 3), 20, progress), Prompt(int32s(4), 20, progress[:1] * 2))
        request = await stack.gateway.submit_as(
            Submit(0, 0, "again", prompts, RequestParams(SEEDED, n=2), resumed=True)
        )
        outputs = await request.result()
        assert outputs[0] == whole.tokens[0][:5]
        assert outputs[1] == whole.tokens[1]
        assert {finished.stream for frame in stack.gateway.frames for finished in frame.finished} == {1}
        assert {stream for frame in stack.gateway.frames for stream in unpack_int32s(frame.streams)} == {1}
        told = sum(len(unpack_int32s(frame.tokens)) for frame in stack.gateway.frames)
        assert told == 13, "nothing that it had already"
        await stack.all_free()
        assert not stack.gateways.names


@pytest.mark.parametrize("ending", ["length", "stop"])
async def test_an_output_that_ended_with_the_scheduler_is_told_so(tmp_path: Path, ending: str) -> None:
    sampling = SamplingParams(temperature=0, stop_token_ids=(77,) if ending == "stop" else ())
    tokens = (5, 6, 77) if ending == "stop" else (5, 6, 7)
    async with running(tmp_path) as stack:
        prompts = (Prompt(int32s(1, 2, 3), 9 if ending == "stop" else 3, (StreamProgress(int32s(*tokens)),)),)
        request = await stack.gateway.submit_as(Submit(0, 0, "again", prompts, RequestParams(sampling)))
        assert await request.result() == [list(tokens)]
        assert request.finished[0].reason == ending
        assert request.finished[0].stop_token == (77 if ending == "stop" else -1)


async def test_beam_searches_start_over(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=a_runner()):
        await stack.ready(1)
        first = await stack.gateway.submit([1, 2, 3], beam=BeamParams(3))
        await first.result()
        prompts = (Prompt(int32s(1, 2, 3), 8, (StreamProgress(b""),)),)
        again = await stack.gateway.submit_as(Submit(0, 0, "again", prompts, RequestParams(GREEDY, beam=BeamParams(3))))
        assert await again.result() == first.tokens


async def test_who_goes_on_is_not_refused_whatever_waits_and_whatever_its_key_may_do(tmp_path: Path) -> None:
    limits = KeyLimits(concurrent=1, requests_per_minute=1)
    async with running(tmp_path) as stack:
        for number in range(8):
            await stack.gateway.submit([number], key="k", limits=limits if number == 0 else None)
        with pytest.raises(RefusedRequestError):
            await (await stack.gateway.submit([9], key="k", limits=limits)).result()
        prompts = tuple(Prompt(int32s(1, 2, number), 12, (StreamProgress(int32s(5)),)) for number in range(6))
        submit = Submit(0, 0, "again", prompts, OF_K, limits, resumed=True)
        again = await stack.gateway.submit_as(submit)
        tokenizing = await stack.gateway.submit_as(Submit(0, 0, "text", (), OF_K, limits, resumed=True))
        await tokenizing.until(lambda: tokenizing.started)
        async with executor(tmp_path, runner=a_runner()):
            assert [len(tokens) for tokens in await again.result()] == [12] * 6


async def test_a_request_with_too_many_streams_is_refused_and_costs_nobody_else_anything(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, runner=a_runner(0.01)):
        await stack.ready(1)
        beside = await stack.gateway.submit([1, 2, 3], max_tokens=60)
        for _ in range(10):
            await stack.gateway.send(
                Submit(stack.gateway.epoch, 1000, "many", prompts_of([[1]] * 2048, 2), RequestParams(GREEDY, n=33))
            )
        await until(lambda: len([one for frame in stack.gateway.frames for one in frame.refused]) == 10)
        assert len((await beside.result())[0]) == 60
        assert len(stack.gateways) == 1


# ---- limits of keys ------------------------------------------------------------------------------------


async def test_limits_of_a_key_hold_over_all_gateways_together(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01), gateway(tmp_path, "b") as second:
        await stack.ready(1)
        limits = KeyLimits(concurrent=2)
        one = await stack.gateway.submit([1], key="k", limits=limits, max_tokens=40)
        work = await second.submit(key="k", limits=limits)  # tokenizing counts, too
        await work.until(lambda: work.started)
        for played in (stack.gateway, second):
            with pytest.raises(RefusedRequestError, match="the limit of concurrent requests is 2") as error:
                await (await played.submit([2], key="k", limits=limits)).result()
            assert error.value.kind == "overloaded"
            assert error.value.retry_after >= 1
        assert str(error.value).startswith("API key k: 2 requests are running")
        await (await second.submit([2], key="other", limits=limits)).result()
        await second.abort(work)
        await (await second.submit([2], key="k", limits=limits)).result()
        await one.result()
        assert stack.metric("requests_refused_total", reason="key_concurrent") == 2
        assert stack.metric("key_requests_total", key="k") == 3
        assert stack.metric("key_tokens_total", key="k", kind="prompt") == 2
        assert stack.metric("key_tokens_total", key="k", kind="generation") == 48


async def test_a_gateway_that_dies_gives_back_what_its_requests_counted_for(tmp_path: Path) -> None:
    limits = KeyLimits(concurrent=2)
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        dying = PlayedGateway(gateways_of(tmp_path), "dying")
        await dying.join()
        for prompts in ([[1, 2]], []):
            await dying.submit(*prompts, key="k", limits=limits, max_tokens=200)
        with pytest.raises(RefusedRequestError):
            await (await dying.submit([3], key="k", limits=limits)).result()
        await dying.close()
        await until(lambda: len(stack.gateways) == 1)
        requests = [await stack.gateway.submit([number], key="k", limits=limits) for number in range(2)]
        for request in requests:
            await request.result()


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (KeyLimits(requests_per_minute=2), "key_requests_per_minute"),
        (KeyLimits(tokens_per_minute=25), "key_tokens_per_minute"),
    ],
)
async def test_what_a_key_has_used_in_a_minute(tmp_path: Path, limits: KeyLimits, reason: str) -> None:
    async with running(tmp_path) as stack, executor(tmp_path), gateway(tmp_path, "b") as second:
        await stack.ready(1)
        await (await stack.gateway.submit([1] * 5, key="k", limits=limits)).result()
        await (await second.submit([1] * 5, key="k", limits=limits)).result()
        with pytest.raises(RefusedRequestError, match="per minute is used up") as error:
            await (await stack.gateway.submit([1], key="k", limits=limits)).result()
        assert stack.metric("requests_refused_total", reason=reason) == 1
        assert 1 <= error.value.retry_after <= 30
        await (await stack.gateway.submit([1], key="k", limits=KeyLimits())).result()


async def test_a_request_takes_the_place_of_what_it_was_counted_as(tmp_path: Path) -> None:
    limits = KeyLimits(concurrent=1, requests_per_minute=2)
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        for _ in range(2):
            counted = await stack.gateway.submit(key="k", limits=limits)
            await counted.until(lambda counted=counted: counted.started)
            request = await stack.gateway.submit_as(
                Submit(0, 0, "r", prompts_of([[1, 2]], 9), OF_K, limits, counted_as=counted.stream)
            )
            assert [len(tokens) for tokens in await request.result()] == [9]
            await stack.gateway.abort(counted)  # it is not there any more
        with pytest.raises(RefusedRequestError, match="requests per minute"):
            await (await stack.gateway.submit([1], key="k", limits=limits)).result()
        assert stack.metric("key_requests_total", key="k") == 2
        await (await stack.gateway.submit([1], key="other", limits=KeyLimits(concurrent=1))).result()


async def test_a_request_that_cannot_take_a_place_is_refused_and_gives_its_own_back(tmp_path: Path) -> None:
    limits = KeyLimits(concurrent=1)
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        running_one = await stack.gateway.submit([1], key="other", max_tokens=100)
        counted = await stack.gateway.submit(key="k", limits=limits)
        await counted.until(lambda: counted.started)
        for key, stream in (("k", 12345), ("k", running_one.stream), ("thief", counted.stream)):
            submit = Submit(0, 0, "r", prompts_of([[1]], 9), RequestParams(GREEDY, key=key), limits, counted_as=stream)
            with pytest.raises(RefusedRequestError, match="counted as stream"):
                await (await stack.gateway.submit_as(submit)).result()
        await stack.gateway.abort(counted)
        await (await stack.gateway.submit([2], key="k", limits=limits)).result()
        await running_one.result()


async def test_requests_that_are_counted_together_do_not_take_more_tokens_than_there_are(tmp_path: Path) -> None:
    limits = KeyLimits(tokens_per_minute=10, requests_per_minute=100)
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        places = [await stack.gateway.submit(key="k", limits=limits) for _ in range(3)]
        submits = []
        for number, place in enumerate(places):
            await place.until(lambda place=place: place.started)
            prompts = prompts_of([[number] * 20], 2)
            submits.append(Submit(0, 0, "r", prompts, OF_K, limits, counted_as=place.stream))
        first = await stack.gateway.submit_as(submits[0])
        for submit in submits[1:]:
            with pytest.raises(RefusedRequestError, match="tokens per minute"):
                await (await stack.gateway.submit_as(submit)).result()
        assert [len(tokens) for tokens in await first.result()] == [2]
        assert stack.metric("key_tokens_total", key="k", kind="prompt") == 20


async def test_a_request_that_is_refused_after_its_body_was_read_counts_as_one_of_the_minute(tmp_path: Path) -> None:
    limits = KeyLimits(requests_per_minute=2)
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        for _ in range(2):
            counted = await stack.gateway.submit(key="k", limits=limits)
            await counted.until(lambda counted=counted: counted.started)
            prompts = prompts_of([[1] * 300], 9)
            submit = Submit(0, 0, "r", prompts, OF_K, limits, counted_as=counted.stream)
            with pytest.raises(RefusedRequestError, match="the most that fit are 256"):
                await (await stack.gateway.submit_as(submit)).result()
        with pytest.raises(RefusedRequestError, match="requests per minute"):
            await (await stack.gateway.submit([1], key="k", limits=limits)).result()


@pytest.mark.parametrize("prompt", [[1] * 300, [5000]], ids=["does not fit", "cannot be"])
async def test_a_refused_request_does_not_keep_its_place(tmp_path: Path, prompt: list[int]) -> None:
    limits = KeyLimits(concurrent=1)
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        counted = await stack.gateway.submit(key="k", limits=limits)
        await counted.until(lambda: counted.started)
        submit = Submit(0, 0, "r", prompts_of([prompt], 9), OF_K, limits, counted_as=counted.stream)
        with pytest.raises(RefusedRequestError):
            await (await stack.gateway.submit_as(submit)).result()
        await (await stack.gateway.submit([2], key="k", limits=limits)).result()


# ---- queries -------------------------------------------------------------------------------------------


async def test_reports_of_memory_and_requests(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, "e", step_seconds=0.01):
        await stack.ready(1)
        request = await stack.gateway.submit([1, 2, 3, 4, 5], max_tokens=40, request_id="known")
        await request.until_tokens(2)
        answer = await stack.gateway.ask("memory", limit=3)
        (report,) = msgspec.json.decode(answer.body)["executors"]
        assert report["executor_id"] == "e"
        assert report["device"]["in_use"] > 0
        report = msgspec.json.decode((await stack.gateway.ask("request", "known")).body)
        assert report["sequences"][0]["num_prompt_tokens"] == 5
        await request.result()
        report = msgspec.json.decode((await stack.gateway.ask("request", "known")).body)
        assert report["sequences"][0]["finish_reason"] == "length"
        assert not (await stack.gateway.ask("request", "unknown")).found
        answer = await stack.gateway.ask("metrics")
        assert b"pagewise_generation_tokens_total" in answer.body
