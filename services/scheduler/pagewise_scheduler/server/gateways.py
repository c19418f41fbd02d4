"""Gateways: they join here, their requests enter the scheduler here, and each gets its news in one frame per round."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic as clock
from typing import NamedTuple, cast

from pagewise_shared.config import SchedulerConfig
from pagewise_shared.curve import Keys
from pagewise_shared.logs import printable
from pagewise_shared.protocol import (
    Abort,
    AbortRequest,
    AdapterAnswer,
    Advise,
    Advised,
    FinishStream,
    FleetState,
    GatewayHello,
    GatewayWelcome,
    Message,
    MetricsSnapshot,
    Query,
    QueryAnswer,
    RegisterAdapter,
    RequestRefused,
    ResetCache,
    Started,
    Submit,
    UnregisterAdapter,
)

from pagewise_scheduler.core.requests.request import Request
from pagewise_scheduler.metrics import Metrics
from pagewise_scheduler.server.adapters import AdapterRegistry
from pagewise_scheduler.server.client_request import ClientRequest, OutputBuilder
from pagewise_scheduler.server.ended_requests import EndedRequests, RequestNames
from pagewise_scheduler.server.request_limits import AdmissionError, KeyUsages
from pagewise_scheduler.server.router import Capacity, Router
from pagewise_scheduler.server.router_socket import RouterSocket
from pagewise_scheduler.server.sessions import (
    HEARTBEAT_MS,
    MAX_TEXT,
    ImpossibleError,
    Loss,
    Session,
    Sessions,
    spoken_version,
    text_error,
)
from pagewise_scheduler.server.shared_beginnings import SharedBeginnings
from pagewise_scheduler.server.submissions import (
    MAX_STREAM,
    MAX_STREAMS,
    Submission,
    check,
    end_of,
    name_of,
    num_streams,
    requests_of,
)

log = logging.getLogger(__name__)

MAX_GATEWAYS = 256
"""Gateways that may be connected at a time."""

_MOST_GONE = 32

Answer = Callable[[Query | ResetCache, Callable[[bytes | None], None]], None]
"""Calls a function, now or later, with the body of the answer to a query; None: not found."""

Follow = Callable[[Advise], Advised]
"""Gives a client's advice to the executors."""


@dataclass(slots=True, eq=False)
class Gateway:
    """The state of a gateway.

    ``outputs``: its next frame. ``submissions``: its requests that have not ended, by their first streams; ``streams``:
    the prompt of each stream. ``instance``: of its process, which identifies its metrics over several sessions.
    ``older``: it had joined a scheduler before. ``sent_adapters``: the version of the adapter registry that was sent to
    it last.
    """

    instance: str
    older: bool
    sent_adapters: int = -1
    outputs: OutputBuilder = field(default_factory=OutputBuilder)
    submissions: dict[int, Submission] = field(default_factory=dict)
    streams: dict[int, ClientRequest] = field(default_factory=dict)

    def has_free(self, streams: range) -> bool:
        """Whether all of these stream numbers are free."""
        return streams.start not in self.submissions and not any(stream in self.streams for stream in streams)


class GoneGateway(NamedTuple):
    """A gateway that left at ``time``, in seconds of ``clock``. ``requests``: its requests that were aborted then."""

    name: str
    time: float
    loss: Loss
    reason: str
    requests: int


class Gateways(Sessions[Gateway]):
    """Admits gateways, takes their requests, and sends them outputs.

    ``names``: finds the live prompts, and ``ended`` the others. ``gone``: the last gateways that left, in order. The
    requests of a lost gateway are aborted at once, which frees their blocks.
    """

    hello_type = GatewayHello
    name_field = "gateway_id"
    # Losing a gateway too early is expensive: all its requests are aborted and submitted again. Losing it late costs
    # little, because its clients wait for the gateway itself.
    least_timeout = 3.0

    def __init__(
        self,
        socket: RouterSocket,
        keys: Keys | None,
        metrics: Metrics,
        config: SchedulerConfig,
        next_epoch: Callable[[], int],
        router: Router,
        registry: AdapterRegistry,
        answer: Answer,
        follow: Follow,
        on_traced: Callable[[ClientRequest, float], None] | None = None,
    ) -> None:
        """``on_traced``: called with each ended prompt that is traced, and the time."""
        super().__init__(socket, keys, metrics, config.gateway_timeout, next_epoch)
        self._router = router
        self._answer, self._follow = answer, follow
        self._registry = registry
        self._on_traced = on_traced
        self._end_any = config.gateways_end_any_request
        self._usages = KeyUsages(metrics)
        self.names: RequestNames[Request] = RequestNames()
        self._sent_capacity, self._beginnings = Capacity(), SharedBeginnings()
        self._problems: tuple[str, ...] = ()
        self.gone: deque[GoneGateway] = deque(maxlen=_MOST_GONE)
        self.ended = EndedRequests()

    def flush(self) -> None:
        """Send every gateway its news: a changed capacity, changed adapters, and its outputs in one frame."""
        changed, self._sent_capacity = self._sent_capacity != self._router.capacity, self._router.capacity
        for session in self:
            if changed:
                self.send(session, self._fleet_state(session))
            self._send_adapters(session)
            if (outputs := session.peer.outputs.take(session.epoch)) is not None:
                self.send(session, outputs)

    def send_problems(self, problems: tuple[str, ...]) -> None:
        """Send all gateways a sentence for each service of this server that keeps failing."""
        self._problems = problems
        for session in self:
            self.send(session, self._fleet_state(session))

    # ---- joining and leaving -------------------------------------------------------------------------

    def _admit(self, identity: bytes, key: str, hello: Message, now: float) -> None:
        hello = cast(GatewayHello, hello)
        others = self.others(identity)
        refusal = text_error(hello, ("gateway_id", "model_name", "instance"), MAX_TEXT) or self.guard.refusal(
            hello.gateway_id, key, [(other.name, other.key) for other in others]
        )
        if refusal is None and hello.model_name != (own := self.metrics.model_name):
            refusal = f"it serves the model {hello.model_name!r}, and the scheduler was started for {own!r}"
        if refusal is None and len(others) >= MAX_GATEWAYS:
            refusal = f"there are {MAX_GATEWAYS} gateways already"
        if refusal is not None:
            self.refuse(identity, hello.gateway_id, refusal)
            return
        gateway = Gateway(hello.instance, hello.rejoins > 0)
        session = Session(identity, key, hello.gateway_id, gateway, self._next_epoch(), now, self.new_detector(now))
        self.enter(session)
        self.metrics.gateways_ready.set(len(self))
        log.info("gateway %s joined%s", hello.gateway_id, spoken_version(hello))
        self._router.expect(hello.ready_executors)
        self._registry.adopt(hello.adapters_version, hello.adapters)
        self.send(session, GatewayWelcome(session.epoch, HEARTBEAT_MS))
        self.send(session, self._fleet_state(session))
        self._send_adapters(session)

    def _fleet_state(self, session: Session[Gateway]) -> FleetState:
        capacity = self._router.capacity
        return FleetState(session.epoch, *capacity[:4], self._problems, capacity.snapshots)

    def _lost(self, session: Session[Gateway], reason: str, loss: Loss) -> None:
        gateway = session.peer
        level = logging.INFO if loss.expected else logging.WARNING
        log.log(level, "gateway %s is gone: %s; %d requests end", session.name, reason, len(gateway.submissions))
        self.metrics.gateways_ready.set(len(self))
        self.metrics.gateways.gone(session.identity)
        self.gone.append(GoneGateway(session.name, clock(), loss, reason, len(gateway.submissions)))
        for submission in list(gateway.submissions.values()):
            self._abort(gateway, submission)

    # ---- messages ------------------------------------------------------------------------------------

    def _apply(self, session: Session[Gateway], message: Message) -> None:
        gateway = session.peer
        match message:
            case Submit():
                self._submit(session, message)
            case Abort(stream=stream):
                if (submission := gateway.submissions.get(stream)) is not None:
                    self._abort(gateway, submission)
            case FinishStream(stream=stream):
                if (live := gateway.streams.get(stream)) is not None:
                    self._router.finish(live, stream - live.stream)
            case RegisterAdapter():
                self._registry.register(message, lambda answer: self._send_late(session, answer))
            case UnregisterAdapter():
                self._registry.unregister(message, lambda answer: self._send_late(session, answer))
            case Query() | ResetCache():
                number = message.number
                self._answer(
                    message, lambda body: self._send_late(session, QueryAnswer(number, body is not None, body or b""))
                )
            case Advise():
                self.send(session, self._follow(message))
            case AbortRequest(number=number, request_id=name):
                self.send(session, QueryAnswer(number, self._abort_by_name(name, session)))
            case MetricsSnapshot(families=families):
                if not self.metrics.gateways.take(session.identity, gateway.instance, families, older=gateway.older):
                    # Losing the gateway would abort all its requests: drop the snapshot only.
                    self.metrics.frames_dropped("impossible").inc()
                    self._complaints.warning("gateway %s sends invalid metrics", session.name)

    def _send_adapters(self, session: Session[Gateway]) -> None:
        if session.peer.sent_adapters < self._registry.version:
            session.peer.sent_adapters = self._registry.version
            self.send(session, self._registry.state(session.epoch))

    def _send_late(self, session: Session[Gateway], answer: AdapterAnswer | QueryAnswer) -> None:
        if session not in list(self):
            return  # it has left or has joined again, and has answered its client with an error
        self._send_adapters(session)  # before the answer, so that its client can use the adapter at once
        self.send(session, answer)

    def _submit(self, session: Session[Gateway], submit: Submit) -> None:
        gateway = session.peer
        count = num_streams(submit)
        streams = range(submit.stream, submit.stream + min(count, MAX_STREAMS))
        if not (0 <= submit.stream <= MAX_STREAM - len(streams)) or not gateway.has_free(streams):
            self.drop(session.identity, "impossible", f"a request with {count} streams from {submit.stream} on")
            return
        try:
            check(submit, self._router.capacity.vocab_size)
            adapter = submit.params.adapter
            if adapter is not None and (refusal := self._registry.refusal(adapter)) is not None:
                raise ImpossibleError(f"an adapter that is not allowed: {refusal}")
            submission = self._admitted(session, submit)
        except ImpossibleError as error:
            self.metrics.frames_dropped("impossible").inc()
            self._complaints.warning("gateway %s asks for %s", session.name, printable(str(error)))
            refused = RequestRefused(submit.stream, "never_fits", f"the request asks for {error}", invalid=True)
            self._refuse(gateway, submit, refused)
        except AdmissionError as error:
            invalid = error.kind == "invalid"
            kind = "never_fits" if error.kind == "invalid" else error.kind
            self._refuse(gateway, submit, RequestRefused(submit.stream, kind, str(error), error.retry_after, invalid))
        else:
            self._begin(gateway, submission, submit)

    def _refuse(self, gateway: Gateway, submit: Submit, refused: RequestRefused) -> None:
        gateway.outputs.refused.append(refused)
        # The request without prompts that this one should have replaced ends too: its gateway does not abort it.
        counted = gateway.submissions.get(submit.counted_as)
        if counted is not None and not counted.prompts and counted.usage.name == submit.params.key:
            self._end(gateway, counted)

    def _admitted(self, session: Session[Gateway], submit: Submit) -> Submission:
        """Count a request, and create the core's requests for its prompts.

        Raises:
            AdmissionError: it is refused.
            ImpossibleError: a value is out of bounds, or ``counted_as`` names no such request.
        """
        # The order matters: nothing is counted before all prompts are known to be valid, and the limits of the key come
        # before the queues. ``cancel`` takes the count back if the queues are full.
        now, resumed, gateway = clock(), submit.resumed, session.peer
        usage = self._usages.of(submit.params.key, submit.limits, now)
        stream = submit.stream
        prompts = requests_of(
            submit,
            self._unique(submit),
            now,
            self._router.capacity.vocab_size,
            outputs=gateway.outputs,
            on_end=lambda live: self._prompt_ended(gateway, stream, live),
        )
        self._router.set_budgets(session.name, submit.params.cache_salt, submit.memory, self.joined)
        if submit.params.reuse.cache_key and self._router.capacity.snapshots:
            self._beginnings.declare(prompts)
        submission = Submission(stream, usage, now, prompts)
        if submit.counted_as >= 0:
            counted = gateway.submissions.get(submit.counted_as)
            if counted is None or counted.prompts or counted.usage is not usage or not submit.prompts:
                raise ImpossibleError(f"a request that is counted as stream {submit.counted_as}, which does not count")
            # Earlier requests may have used up the tokens since this one was counted.
            usage.check_tokens(now)
            del gateway.submissions[submit.counted_as]
            submission.began = counted.began
        elif resumed:
            usage.resume()
        else:
            usage.begin(now)
        if submission.prompts:
            try:
                self._router.admit(submission.prompts, resumed=resumed)
            except AdmissionError:
                usage.cancel(charged=submit.counted_as >= 0)
                raise
        return submission

    def _unique(self, submit: Submit) -> str:
        """Return a request id that no live request has: gateways do not know each other's ids."""
        name, number = submit.request_id, 1
        while any(name_of(name, index) in self.names for index in range(len(submit.prompts))):
            number += 1
            name = f"{submit.request_id}~{number}"
        return name

    def _begin(self, gateway: Gateway, submission: Submission, submit: Submit) -> None:
        now = clock()
        gateway.submissions[submission.stream] = submission
        if not submission.prompts:
            gateway.outputs.started.append(Started(submission.stream))
            return
        if not submit.resumed:
            submission.usage.use("prompt", sum(len(live.prompt_token_ids) for live in submission.prompts))
        submission.running = len(submission.prompts)
        for live in submission.prompts:
            live.timeline.resumed = now if submit.resumed else None
            self.names.add(live, submit.params.client_request_id, submit.params.key, live.arrival_time)
            gateway.streams.update(dict.fromkeys(range(live.stream, live.stream + submit.params.n), live))
        for live in list(submission.prompts):
            self._finish_complete(live, now)
        self._router.place([live for live in submission.prompts if not live.done])

    def _finish_complete(self, live: ClientRequest, now: float) -> None:
        """Finish the outputs of a resumed request that are already complete."""
        for sequence in live.sequences:
            if not sequence.finished and (end := end_of(sequence)) is not None:
                sequence.end(*end)
                live.take_finish(sequence, now)
        if live.unfinished <= 0:
            live.end(now)

    # ---- ending --------------------------------------------------------------------------------------

    def _abort_by_name(self, name: str, asker: Session[Gateway]) -> bool:
        """Abort the newest request of this id, ours or its client's, for an operator; return whether there was one.

        Without ``--gateways-end-any-request``, only requests of the gateway that asks are aborted.
        """
        gateways = list(self) if self._end_any else [asker]
        lives = [live for each in gateways for one in each.peer.submissions.values() for live in one.prompts]
        called = [one for one in lives if not one.done and name in (one.request_id, one.params.client_request_id)]
        found = min(called, key=lambda one: (one.request_id != name, -one.arrival_time), default=None) if name else None
        if found is not None:
            found.report_abort(clock())
            self._router.abort(found)
        return found is not None

    def _abort(self, gateway: Gateway, submission: Submission) -> None:
        if not submission.prompts:
            self._end(gateway, submission)
        for live in list(submission.prompts):
            self._router.abort(live)

    def _prompt_ended(self, gateway: Gateway, stream: int, live: ClientRequest) -> None:
        submission = gateway.submissions[stream]
        if live.traceparent and self._on_traced is not None:
            self._on_traced(live, clock())
        self.names.remove(live)
        self.ended.ended(live)
        for each in range(live.stream, live.stream + live.params.n):
            gateway.streams.pop(each, None)
        submission.running -= 1
        if not submission.running:
            self._end(gateway, submission)

    def _end(self, gateway: Gateway, submission: Submission) -> None:
        if gateway.submissions.pop(submission.stream, None) is not None:
            if submission.prompts:
                tokens = sum(live.num_generated_tokens for live in submission.prompts)
                submission.usage.use("generation", tokens)
                submission.prompts.clear()  # breaks their cycle, so that no garbage is left
            submission.usage.end(clock() - submission.began)
