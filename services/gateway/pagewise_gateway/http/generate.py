"""Runs the generation that an HTTP request asks for: submits it, reads its deltas, aborts it."""

from collections.abc import Callable, Sequence
from time import monotonic

from aiohttp import web
from pagewise_shared.protocol import TokenLogprobs
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import GenerationRequest, Prompt, SequenceDelta
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, client_request_id
from pagewise_gateway.http.params import beam_params, stop_texts
from pagewise_gateway.http.responses import PromptTokensDetails, Usage
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.link import LiveRequest, SchedulerLink


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
        counted: LiveRequest | None = None,
    ) -> None:
        """``counted``: what the request is counted as already, if its API key has limits."""
        self.n = n
        client = request[CLIENT]
        self._link = link
        self._counted = counted
        self._request = GenerationRequest(
            request_id=request[REQUEST_ID],
            client_request_id=client_request_id(request),
            prompts=tuple(prompts),
            sampling=sampling,
            n=n,
            stop=stop_texts(body),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            wants_token_ids=bool(body.return_token_ids),
            whole=not body.stream,
            priority=body.priority or 0,
            cache_salt=client.cache_salt(body.cache_salt),
            beam=beam_params(body, n),
            best_of=body.best_of if body.best_of is not None and body.best_of > n else 0,
            arrival_time=monotonic(),
            key=client.name,
            limits=client.limits,
        )
        self._live: LiveRequest

    def __enter__(self) -> "Generation":
        self._live = self._link.submit(self._request, self._counted)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.abort()

    async def news(self) -> list[SequenceDelta]:
        """Wait for new deltas, at most one for each choice. Returns an empty list once all choices have ended.

        Raises:
            GenerationError: the request was not accepted, or failed.
        """
        return await self._live.next()

    def follow(self, ready: Callable[[], bool], tell: Callable[[list[SequenceDelta]], None]) -> None:
        """From now on, call ``tell`` with deltas as they arrive, whenever ``ready`` returns true.

        This does not wake a task for every token, which would take as long as all other work on it. Deltas that arrive
        while ``ready`` returns false, and the last ones, come from ``news``.
        """

        def follower() -> bool:
            if not ready():
                return False
            tell(self._live.take_news())
            return True

        self._live.follow(follower)

    async def outputs(self) -> list[SequenceDelta]:
        """Wait until all choices have ended. Returns one delta for each, in order.

        Raises:
            GenerationError: the request was not accepted, or failed.
        """
        deltas = await self._live.next()  # all of them: the request is ``whole``
        await self._live.next()
        return sorted(deltas, key=lambda delta: delta.index)

    def prompt_logprobs(self, index: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of a choice's prompt, if requested. They are complete before its first delta."""
        return self._live.outputs[index].prompt.logprobs

    def usage(self) -> Usage:
        """Return the token counts so far."""
        live = self._live
        prompt = sum(len(one.tokens) for one in self._request.prompts)
        output = live.num_output_tokens
        return Usage(prompt, output, prompt + output, PromptTokensDetails(live.num_cached_tokens))
