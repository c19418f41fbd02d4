"""Forbidden acts of gateways, over real sockets: nonsense, stale epochs, floods, keys that are not a gateway's."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from pagewise_scheduler.server.sessions import MAX_BAD_FRAMES, JoinGuard
from pagewise_scheduler.server.submissions import MAX_STREAM
from pagewise_shared.curve import GATEWAY, SCHEDULER, Keys, public_file
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    Abort,
    AdapterState,
    FinishStream,
    FleetState,
    GatewayHello,
    GatewayWelcome,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    KeyLimits,
    MemoryBudget,
    MemorySize,
    MetricFamily,
    MetricSample,
    MetricsSnapshot,
    Prompt,
    PromptSegments,
    Query,
    Refused,
    Rejoin,
    RequestParams,
    ReuseHints,
    StreamProgress,
    Submit,
    Welcome,
    encode,
)
from pagewise_shared.sampling import BeamParams, SamplingParams
from pagewise_shared.thinking import ThinkingBudget

from tests.scheduler.server.played_gateway import GREEDY, PlayedGateway, RefusedRequestError, prompts_of
from tests.scheduler.server.stack import RawExecutor, executor, gateway, gateways_of, hello, int32s, running, until
from tests.shared.key_pairs import make_key_pairs

GOOD = Submit(0, 0, "r", prompts_of([[1, 2, 3]], 4), RequestParams(GREEDY))
ONE = Prompt(int32s(1), 4)


def changed(**fields: object) -> Submit:
    return msgspec.structs.replace(GOOD, **fields)


def with_params(**fields: object) -> Submit:
    return changed(params=RequestParams(GREEDY, **fields))  # type: ignore[arg-type]


def with_thinking(budget: ThinkingBudget, beam: BeamParams | None = None) -> Submit:
    return changed(params=RequestParams(SamplingParams(thinking=budget), beam=beam))


IMPOSSIBLE = [
    changed(prompts=(Prompt(b"", 4),)),
    changed(prompts=(Prompt(b"abc", 4),)),
    changed(prompts=(Prompt(int32s(-1), 4),)),
    changed(prompts=(Prompt(int32s(4096), 4),)),
    changed(prompts=(Prompt(int32s(1), -1),)),
    changed(prompts=(Prompt(int32s(1), 2**40),)),
    changed(prompts=(Prompt(int32s(1), 4, (StreamProgress(b""), StreamProgress(b""))),)),
    changed(prompts=(Prompt(int32s(1), 4, (StreamProgress(b"abc"),)),)),
    changed(prompts=(Prompt(int32s(1), 4, (StreamProgress(int32s(-1)),)),)),
    changed(prompts=(Prompt(int32s(1), 1, (StreamProgress(int32s(1, 2)),)),)),
    *(
        changed(prompts=(Prompt(int32s(1, 2, 3, 4), 4, segments=segments),))
        for segments in (
            PromptSegments(b"abc"),
            PromptSegments(int32s(0)),
            PromptSegments(int32s(0, 4)),
            PromptSegments(int32s(2, 1)),
            PromptSegments(int32s(0, 2, 1, 3)),
            PromptSegments(int32s(-1, 2)),
            PromptSegments(int32s(1, 2), root=2),
            PromptSegments(int32s(1, 2), boundary=-1),
        )
    ),
    with_params(beam=BeamParams(0)),
    with_params(beam=BeamParams(2**40)),
    with_params(beam=BeamParams(2, float("nan"))),
    with_params(beam=BeamParams(2, 1e300)),
    with_params(n=2, beam=BeamParams(1)),
    with_thinking(ThinkingBudget(1, 2, (2,), (1,)), beam=BeamParams(1)),
    with_thinking(ThinkingBudget(1, 2, (1,), (1,))),
    with_thinking(ThinkingBudget(1, 4096, (4096,), (1,))),
    changed(request_id="x" * 10_000),
    with_params(key="x" * 10_000),
    with_params(priority=2**60),
    changed(limits=KeyLimits(concurrent=0)),
    changed(limits=KeyLimits(tokens_per_minute=-5)),
    changed(memory=(MemoryBudget(0, MemorySize(-1)),)),
    changed(memory=(MemoryBudget(0, low=MemorySize(share=float("nan"))),)),
    changed(memory=(MemoryBudget(-1),)),
    with_params(reuse=ReuseHints(retention=-1)),
    with_params(reuse=ReuseHints(retention=2**40)),
    with_params(reuse=ReuseHints(tool_call_ids=(1,) * 1000)),
    with_params(reuse=ReuseHints(cache_key="x" * 10_000)),
    with_params(reuse=ReuseHints(session="x" * 10_000)),
    with_params(reuse=ReuseHints(parent="x" * 10_000)),
    with_params(reuse=ReuseHints(returns_in=float("nan"))),
    with_params(reuse=ReuseHints(returns_in=-7.0)),
    *(
        changed(prompts=(Prompt(int32s(1, 2, 3), 4, places=places),))
        for places in (b"abc", int32s(-1), int32s(4), int32s(*[1] * 9))
    ),
]


@pytest.mark.parametrize("submit", IMPOSSIBLE, ids=range(len(IMPOSSIBLE)))
async def test_a_request_that_makes_no_sense_is_refused_alone(tmp_path: Path, submit: Submit) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        good = await stack.gateway.submit([1, 2, 3])
        bad = await stack.gateway.submit_as(submit)
        with pytest.raises(RefusedRequestError) as error:
            await bad.result()
        assert error.value.kind == "never_fits"
        assert len(str(error.value)) < 500
        assert len((await good.result())[0]) == 8
        assert stack.dropped("impossible") == 1
        assert stack.router.waiting.sequences == 0
        assert not stack.gateways.names


STREAMS = [(-1, 1), (MAX_STREAM, 1), (0, 0), (0, -5), (0, 2**62), (0, 1), (1, 1), (2**62, 1)]


@pytest.mark.parametrize(("stream", "n"), STREAMS)
async def test_streams_that_cannot_be_are_not_answered(tmp_path: Path, stream: int, n: int) -> None:
    async with running(tmp_path) as stack, executor(tmp_path, step_seconds=0.01):
        await stack.ready(1)
        mine = await stack.gateway.submit([1, 2, 3], n=2, max_tokens=30)  # streams 0 and 1
        await stack.gateway.send(changed(epoch=stack.gateway.epoch, stream=stream, params=RequestParams(GREEDY, n=n)))
        await until(lambda: stack.dropped("impossible") == 1)
        assert [len(tokens) for tokens in await mine.result()] == [30, 30]


async def test_garbage_and_stale_epochs_are_dropped_and_counted(tmp_path: Path) -> None:
    async with running(tmp_path) as stack, executor(tmp_path), gateway(tmp_path, "other") as other:
        await stack.ready(1)
        await other.stop_reading()
        for junk in (b"", b"\xc1garbage", encode(Welcome(1, 1, 1))):
            await other.send(junk)
        for stale in (
            changed(epoch=other.epoch - 1),
            Abort(0, 0),
            FinishStream(other.epoch + 1, 0),
            Query(other.epoch - 1, 1, "metrics"),
            MetricsSnapshot(other.epoch - 1, ()),
        ):
            await other.send(stale)
        await other.send(Heartbeat(other.epoch - 1))
        while isinstance(answer := await other.receive(), AdapterState | FleetState):
            pass  # they may still be on their way from the joining
        assert isinstance(answer, HeartbeatAck)
        await until(lambda: stack.dropped("stale_epoch") == 6)
        assert stack.dropped("undecodable") == 3
        assert stack.router.waiting.sequences == 0
        for _ in range(MAX_BAD_FRAMES):
            await other.send(b"\xc1")
        await until(lambda: len(stack.gateways) == 1)
        assert len(await stack.generate([1, 2, 3])) == 8


async def test_heartbeats_of_an_earlier_life_keep_nobody_alive(tmp_path: Path) -> None:
    async with running(tmp_path, gateway_timeout=0.5) as stack, gateway(tmp_path, "other") as other:
        epoch = other.epoch
        await other.stop_reading()
        async with asyncio.timeout(10):
            while len(stack.gateways) == 2:
                await other.send(Heartbeat(epoch - 1))
                await asyncio.sleep(0.05)


async def test_who_has_not_joined_is_told_to(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        stranger = PlayedGateway(gateways_of(tmp_path))
        await stranger.send(GOOD)
        assert isinstance(await stranger.receive(), Rejoin)
        assert stack.dropped("unknown_sender") == 1
        assert stack.router.waiting.sequences == 0
        await stranger.close()


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (GatewayHello(PROTOCOL_MAJOR + 1, 0, "g", "m", "i"), "speaks protocol"),
        (GatewayHello(PROTOCOL_MAJOR, 0, "x" * 10_000, "m", "i"), "longer than 256"),
        (GatewayHello(PROTOCOL_MAJOR, 0, "a\nb", "m", "i"), "cannot be printed"),
        (GatewayHello(PROTOCOL_MAJOR, 0, "g", "x" * 10_000, "i"), "model_name is longer"),
        (
            GatewayHello(PROTOCOL_MAJOR, 0, "g", "another", "i"),
            "serves the model 'another', and the scheduler was started for 'm'",
        ),
    ],
)
async def test_who_does_not_fit_is_refused_with_a_reason(tmp_path: Path, hello: GatewayHello, reason: str) -> None:
    async with running(tmp_path) as stack:
        other = PlayedGateway(gateways_of(tmp_path))
        await other.send(hello)
        answer = await other.receive()
        assert isinstance(answer, Refused)
        assert reason in answer.reason
        assert len(stack.gateways) == 1
        await other.close()


async def test_hellos_that_come_too_often_are_dropped(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        other = PlayedGateway(gateways_of(tmp_path))
        for _ in range(50):
            await other.send(GatewayHello(PROTOCOL_MAJOR, 0, "g", "m", "i"))
        assert isinstance(await other.receive(), GatewayWelcome)
        await until(lambda: stack.dropped("too_many_hellos") == 49)
        await other.close()


async def test_executors_and_gateways_do_not_speak_each_others_language(tmp_path: Path) -> None:
    async with running(tmp_path) as stack:
        other = PlayedGateway(gateways_of(tmp_path))
        for frame in (Goodbye(1, "x"), Heartbeat(1)):
            await other.send(frame)
            assert isinstance(await other.receive(), Rejoin)
        await other.send(b"\x96\xa5hello\x01\x02\x03\x04\x05")
        await until(lambda: stack.dropped("undecodable") == 1)
        await other.close()


FAMILIES = [
    MetricFamily("bad name", "", "counter", ()),
    MetricFamily("a", "", "summary", ()),
    MetricFamily("a", "", "counter", (MetricSample("b_total", (), 1.0),)),
    MetricFamily("a", "", "counter", (MetricSample("a_total", (("bad\nlabel", "x"),), 1.0),)),
    MetricFamily("a", "", "counter", (MetricSample("a_total", (), -1.0),)),
    MetricFamily("a", "", "histogram", (MetricSample("a_other", (), 1.0),)),
]


@pytest.mark.parametrize("family", FAMILIES, ids=range(len(FAMILIES)))
async def test_metrics_that_are_none_do_not_spoil_the_others(tmp_path: Path, family: MetricFamily) -> None:
    good = MetricFamily("good", "", "counter", (MetricSample("good_total", (("x", 'a"\n'),), 3.0),))
    async with running(tmp_path) as stack, gateway(tmp_path, "other") as other:
        await stack.gateway.send(MetricsSnapshot(stack.gateway.epoch, (good,)))
        await other.send(MetricsSnapshot(other.epoch, (good, family)))
        await until(lambda: stack.dropped("impossible") == 1)
        body = (await stack.gateway.ask("metrics")).body.decode()
        assert 'good_total{x="a\\"\\n"} 3.0' in body


# ---- keys ----------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of keys: "one" is an executor's, "two" and "three" are gateways'."""
    folder = make_key_pairs(tmp_path, SCHEDULER, "one")
    return make_key_pairs(folder, GATEWAY, "two", "three", kind="gateway")


def test_a_key_lets_in_its_own_kind_only(folder: Path) -> None:
    keys = Keys(folder, SCHEDULER)
    one, two = (Keys(folder, name).public.decode() for name in ("one", "two"))
    executors, gateways = JoinGuard("executor", keys), JoinGuard("gateway", keys)
    assert executors.refusal("e", one, []) is None
    assert gateways.refusal("g", two, []) is None
    assert gateways.refusal("g", one, []) == "its key is one for executors"
    assert executors.refusal("e", two, []) == "its key is one for gateways"
    assert "belongs to the key three" in str(gateways.refusal("three", two, []))
    assert "with another key is in already" in str(gateways.refusal("g", two, [("g", "another")]))
    assert gateways.revoked([one, two]) == {one}


async def test_gateways_with_keys_are_let_in_and_others_are_not(folder: Path) -> None:
    async with running(folder, keys=Keys(folder, SCHEDULER)) as stack:
        good = PlayedGateway(gateways_of(folder), "good", Keys(folder, "two"))
        assert isinstance(await good.join(), GatewayWelcome)
        wrong = PlayedGateway(gateways_of(folder), "wrong", Keys(folder, "one"))
        await wrong.send(GatewayHello(PROTOCOL_MAJOR, 0, "wrong", "m", "i"))
        await until(lambda: stack.metrics.connections_refused("unknown_key")._value.get() == 1)
        plain = PlayedGateway(gateways_of(folder), "plain")
        await plain.send(GatewayHello(PROTOCOL_MAJOR, 0, "plain", "m", "i"))
        await until(lambda: stack.metrics.connections_refused("handshake")._value.get() == 1)
        assert len(stack.gateways) == 2
        raw = RawExecutor(folder, Keys(folder, "three"))
        await raw.send(hello())
        await until(lambda: stack.metrics.connections_refused("unknown_key")._value.get() == 2)
        assert not len(stack.registry)
        raw.close()
        async with executor(folder, keys=Keys(folder, "one")):
            request = await good.submit([1, 2, 3])
            assert len((await request.result())[0]) == 8
        public_file(folder, "two", "gateway").unlink()
        await until(lambda: len(stack.gateways) == 1)
        for played in (good, wrong, plain):
            await played.close()
