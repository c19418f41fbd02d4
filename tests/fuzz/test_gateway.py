"""After any messages of a scheduler, a gateway works: the next valid scheduler gets and serves all requests."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from pagewise_gateway.generation import AnswerOptions, GenerationError
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import LiveRequest, SchedulerClient
from pagewise_shared.errors import RefusedError
from pagewise_shared.protocol import (
    GatewayWelcome,
    Message,
    Outputs,
    Prompt,
    PromptFailed,
    RequestParams,
    RequestRefused,
    StreamFinished,
    Submit,
    ToGateway,
    decode_from_gateway,
    encode,
    pack_int32s,
    unpack_int32s,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.fuzz.effort import examples
from tests.fuzz.messages import frames, of
from tests.gateway.text.tokenizer_builders import byte_level

TOKENIZER = byte_level()
EPOCH, LENGTH = 7, 12

small = st.integers(-1, 9)
matching = st.lists(st.tuples(small.filter(lambda stream: stream >= 0), st.integers(0, 400)), max_size=30)
plausible = st.builds(
    lambda pairs, finished, failed, refused: Outputs(
        EPOCH,
        streams=pack_int32s([stream for stream, _ in pairs]),
        tokens=pack_int32s([token for _, token in pairs]),
        finished=tuple(finished),
        failed=tuple(failed),
        refused=tuple(refused),
    ),
    matching,
    st.lists(of(StreamFinished, stream=small), max_size=3),
    st.lists(of(PromptFailed, stream=small), max_size=1),
    st.lists(of(RequestRefused, stream=small), max_size=1),
)
nearly = of(Outputs, epoch=st.just(EPOCH))
sent = st.one_of(
    frames(ToGateway), plausible.map(encode), plausible.map(encode), nearly.filter(lambda one: fits(one)).map(encode)
)


def fits(message: Message) -> bool:
    try:
        encode(message)
    except (OverflowError, UnicodeEncodeError):
        return False
    return True


class Gateway:
    """A link without a socket: ``outbox`` holds its messages."""

    def __init__(self) -> None:
        self.metrics = Metrics("m")
        self.link = SchedulerClient("ipc:///nowhere", TOKENIZER, self.metrics, gateway_id="g", model_name="m")
        self.connection = self.link._connection
        self.outbox = self.connection._outbox

    def submit(self, *, prompts: int = 1, **fields: Any) -> LiveRequest:
        prompt = Prompt(pack_int32s([70, 71, 72]), LENGTH)
        sampling = SamplingParams(stop_token_ids=(0,))
        options = {name: fields.pop(name) for name in AnswerOptions.__slots__ if name in fields}
        request = Submit(0, 0, "r", (prompt,) * prompts, RequestParams(sampling, **fields))
        return self.link.submit(request, AnswerOptions(**options))

    def finish(self, epoch: int) -> None:
        """Act as a good scheduler: let the gateway in, and generate the missing tokens."""
        self.outbox.clear()
        self.connection.take(encode(GatewayWelcome(epoch)))
        for message in map(decode_from_gateway, list(self.outbox)):
            assert isinstance(message, Submit)
            pairs, finished = [], []
            for index, prompt in enumerate(message.prompts):
                for output in range(message.params.n):
                    stream = message.stream + index * message.params.n + output
                    progress = prompt.progress[output] if prompt.progress else None
                    if progress is None or not progress.finished:
                        known = len(unpack_int32s(progress.tokens)) if progress else 0
                        pairs += [(stream, 70)] * (LENGTH - known)
                        finished.append(StreamFinished(stream, "length"))
            streams, tokens = ([pair[side] for pair in pairs] for side in (0, 1))
            frame = Outputs(epoch, streams=pack_int32s(streams), tokens=pack_int32s(tokens), finished=tuple(finished))
            self.connection.take(encode(frame))


async def ending(live: LiveRequest) -> list[str | None]:
    """How each output ended, or that the request failed, which it may: it got an error."""
    ended: dict[int, str | None] = {}
    try:
        while news := await live.next():
            ended |= {delta.index: delta.finish_reason for delta in news if delta.finish_reason}
    except GenerationError:
        return []
    return [ended.get(index) for index in range(len(live.outputs))]


@examples(200)
@given(st.lists(sent, min_size=1, max_size=6))
def test_a_gateway_outlives_what_a_scheduler_sends(received: list[bytes]) -> None:
    async def live() -> None:
        gateway = Gateway()
        gateway.connection.take(encode(GatewayWelcome(EPOCH)))
        requests = [
            gateway.submit(n=2, prompts=2),
            gateway.submit(whole=True),
            gateway.submit(beam=BeamParams(3)),
            gateway.submit(stop=("z",)),
            gateway.submit(prompts=0),
        ]
        for frame in received:
            try:
                gateway.connection.take(frame)
            except RefusedError:
                return
        gateway.finish(EPOCH + 1000)
        async with asyncio.timeout(20):
            for request in requests[:4]:
                assert None not in await ending(request)
        requests[4].abort()
        assert gateway.link.num_live == 0
        table = gateway.link._table
        assert not any((table._requests, table._prompts, table._first_streams, table._outputs))

    asyncio.run(live())
