"""A scheduler for gateways, on a real socket: it generates by repeating the prompt."""

import asyncio
import contextlib
import itertools
import time
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

import zmq
import zmq.asyncio
from msgspec import structs
from pagewise_shared.protocol import (
    Abort,
    AbortRequest,
    Adapter,
    AdapterAnswer,
    AdapterState,
    Advise,
    Advised,
    FinishStream,
    FleetState,
    FromGateway,
    GatewayHello,
    GatewayWelcome,
    Goodbye,
    Heartbeat,
    HeartbeatAck,
    Message,
    MetricFamily,
    MetricsSnapshot,
    Outputs,
    PromptFailed,
    Query,
    QueryAnswer,
    Refused,
    RegisterAdapter,
    Rejoin,
    RequestRefused,
    ResetCache,
    Started,
    StreamFinished,
    StreamPromptLogprobs,
    Submit,
    TokenLogprobs,
    UnregisterAdapter,
    decode_from_gateway,
    encode,
    pack_float32s,
    pack_int32s,
    unpack_int32s,
)

Kind = Literal["never_fits", "invalid", "overloaded", "unavailable"]
_epochs = itertools.count(time.time_ns() // 1_000_000)


@dataclass
class Stream:
    """One output: the prompt's tokens over and over, from the ``shift``-th on."""

    number: int
    prompt: list[int]
    shift: int
    position: int
    finished: bool

    def token(self) -> int:
        return self.prompt[(self.position + self.shift) % len(self.prompt)]


@dataclass(eq=False)
class Run:
    """A request that was taken."""

    submit: Submit
    streams: list[Stream]
    told: bool = False

    @property
    def finished(self) -> bool:
        return all(stream.finished for stream in self.streams)


@dataclass
class Member:
    """A gateway, and its submissions, by the first stream."""

    hello: GatewayHello
    epoch: int
    runs: dict[int, Run] = field(default_factory=dict)


@dataclass
class FakeScheduler:
    """Output j of each prompt gets the prompt's tokens over and over, from the j-th on.

    Fields:
        ready, max_model_len, vocab_size: of the fleet; 0: nothing is ready yet.
        refuse: how requests are refused; refuse_after: how many are taken before that.
        refuse_gateways: why gateways are not let in.
        fail_after, fail_kind: tokens after which a prompt fails.
        step_seconds: time between two rounds. tokens_per_round: of each stream.
        silent: nothing is answered, and nothing generated. paused: nothing is generated. mute: requests without prompts
            get no leave to run.
        heartbeat_ms: as in the welcome. no_grammars, problems, has_snapshots: of the fleet.
        submits, hellos, aborts, stops, goodbyes: the received messages. snapshots: the last metrics by gateway.
        reports: the answers to queries, by kind and argument. queries: the received queries.
        resets: the salt of each reset of the cache, and whether it is external. advice: that was received. advised: the
            answer to it.
        views: the content for consoles, by part. endable: ids of requests that an operator can end.
        keys: public and secret key, if connections are encrypted.
        replies: tokens of the outputs of the next requests, one after the other, in the place of their prompts'.
    """

    ready: int = 1
    max_model_len: int = 512
    vocab_size: int = 400
    refuse: tuple[Kind, str, int] | None = None
    refuse_after: int = 0
    refuse_gateways: str | None = None
    fail_after: int | None = None
    fail_kind: Literal["internal", "unavailable", "invalid"] = "internal"
    step_seconds: float = 0.0
    tokens_per_round: int = 1
    silent: bool = False
    mute: bool = False
    paused: bool = False
    heartbeat_ms: int = 200
    no_grammars: str = ""
    has_snapshots: bool = False
    problems: tuple[str, ...] = ()
    submits: list[Submit] = field(default_factory=list)
    hellos: list[GatewayHello] = field(default_factory=list)
    aborts: list[int] = field(default_factory=list)
    stops: list[int] = field(default_factory=list)
    goodbyes: list[str] = field(default_factory=list)
    snapshots: dict[str, MetricsSnapshot] = field(default_factory=dict)
    adapters: dict[str, Adapter] = field(default_factory=dict)
    late_adapters: bool = False
    reports: dict[tuple[str, str], bytes] = field(
        default_factory=lambda: {(kind, ""): b'{"executors":[]}' for kind in ("memory", "cache")}
    )
    resets: list[tuple[str, bool]] = field(default_factory=list)
    advice: list[Advise] = field(default_factory=list)
    advised: Advised = Advised(0, "accepted")  # noqa: RUF009 - it is frozen
    queries: list[Query] = field(default_factory=list)
    views: dict[str, bytes] = field(default_factory=dict)
    endable: set[str] = field(default_factory=set)
    members: dict[bytes, Member] = field(default_factory=dict)
    keys: tuple[bytes, bytes] | None = None
    replies: list[list[int]] = field(default_factory=list)
    endpoint: str = ""

    @property
    def last(self) -> Submit:
        return self.submits[-1]

    @property
    def running(self) -> list[Run]:
        """Requests of which something runs."""
        return [run for member in self.members.values() for run in member.runs.values() if not run.finished]

    @property
    def last_prompt(self) -> list[int]:
        """Tokens of the first prompt that was submitted last."""
        return unpack_int32s(self.last.prompts[0].tokens).tolist()

    @staticmethod
    async def until(condition: Callable[[], object]) -> None:
        """Wait until something is the case."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    async def until_idle(self) -> None:
        """Wait until nothing runs any more."""
        await self.until(lambda: not self.running)

    async def until_running(self) -> None:
        """Wait until something runs."""
        await self.until(lambda: self.running)

    @asynccontextmanager
    async def listening(self, endpoint: str = "tcp://127.0.0.1:*") -> AsyncIterator["FakeScheduler"]:
        """Serve until the context is left, as suddenly as if it were killed."""
        context = zmq.asyncio.Context()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self.keys is not None:  # any client that knows its public key may come in
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = self.keys
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._generate())]
        try:
            yield self
            for task in tasks:
                assert not task.done(), task.exception()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.members.clear()
            self._socket.close()
            context.term()

    async def send(self, message: Message | bytes) -> None:
        """Send a message, or bytes that need not be one, to every gateway."""
        for identity in list(self.members):
            await self._send(identity, message)

    async def announce(self, ready: int, max_model_len: int = 512) -> None:
        """Tell every gateway that the fleet has changed."""
        self.ready, self.max_model_len = ready, max_model_len
        for identity, member in list(self.members.items()):
            await self._send(identity, self._fleet(member.epoch))

    async def welcome_again(self) -> None:
        """Let every gateway in under another epoch, as after a second Hello: nothing is known of before."""
        for identity, member in list(self.members.items()):
            await self._greet(identity, member.hello)

    # ---- inside --------------------------------------------------------------------------------------

    def _fleet(self, epoch: int) -> FleetState:
        vocab_size = self.vocab_size if self.max_model_len else 0
        limits = self.max_model_len, vocab_size, self.no_grammars
        return FleetState(epoch, self.ready, *limits, self.problems, self.has_snapshots)

    async def _send(self, identity: bytes, message: Message | bytes) -> None:
        frame = message if isinstance(message, bytes) else encode(message)
        with contextlib.suppress(zmq.ZMQError):  # it is gone
            await self._socket.send_multipart([identity, frame])

    async def _receive(self) -> None:
        while True:
            identity, frame = await self._socket.recv_multipart()
            message = decode_from_gateway(frame)
            if isinstance(message, GatewayHello):
                await self._greet(identity, message)
            elif isinstance(message, Goodbye):
                self.goodbyes.append(message.reason)
                self.members.pop(identity, None)
            elif not self.silent:
                await self._take(identity, message)

    async def _greet(self, identity: bytes, hello: GatewayHello) -> None:
        self.hellos.append(hello)
        if self.silent:
            return
        if self.refuse_gateways is not None:
            await self._send(identity, Refused(self.refuse_gateways))
            return
        member = self.members[identity] = Member(hello, next(_epochs))
        await self._send(identity, GatewayWelcome(member.epoch, self.heartbeat_ms))
        await self._send(identity, self._fleet(member.epoch))
        if not self.late_adapters:
            await self._tell_adapters(identity, member)

    async def tell_adapters(self) -> None:
        """Tell every gateway which adapters there are."""
        for identity, member in list(self.members.items()):
            await self._tell_adapters(identity, member)

    async def _take(self, identity: bytes, message: FromGateway) -> None:
        member = self.members.get(identity)
        if member is None or (not isinstance(message, GatewayHello) and message.epoch != member.epoch):
            await self._send(identity, Rejoin())
            return
        match message:
            case Submit():
                await self._submit(identity, member, message)
            case Abort(stream=stream):
                if (run := member.runs.pop(stream, None)) is not None and (not run.finished or not run.submit.prompts):
                    self.aborts.append(stream)
            case FinishStream(stream=number):
                self.stops.append(number)
                for run in member.runs.values():
                    for stream in run.streams:
                        if stream.number == number:
                            stream.finished = True
            case MetricsSnapshot():
                self.snapshots[member.hello.gateway_id] = message
            case RegisterAdapter(adapter=adapter):
                self.adapters[adapter.name] = adapter
                await self._tell_adapters(identity, member)
                await self._send(identity, AdapterAnswer(message.number))
            case UnregisterAdapter(name=name):
                kind = "" if self.adapters.pop(name, None) is not None else "unknown"
                await self._tell_adapters(identity, member)
                await self._send(identity, AdapterAnswer(message.number, kind, f"there is no adapter {name!r}"))
            case Query():
                body = self._report(message)
                await self._send(identity, QueryAnswer(message.number, body is not None, body or b""))
            case AbortRequest():
                ended = message.request_id in self.endable
                self.endable.discard(message.request_id)
                await self._send(identity, QueryAnswer(message.number, ended))
            case ResetCache():
                self.resets.append((message.salt, message.external))
                await self._send(identity, QueryAnswer(message.number, True, b'{"executors":[]}'))
            case Advise():
                self.advice.append(message)
                await self._send(identity, structs.replace(self.advised, number=message.number))
            case Heartbeat():
                await self._send(identity, HeartbeatAck(member.epoch))

    def _report(self, query: Query) -> bytes | None:
        self.queries.append(query)
        if query.kind == "metrics":
            return b"".join(render(snapshot.families) for snapshot in self.snapshots.values())
        if query.view is not None:
            return self.views.get(query.view.part)
        return self.reports.get((query.kind, query.argument))

    async def _tell_adapters(self, identity: bytes, member: Member) -> None:
        version = next(_epochs)
        await self._send(identity, AdapterState(member.epoch, version, tuple(self.adapters.values())))

    async def _submit(self, identity: bytes, member: Member, submit: Submit) -> None:
        if self.refuse is not None and len(self.submits) >= self.refuse_after:
            kind, text, after = self.refuse
            invalid = kind == "invalid"
            refused = RequestRefused(submit.stream, "never_fits" if kind == "invalid" else kind, text, after, invalid)
            await self._send(identity, Outputs(member.epoch, refused=(refused,)))
            return
        self.submits.append(submit)
        if submit.counted_as >= 0:
            counted = member.runs.pop(submit.counted_as)
            assert not counted.submit.prompts
        run = Run(submit, streams_of(submit))
        if submit.prompts and self.replies:
            reply = self.replies.pop(0)
            for stream in run.streams:
                stream.prompt, stream.shift = reply, 0
        member.runs[submit.stream] = run
        if not submit.prompts and not self.mute:
            await self._send(identity, Outputs(member.epoch, started=(Started(submit.stream),)))

    async def _generate(self) -> None:
        while True:
            busy = False
            for identity, member in list(self.members.items()):
                runs = [run for run in member.runs.values() if run.submit.prompts and not run.finished]
                if runs and not self.silent and not self.paused:
                    busy = True
                    frame = Frame(self, member.epoch)
                    for run in runs:
                        frame.add(run)
                    await self._send(identity, frame.outputs())
            await asyncio.sleep(self.step_seconds if busy else 0.002)


def streams_of(submit: Submit) -> list[Stream]:
    """The streams of a request, where another scheduler has left them."""
    streams = []
    for index, prompt in enumerate(submit.prompts):
        tokens = unpack_int32s(prompt.tokens).tolist()
        assert tokens
        assert len(prompt.progress) in (0, submit.params.n)
        for output in range(submit.params.n):
            stream = Stream(submit.stream + index * submit.params.n + output, tokens, output, 0, False)
            if prompt.progress:
                known = unpack_int32s(prompt.progress[output].tokens).tolist()
                for token in known:  # a gateway resumes with exactly the tokens that it was sent
                    assert token == stream.token()
                    stream.position += 1
                stream.finished = prompt.progress[output].finished
                assert stream.finished or not known or len(known) < prompt.max_tokens
            streams.append(stream)
    return streams


class Frame:
    """One frame for one gateway in the making."""

    def __init__(self, scheduler: FakeScheduler, epoch: int) -> None:
        self.scheduler, self.epoch = scheduler, epoch
        self.started: list[Started] = []
        self.prompt_logprobs: list[StreamPromptLogprobs] = []
        self.streams, self.tokens = array("i"), array("i")
        self.logprobs: list[TokenLogprobs] = []
        self.finished: list[StreamFinished] = []
        self.failed: list[PromptFailed] = []

    def add(self, run: Run) -> None:
        """The next tokens of a request; all of them at once if its outputs are chosen at the end."""
        submit, scheduler = run.submit, self.scheduler
        first, run.told = not run.told, True
        for index, prompt in enumerate(submit.prompts):
            streams = run.streams[index * submit.params.n : (index + 1) * submit.params.n]
            if first and any(not stream.finished for stream in streams):
                self._start(submit, streams[0].number, streams[0].prompt)
            for stream in streams:
                for _ in range(prompt.max_tokens if submit.params.beam is not None else scheduler.tokens_per_round):
                    if stream.position == scheduler.fail_after:
                        if stream is streams[0]:
                            self.failed.append(
                                PromptFailed(stream.number, scheduler.fail_kind, "the executor caught fire")
                            )
                        stream.finished = True
                    if not stream.finished:
                        self._step(submit, stream, prompt.max_tokens)

    def _start(self, submit: Submit, number: int, prompt: list[int]) -> None:
        self.started.append(Started(number, cached_tokens=1, queue_us=1000, prefill_us=2000))
        if (wanted := submit.params.sampling.prompt_logprobs) is not None:
            entries = [logprobs_of(token, i, wanted) for i, token in enumerate(prompt) if i]
            half = len(entries) // 2  # in two chunks, of which the second begins before the end of the first
            for part in (entries[: half + 1], entries[half:]):
                self.prompt_logprobs.append(StreamPromptLogprobs(number, tuple(part)))

    def _step(self, submit: Submit, stream: Stream, max_tokens: int) -> None:
        sampling = submit.params.sampling
        if not max_tokens:
            self._finish(stream, StreamFinished(stream.number, "length"))
            return
        token = stream.token()
        if (wanted := sampling.logprobs) is not None:
            self.logprobs.append(logprobs_of(token, len(self.tokens), wanted))
        self.streams.append(stream.number)
        self.tokens.append(token)
        stream.position += 1
        if token in sampling.stop_token_ids and stream.position > sampling.min_tokens:
            self._finish(stream, StreamFinished(stream.number, "stop", token))
        elif stream.position >= max_tokens:
            self._finish(stream, StreamFinished(stream.number, "length"))

    def _finish(self, stream: Stream, ending: StreamFinished) -> None:
        stream.finished = True
        self.finished.append(ending)

    def outputs(self) -> Outputs:
        return Outputs(
            self.epoch,
            started=tuple(self.started),
            prompt_logprobs=tuple(self.prompt_logprobs),
            streams=pack_int32s(self.streams),
            tokens=pack_int32s(self.tokens),
            logprobs=tuple(self.logprobs),
            finished=tuple(self.finished),
            failed=tuple(self.failed),
        )


def logprobs_of(token: int, index: int, wanted: int) -> TokenLogprobs:
    """The token itself is always the second best."""
    tops = [(token + 1, -0.25), (token, -0.5), *((token + i, -float("inf")) for i in range(2, 20))][:wanted]
    return TokenLogprobs(index, token, -0.5, 2, pack_int32s(i for i, _ in tops), pack_float32s(p for _, p in tops))


def render(families: tuple[MetricFamily, ...]) -> bytes:
    """A gateway's metrics in Prometheus' text format."""
    lines = []
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        lines += [f"# HELP {name} {family.documentation}", f"# TYPE {name} {family.type}"]
        for sample in family.samples:
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels))
            lines.append(f"{sample.name}{{{labels}}} {sample.value}")
    return ("\n".join(lines) + "\n").encode()
