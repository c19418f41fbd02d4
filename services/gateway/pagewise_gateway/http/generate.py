"""Runs the generation that an HTTP request asks for: submits it, reads its deltas, aborts it."""

from collections.abc import Callable, Iterator, Sequence
from time import monotonic

from aiohttp import web
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import GenerationRequest, PackedLogprobs, Prompt, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service, client_request_id
from pagewise_gateway.http.explain import waited_for_client
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.params import beam_params, check_model, retention_seconds, stop_texts
from pagewise_gateway.http.responses import PromptTokensDetails, Usage
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.http.tracing import RequestTrace
from pagewise_gateway.link import LiveRequest, SchedulerLink

_FEW = 32
"""Events of up to so many tokens are made as the tokens arrive, even if they carry more than text."""


class Generation:
    """The generation of one HTTP request. Entering the context submits it; leaving aborts what has not ended.

    The ``index`` of a delta is that of its choice in the response: prompt by prompt, n choices each.
    """

    def __init__(
        self,
        link: SchedulerLink,
        body: GenerationFields,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        n: int,
        request: web.Request,
        intake: Intake,
        prompt_bytes: int,
        shown_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """``intake``: what is held for the request. ``prompt_bytes``: what ``AnswerSize.reserve`` returned.
        ``shown_tokens``: special tokens that are not left out of the text."""
        self.n = n
        client, self._trace = request[CLIENT], request.get(RequestTrace.KEY)
        self._link = link
        self._intake = intake
        self._num_prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        self._request = GenerationRequest(
            request_id=request[REQUEST_ID],
            client_request_id=client_request_id(request),
            prompts=tuple(prompts),
            sampling=sampling,
            n=n,
            stop=stop_texts(body),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            shown_tokens=shown_tokens,
            wants_token_ids=bool(body.return_token_ids),
            whole=not body.stream,
            priority=body.priority or 0,
            cache_salt=client.cache_salt(body.cache_salt),
            beam=beam_params(body, n),
            arrival_time=monotonic(),
            key=client.name,
            limits=client.limits,
            prompt_bytes=prompt_bytes,
            retention=retention_seconds(body),
            adapter=check_model(body.model, request.app[Service.KEY].limits),
            traceparent=self._trace.traceparent if self._trace is not None else "",
        )
        self._live: LiveRequest
        waited_for_client(request, 0.0)  # so far

    def __enter__(self) -> "Generation":
        if self._trace is not None:
            self._trace.submitted = monotonic()
        self._live = self._link.submit(self._request, self._intake.counted, self._intake.answer)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._trace is not None:
                self._trace.generated(self._live)
        finally:
            self._live.abort()

    async def news(self) -> list[SequenceDelta]:
        """Wait for new deltas, at most one for each choice. Returns an empty list once all choices have ended.

        Raises:
            GenerationError: the request was not accepted, or failed.
        """
        return await self._live.next()

    def follow(self, ready: Callable[[], bool], tell: Callable[[list[SequenceDelta]], None]) -> None:
        """Until ``news`` returns, call ``tell`` with deltas as they arrive, whenever ``ready`` returns true.

        This does not wake a task for every token, which would take as long as all other work on it. Deltas that arrive
        while ``ready`` returns false, and the last ones, come from ``news``.
        """

        def follower() -> bool:
            if not ready():
                return False
            tell(self._live.take_news())
            return True

        self._live.follow(follower)

    async def outcome(self) -> Iterator[SequenceDelta]:
        """Wait until all choices have ended. Returns one delta for each, in order, which is made when it is taken.

        Raises:
            GenerationError: the request was not accepted, or failed.
            OverloadedError: its answer takes more memory than there is.
        """
        return await self._live.outcome()

    @property
    def few_unread(self) -> bool:
        """Whether so few tokens have arrived that ``news`` has not returned that their events may be made at once."""
        return self._live.num_unread <= _FEW

    def prompt_logprobs(self, index: int) -> PackedLogprobs:
        """Return the log-probabilities of a choice's prompt, if requested. They are complete before its first delta."""
        return self._live.prompts[index // self._live.request.n].logprobs

    def usage(self) -> Usage:
        """Return the token counts so far."""
        live, prompt = self._live, self._num_prompt_tokens
        output = live.num_output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(live.num_cached_tokens))
