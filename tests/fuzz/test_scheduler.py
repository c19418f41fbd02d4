"""A scheduler on real sockets beside a hostile executor or gateway: it serves the others, and nothing of it grows."""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from pagewise_shared import protocol
from pagewise_shared.errors import ProtocolError
from pagewise_shared.protocol import (
    Abort,
    Copied,
    FinishStream,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    MetricsSnapshot,
    Prompt,
    Query,
    RequestParams,
    StepPlan,
    StepResult,
    StreamProgress,
    Submit,
    Welcome,
    decode_from_scheduler,
    pack_int32s,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.fuzz import messages
from tests.fuzz.effort import EFFORT, examples
from tests.scheduler.server.played_gateway import FailedPromptError, PlayedGateway, RefusedRequestError
from tests.scheduler.server.stack import RawExecutor, Stack, executor, gateways_of, hello, running

pytestmark = pytest.mark.timeout(300 * EFFORT)

T = TypeVar("T")

BLOCKS = 64
PROMPT = [1, 2, 3]

GOOD_HELLO = {"vocab_size": 4096, "num_blocks": BLOCKS}
HELLOS = st.one_of(
    messages.of(
        Hello,
        protocol_major=st.just(protocol.PROTOCOL_MAJOR),
        protocol_minor=st.just(0),
        model_fingerprint=st.just("simulated"),
        vocab_size=st.just(4096),
    ),
    # One field is wrong: the others would let it in.
    st.sampled_from(Hello.__struct_fields__).flatmap(
        lambda name: messages.of(Hello).map(lambda any_: hello(**(GOOD_HELLO | {name: getattr(any_, name)})))
    ),
)
TOKENS = st.one_of(
    st.lists(st.integers(0, 4095), min_size=1, max_size=2).map(pack_int32s),
    st.sampled_from([-1, 4096, 2**31 - 1]).map(lambda token: pack_int32s([token])),
    messages.BYTES,
)
RESULTS = st.one_of(messages.of(StepResult, tokens=TOKENS), messages.of(StepResult, tokens=TOKENS, error=st.none()))
STRANGE = messages.frames(protocol.FromExecutor)
MOVES = st.lists(st.one_of(STRANGE, HELLOS, RESULTS, messages.of(Copied), st.just("honest result")), max_size=10)


class Background:
    """A fleet, a router and one honest executor, on a loop in a thread of their own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self.loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(60)
        self.expected = self.do(self.stack.generate(PROMPT))

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        # On a busy machine the honest executor must not be given up for being slow.
        slow = {"executor_timeout": 60.0, "step_timeout": 60.0, "gateway_timeout": 60.0}
        async with running(self.path, **slow) as self.stack, executor(self.path, "honest"):
            await self.stack.ready(1)
            self._ready.set()
            await self._over.wait()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(120)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        self.loop.close()


@pytest.fixture(scope="module")
def background(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Background]:
    background = Background(tmp_path_factory.mktemp("fleet"))
    yield background
    background.close()


async def make(raw: RawExecutor, move: Message | bytes | str) -> None:
    """One move of the hostile executor. Results and copies get the epoch and step of the last plan, if one comes."""
    if not isinstance(move, (StepResult, Copied, str)):
        with suppress(OverflowError, UnicodeEncodeError):
            await raw.send(move)
        return
    plan: StepPlan | None = None
    with suppress(TimeoutError, ProtocolError):
        async with asyncio.timeout(0.05):
            while plan is None:
                message = decode_from_scheduler(await raw.socket.recv())
                plan = message if isinstance(message, StepPlan) else None
    epoch, step = (plan.epoch, plan.step) if plan is not None else (1, 1)
    with suppress(OverflowError, UnicodeEncodeError):
        if isinstance(move, Copied):
            await raw.send(msgspec.structs.replace(move, epoch=epoch, step=step))
        elif isinstance(move, StepResult):
            tail = (move.tokens, move.logprobs, move.prompt_logprobs, move.elapsed_us, move.error)
            await raw.send(StepResult(epoch, step, *tail))
        else:
            await raw.send(StepResult(epoch, step, pack_int32s([7])))


async def play(stack: Stack, path: Path, moves: list[Message | bytes | str], beam: bool) -> None:
    raw = RawExecutor(path)
    try:
        await fight(stack, raw, moves, beam)
    finally:
        raw.close()


async def fight(stack: Stack, raw: RawExecutor, moves: list[Message | bytes | str], beam: bool) -> None:
    await raw.send(hello(**GOOD_HELLO))
    while not isinstance(await raw.receive(), Welcome):
        pass
    # Wide enough that one is placed on the hostile executor.
    params = BeamParams(2) if beam else None
    victims = [asyncio.create_task(stack.generate([4, 5, 6, number], beam=params)) for number in range(2)]
    await asyncio.sleep(0)
    for move in moves:
        await make(raw, move)
    await raw.send(Heartbeat(1))
    await raw.send(Goodbye(1, "enough"))
    async with asyncio.timeout(60):
        for victim in victims:
            with suppress(FailedPromptError, RefusedRequestError):
                await victim
    while len(stack.registry) > 1:
        await asyncio.sleep(0.01)


async def check(background: Background) -> None:
    """The honest executor is still there, gives the same tokens, and every block is accounted for."""
    stack = background.stack
    async with asyncio.timeout(60):
        assert await stack.generate(PROMPT) == background.expected
        (handle,) = stack.executors
        while handle.scheduler.kv.num_available != BLOCKS:
            await asyncio.sleep(0.01)
    assert handle.view.load == 0
    assert handle.scheduler.requests == []
    assert stack.router.waiting.sequences == 0
    assert len(stack.registry) == 1
    assert len(stack.registry._bad_frames) <= 10_001


@examples(25)
@given(moves=MOVES, beam=st.booleans())
def test_a_hostile_executor_disturbs_nobody(
    background: Background, moves: list[Message | bytes | str], beam: bool
) -> None:
    background.do(play(background.stack, background.path, moves, beam))
    background.do(check(background))


# ---- a hostile gateway ---------------------------------------------------------------------------------

PROMPTS = st.lists(
    st.builds(
        Prompt,
        st.one_of(st.lists(st.integers(0, 4095), min_size=1, max_size=9).map(pack_int32s), messages.BYTES),
        st.one_of(st.integers(0, 20), messages.INTS),
        st.lists(messages.of(StreamProgress, tokens=TOKENS), max_size=2).map(tuple),
    ),
    max_size=3,
).map(tuple)
SMALL = st.one_of(st.integers(0, 3), messages.INTS)
GOOD_SUBMIT: dict[str, Any] = {
    "epoch": 0,
    "stream": 0,
    "request_id": "hostile",
    "prompts": (Prompt(pack_int32s([1, 2, 3]), 9),),
    "params": RequestParams(SamplingParams(temperature=0)),
}
SUBMITS = st.one_of(
    messages.of(Submit, stream=st.integers(0, 40), prompts=PROMPTS, params=messages.of(RequestParams, n=SMALL)),
    # One field is wrong: the others would let it in.
    st.sampled_from(Submit.__struct_fields__).flatmap(
        lambda name: messages.of(Submit).map(lambda any_: Submit(**(GOOD_SUBMIT | {name: getattr(any_, name)})))
    ),
    st.sampled_from(RequestParams.__struct_fields__).flatmap(
        lambda name: messages.of(RequestParams).map(
            lambda any_: Submit(
                **(GOOD_SUBMIT | {"params": structs.replace(GOOD_SUBMIT["params"], **{name: getattr(any_, name)})})
            )
        )
    ),
    st.builds(lambda prompts, stream: Submit(**(GOOD_SUBMIT | {"prompts": prompts, "stream": stream})), PROMPTS, SMALL),
)
STREAM_MOVES = st.one_of(messages.of(Abort, stream=SMALL), messages.of(FinishStream, stream=SMALL))
QUERIES = st.one_of(messages.of(Query), messages.of(MetricsSnapshot))
GATEWAY_MOVES = st.lists(
    st.one_of(messages.frames(protocol.FromGateway), SUBMITS, STREAM_MOVES, QUERIES, st.just("wait")), max_size=12
)


async def annoy(path: Path, moves: list[Message | bytes | str], ending: str) -> None:
    """A gateway that joins and does all this under its epoch, reads nothing, and is gone in the end."""
    hostile = PlayedGateway(gateways_of(path), "hostile")
    try:
        await hostile.join()
        await hostile.stop_reading()
        for move in moves:
            if move == "wait":
                await asyncio.sleep(0.01)
                continue
            if not isinstance(move, bytes | str) and "epoch" in move.__struct_fields__:
                move = structs.replace(move, epoch=hostile.epoch)
            with suppress(OverflowError, UnicodeEncodeError):
                await hostile.send(move)  # type: ignore[arg-type]
        if ending == "goodbye":
            await hostile.send(Goodbye(hostile.epoch, "enough"))
        await asyncio.sleep(0.02)
    finally:
        await hostile.close()


async def check_gateways(stack: Stack) -> None:
    """Nothing is left of the hostile gateway: no session, request, name or block."""
    async with asyncio.timeout(60):
        while len(stack.gateways) > 1:
            await asyncio.sleep(0.01)
    (session,) = stack.gateways
    assert not session.peer.submissions
    assert not session.peer.streams
    assert not stack.gateways.names
    assert len(stack.gateways._bad_frames) <= 10_001


@examples(40)
@given(moves=GATEWAY_MOVES, ending=st.sampled_from(["goodbye", "breaks"]))
def test_a_hostile_gateway_disturbs_nobody(
    background: Background, moves: list[Message | bytes | str], ending: str
) -> None:
    background.do(annoy(background.path, moves, ending))
    background.do(check_gateways(background.stack))
    background.do(check(background))
