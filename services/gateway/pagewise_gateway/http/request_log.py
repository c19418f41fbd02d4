"""``--log-requests``: one line for each request when it ends, with nothing of its text.

Unless they are plain words, values are written as JSON strings and are bounded, because some of them come from clients:
none can end the line or pass for another field.
"""

import json
import logging
import re
from dataclasses import dataclass
from time import monotonic

from aiohttp import web
from aiohttp.typedefs import Handler
from pagewise_shared.logs import printable

from pagewise_gateway.http.context import CLIENT, CLIENT_REQUEST_ID, REQUEST_ID
from pagewise_gateway.http.tracing import about_request
from pagewise_gateway.scheduler_client import LiveRequest, SchedulerClient

log = logging.getLogger(__name__)

_UNLOGGED = frozenset({"/health", "/version", "/metrics"})
"""Probes ask for them every few seconds."""
_CLIENT_IS_GONE = 499
_PLAIN = re.compile(r"[A-Za-z0-9._:/{},+-]+")


@dataclass(slots=True, frozen=True)
class _Generated:
    """What is known of a generation when it ends.

    ``queue``, ``first_token``: seconds, of the prompt for which it took the shortest time; None if it did not happen.
    """

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue: float | None
    first_token: float | None
    finish: str


class RequestLog:
    """Collects what the link tells of generations, and logs it with the requests that they belong to."""

    def __init__(self, scheduler_client: SchedulerClient) -> None:
        self._generated: dict[str, _Generated] = {}
        scheduler_client.on_end = self._ended

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Log the request when it has been answered, or its client is gone. Only the middleware that traces it
        may be outside of this one."""
        began, status = monotonic(), _CLIENT_IS_GONE
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            generated = self._generated.pop(request.get(REQUEST_ID, ""), None)
            resource = request.match_info.route.resource
            path = request.path if resource is None else resource.canonical
            if path not in _UNLOGGED:
                self._log(request, path, status, monotonic() - began, generated)

    def _log(self, request: web.Request, path: str, status: int, duration: float, generated: _Generated | None) -> None:
        ours, sent = request.get(REQUEST_ID, ""), request.get(CLIENT_REQUEST_ID, "")
        client = request.get(CLIENT)
        fields: dict[str, object] = {
            "id": ours,
            "client_id": sent if sent != ours else None,
            "key": client.name if client is not None and client.name else None,
            "endpoint": f"{request.method} {path}",
            "status": status,
        }
        if generated is not None:
            fields |= {
                "prompt_tokens": generated.prompt_tokens,
                "cached_tokens": generated.cached_tokens,
                "output_tokens": generated.output_tokens,
                "queue": generated.queue,
                "first_token": generated.first_token,
                "finish": generated.finish,
            }
        fields["duration"] = duration
        text = " ".join(f"{name}={_text(value)}" for name, value in fields.items())
        del fields["id"]  # it is the line's request_id
        log.info("request %s", text, extra=about_request(request, message="request ended", **fields))

    def _ended(self, live: LiveRequest) -> None:
        """Remember what is known of a generation now, because afterwards its parts are let go."""
        if not live.prompts:  # it only counted against the limits of its key
            return
        arrival = live.arrival_time
        queues = [prompt.queue_seconds for prompt in live.prompts if prompt.queue_seconds is not None]
        firsts = [prompt.first_token_time for prompt in live.prompts if prompt.first_token_time is not None]
        self._generated[live.request.request_id] = _Generated(
            prompt_tokens=sum(len(prompt.token_ids) for prompt in live.request.prompts),
            cached_tokens=live.num_cached_tokens,
            output_tokens=live.num_output_tokens,
            queue=min(queues, default=None),
            first_token=min(firsts) - arrival if firsts else None,
            finish=",".join(sorted(set(live.finish_reasons()))),
        )


def _text(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = printable(str(value), 200)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
