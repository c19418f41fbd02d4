"""Builds the message that submits a request, for the first time or again."""

from pagewise_shared.protocol import PromptToGenerate, ReuseHints, StreamProgress, Submit

from pagewise_gateway.link.live_request import LiveRequest
from pagewise_gateway.link.output import LivePrompt

_NO_PROGRESS = StreamProgress(b"", False)


def submission(live: LiveRequest, epoch: int, now: float, tool_call_ids: tuple[int, ...] = ()) -> Submit:
    """Return the message that submits a request under its stream numbers, with the tokens that its outputs have.

    ``now``: seconds of the monotonic clock. ``tool_call_ids``: tokens with which the model calls a tool.
    """
    request = live.request
    assert live.stream is not None
    again = live.resumed
    return Submit(
        epoch=epoch,
        stream=live.stream,
        request_id=request.request_id,
        prompts=tuple(_prompt(live, prompt, again) for prompt in live.prompts),
        sampling=request.sampling,
        n=request.n,
        beam=request.beam,
        priority=request.priority,
        cache_salt=request.cache_salt,
        key=request.key,
        limits=request.limits,
        age_us=max(0, int((now - request.arrival_time) * 1e6)),
        resumed=again,
        counted_as=-1 if live.counted_as is None or live.counted_as.stream is None else live.counted_as.stream,
        client_request_id=request.client_request_id,
        reuse=ReuseHints(request.retention, tool_call_ids),
        adapter=request.adapter,
        traceparent=request.traceparent,
    )


def _prompt(live: LiveRequest, prompt: LivePrompt, again: bool) -> PromptToGenerate:
    """When a request is submitted again, outputs without tokens have an entry too: it was accepted once."""
    indices = range(prompt.index, prompt.index + live.request.n) if again else ()
    outputs = (live.outputs.get(index) for index in indices)
    progress = tuple(_NO_PROGRESS if output is None else output.progress() for output in outputs)
    return PromptToGenerate(prompt.given.tokens.tobytes(), prompt.given.max_tokens, progress, prompt.given.segments)
