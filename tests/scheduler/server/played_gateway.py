"""A fake gateway that a test controls: it submits requests over ZeroMQ, and keeps the scheduler's messages."""

import asyncio
import uuid
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio
from pagewise_shared.curve import Keys
from pagewise_shared.protocol import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Abort,
    AbortRequest,
    AdapterAnswer,
    AdapterState,
    ConsoleView,
    FinishStream,
    FleetState,
    GatewayHello,
    GatewayWelcome,
    Goodbye,
    Heartbeat,
    KeyLimits,
    Message,
    Outputs,
    Prompt,
    PromptFailed,
    Query,
    QueryAnswer,
    Refused,
    RequestParams,
    RequestRefused,
    ResetCache,
    Started,
    StreamFinished,
    StreamProgress,
    Submit,
    ToGateway,
    TokenLogprobs,
    decode_to_gateway,
    encode,
    unpack_int32s,
)
from pagewise_shared.sampling import BeamParams, SamplingParams

GREEDY = SamplingParams(temperature=0)


class RefusedRequestError(Exception):
    """The scheduler has not taken a request."""

    def __init__(self, refused: RequestRefused) -> None:
        super().__init__(refused.message)
        self.kind, self.retry_after = refused.kind, refused.retry_after


class FailedPromptError(Exception):
    """The scheduler could not finish an accepted request."""

    def __init__(self, failed: PromptFailed) -> None:
        super().__init__(failed.message)
        self.kind = failed.kind


@dataclass(eq=False)
class PlayedRequest:
    """A request as its gateway sees it: the outputs of each of its streams, the first one being ``stream``."""

    stream: int
    submit: Submit
    tokens: list[list[int]]
    finished: dict[int, StreamFinished] = field(default_factory=dict)
    started: list[Started] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.finished) == len(self.tokens)

    async def result(self) -> list[list[int]]:
        """The tokens of all outputs; raises the error that ended the request instead."""
        await self.until(lambda: self.done)
        if self.error is not None:
            raise self.error
        return self.tokens

    async def until(self, holds: "object") -> None:
        assert callable(holds)
        while not holds():
            self.changed.clear()
            await self.changed.wait()

    async def until_tokens(self, number: int) -> None:
        """Until so many tokens have come, of all outputs together."""
        await self.until(lambda: self.done or sum(map(len, self.tokens)) >= number)

    def progress(self) -> tuple[StreamProgress, ...]:
        """The progress that a gateway would send to another scheduler."""
        return tuple(
            StreamProgress(array("i", tokens).tobytes(), index in self.finished)
            for index, tokens in enumerate(self.tokens)
        )


def prompts_of(
    prompts: Sequence[Sequence[int]], max_tokens: int, progress: Sequence[tuple[StreamProgress, ...]] = ()
) -> tuple[Prompt, ...]:
    progress = progress or [()] * len(prompts)
    return tuple(
        Prompt(array("i", prompt).tobytes(), max_tokens, one) for prompt, one in zip(prompts, progress, strict=True)
    )


class PlayedGateway:
    """``frames``: the Outputs that have come. ``fleet``: the last FleetState.

    ``ready_executors``, ``rejoins``, ``adapters``: the fields of its Hello about earlier schedulers.
    ``adapter_answers``: by number.
    """

    def __init__(self, endpoint: str, gateway_id: str = "gateway", keys: Keys | None = None) -> None:
        self.gateway_id = gateway_id
        self.epoch = 0
        self.fleet = FleetState(0)
        self.frames: list[Outputs] = []
        self.requests: dict[int, PlayedRequest] = {}
        self.answers: dict[int, asyncio.Future[QueryAnswer]] = {}
        self.ready_executors = self.rejoins = 0
        self.adapters = AdapterState(0)
        self.adapter_answers: dict[int, AdapterAnswer] = {}
        self.instance = uuid.uuid4().hex
        self._next = 0
        self._tasks: list[asyncio.Task[None]] = []
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            keys.secure_client(self.socket)
        self.socket.connect(endpoint)

    async def send(self, message: Message | bytes) -> None:
        await self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def receive(self) -> ToGateway:
        async with asyncio.timeout(10):
            return decode_to_gateway(await self.socket.recv())

    async def join(self) -> GatewayWelcome | Refused:
        """Send Hello; return the answer. If it is let in, it reads and sends heartbeats until it is closed."""
        await self.send(
            GatewayHello(
                PROTOCOL_MAJOR,
                PROTOCOL_MINOR,
                self.gateway_id,
                "m",
                self.instance,
                self.ready_executors,
                self.rejoins,
                self.adapters.version,
                self.adapters.adapters,
            )
        )
        while not isinstance(answer := await self.receive(), GatewayWelcome | Refused):
            pass
        if isinstance(answer, GatewayWelcome):
            self.epoch = answer.epoch
            state = await self.receive()
            assert isinstance(state, FleetState)
            self.fleet = state
            self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return answer

    async def stop_reading(self) -> None:
        """From here on nothing is read, and no heartbeat sent: the gateway is as good as dead."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError):
                await task
        self._tasks = []

    async def close(self, *, goodbye: bool = False) -> None:
        await self.stop_reading()
        if goodbye:
            await self.send(Goodbye(self.epoch, "the test says so"))
            self.socket.setsockopt(zmq.LINGER, 5000)  # it is sent before the connection is closed
        self.socket.close()
        self.context.term()

    async def _beat(self) -> None:
        while True:
            await self.send(Heartbeat(self.epoch))
            await asyncio.sleep(0.3)

    async def _read(self) -> None:
        while True:
            match decode_to_gateway(await self.socket.recv()):
                case Outputs() as outputs:
                    assert outputs.epoch == self.epoch
                    self.frames.append(outputs)
                    self._take(outputs)
                case FleetState() as state:
                    self.fleet = state
                case AdapterState() as told:
                    self.adapters = told
                case AdapterAnswer() as answered:
                    self.adapter_answers[answered.number] = answered
                case QueryAnswer() as answer:
                    self.answers.pop(answer.number).set_result(answer)

    def _of(self, stream: int) -> PlayedRequest | None:
        return self.requests.get(stream)

    def _take(self, outputs: Outputs) -> None:
        """Apply a frame, except its entries for streams that are over here, as any gateway does."""
        for refused in outputs.refused:
            if (request := self._of(refused.stream)) is not None:
                request.error = RefusedRequestError(refused)
        for started in outputs.started:
            if (request := self._of(started.stream)) is not None:
                request.started.append(started)
        for entries in outputs.prompt_logprobs:
            if (request := self._of(entries.stream)) is not None:
                request.prompt_logprobs += entries.entries
        streams = unpack_int32s(outputs.streams)
        for stream, token in zip(streams, unpack_int32s(outputs.tokens), strict=True):
            if (request := self._of(stream)) is not None and stream - request.stream not in request.finished:
                request.tokens[stream - request.stream].append(token)
        for entry in outputs.logprobs:
            if (request := self._of(streams[entry.index])) is not None:
                request.logprobs.append(entry)
        for finished in outputs.finished:
            if (request := self._of(finished.stream)) is not None:
                request.finished[finished.stream - request.stream] = finished
        for failed in outputs.failed:
            if (request := self._of(failed.stream)) is not None:
                request.error = FailedPromptError(failed)
        in_order = [self._of(finished.stream) for finished in outputs.finished] + list(self.requests.values())
        for request in dict.fromkeys(request for request in in_order if request is not None):
            request.changed.set()
            if request.done:
                self._forget(request)

    def _forget(self, request: PlayedRequest) -> None:
        for stream in range(request.stream, request.stream + max(1, len(request.tokens))):
            self.requests.pop(stream, None)

    # ---- messages of a gateway -----------------------------------------------------------------------

    async def submit(
        self,
        *prompts: Sequence[int],
        max_tokens: int = 8,
        sampling: SamplingParams = GREEDY,
        n: int = 1,
        beam: BeamParams | None = None,
        priority: int = 0,
        key: str = "",
        limits: KeyLimits | None = None,
        request_id: str = "",
        client_request_id: str = "",
        cache_salt: str | None = None,
    ) -> PlayedRequest:
        """Submit a request with these prompts."""
        return await self.submit_as(
            Submit(
                self.epoch,
                self._next,
                request_id or uuid.uuid4().hex,
                prompts_of(prompts, max_tokens),
                RequestParams(sampling, n, beam, priority, cache_salt, key, client_request_id),
                limits or KeyLimits(),
            )
        )

    async def submit_as(self, submit: Submit) -> PlayedRequest:
        """Submit this request; its epoch and streams are filled in."""
        submit = Submit(self.epoch, self._next, *list(tuple_of(submit))[2:])
        outputs = len(submit.prompts) * submit.params.n
        known = [
            unpack_int32s(progress.tokens[: len(progress.tokens) // 4 * 4]).tolist()
            for prompt in submit.prompts
            for progress in (prompt.progress or [StreamProgress(b"")] * submit.params.n)
        ]
        request = PlayedRequest(submit.stream, submit, known if outputs else [[]])
        for index, progress in enumerate(one for prompt in submit.prompts for one in prompt.progress):
            if progress.finished:
                request.finished[index] = StreamFinished(submit.stream + index, "stop")
        self._next += max(1, outputs)
        for stream in range(submit.stream, self._next):
            self.requests[stream] = request
        await self.send(submit)
        return request

    async def resubmit(self, request: PlayedRequest) -> PlayedRequest:
        """Submit again a request that was submitted to another scheduler, with the tokens that have come."""
        n, old = request.submit.params.n, request.submit
        progress = request.progress()
        prompts = tuple(
            Prompt(prompt.tokens, prompt.max_tokens, progress[number * n : number * n + n])
            for number, prompt in enumerate(old.prompts)
        )
        return await self.submit_as(msgspec.structs.replace(old, prompts=prompts, resumed=True))

    async def abort(self, request: PlayedRequest) -> None:
        self._forget(request)
        await self.send(Abort(self.epoch, request.stream))

    async def finish(self, request: PlayedRequest, index: int) -> None:
        """A stop string was found in the text of an output."""
        request.finished[index] = StreamFinished(request.stream + index, "stop")
        await self.send(FinishStream(self.epoch, request.stream + index))
        if request.done:
            self._forget(request)
            request.changed.set()

    async def ask(
        self,
        kind: str,
        argument: str = "",
        limit: int = 0,
        key: str = "",
        view: ConsoleView | None = None,
    ) -> QueryAnswer:
        return await self._answered(
            lambda number: Query(self.epoch, number, kind, argument, limit, key, view)  # type: ignore[arg-type]
        )

    async def end_called(self, name: str) -> bool:
        """Whether there was a request of that id, which an operator ends."""
        return (await self._answered(lambda number: AbortRequest(self.epoch, number, name))).found

    async def reset_cache(self, salt: str = "", *, external: bool = False) -> QueryAnswer:
        """Release the cached blocks of a salt, or all."""
        return await self._answered(lambda number: ResetCache(self.epoch, number, salt, external))

    async def _answered(self, question: Callable[[int], Message]) -> QueryAnswer:
        number = len(self.answers) + self._next
        self.answers[number] = asyncio.get_running_loop().create_future()
        answer = self.answers[number]
        await self.send(question(number))
        async with asyncio.timeout(10):
            return await answer


def tuple_of(message: Submit) -> tuple[object, ...]:
    """The fields of a message in order."""
    return tuple(getattr(message, name) for name in message.__struct_fields__)
