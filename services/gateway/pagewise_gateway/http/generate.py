"""Runs the generation that an HTTP request asks for."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from aiohttp import web
from pagewise_shared.protocol import Prompt, ReuseHints, Submit
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import AnswerOptions
from pagewise_gateway.http.context import CLIENT, REQUEST_ID, Service, client_request_id
from pagewise_gateway.http.explain import waited_for_client
from pagewise_gateway.http.intake import Intake
from pagewise_gateway.http.params import beam_params, check_model, retention_seconds, stop_texts
from pagewise_gateway.http.responses import PromptTokensDetails, Usage
from pagewise_gateway.http.schema import GenerationFields
from pagewise_gateway.http.tracing import RequestTrace
from pagewise_gateway.link import LiveRequest


@contextmanager
def generate(
    request: web.Request,
    body: GenerationFields,
    prompts: tuple[Prompt, ...],
    sampling: SamplingParams,
    n: int,
    intake: Intake,
    prompt_bytes: int,
    shown_tokens: frozenset[int] = frozenset(),
) -> Iterator[LiveRequest]:
    """Submit a request that has been checked. Leaving the context aborts what has not ended.

    The ``index`` of a delta is that of its choice in the response: prompt by prompt, n choices each. ``intake``: what
    is held for the request. ``prompt_bytes``: what ``AnswerSize.reserve`` returned. ``shown_tokens``: special tokens
    that are not left out of the text.
    """
    service, client, trace = request.app[Service.KEY], request[CLIENT], request.get(RequestTrace.KEY)
    submit = Submit(
        epoch=0,
        stream=0,
        request_id=request[REQUEST_ID],
        prompts=prompts,
        sampling=sampling,
        n=n,
        beam=beam_params(body, n),
        priority=body.priority or 0,
        cache_salt=client.cache_salt(body.cache_salt),
        key=client.name,
        limits=client.limits,
        client_request_id=client_request_id(request),
        reuse=ReuseHints(retention_seconds(body), service.tokenizer.tool_call_ids),
        adapter=check_model(body.model, service.limits),
        traceparent=trace.traceparent if trace is not None else "",
    )
    options = AnswerOptions(
        stop=stop_texts(body),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        shown_tokens=shown_tokens,
        wants_token_ids=bool(body.return_token_ids),
        whole=not body.stream,
        prompt_bytes=prompt_bytes,
    )
    waited_for_client(request, 0.0)  # so far
    if trace is not None:
        trace.submitted = monotonic()
    live = service.link.submit(submit, options, intake.counted, intake.answer)
    try:
        yield live
    finally:
        try:
            if trace is not None:
                trace.generated(live)
        finally:
            live.abort()


def usage(live: LiveRequest) -> Usage:
    """Return the token counts of a request so far."""
    prompt, output = sum(len(prompt.token_ids) for prompt in live.request.prompts), live.num_output_tokens
    return Usage(prompt, output, prompt + output, PromptTokensDetails(live.num_cached_tokens))
