"""What every request handler needs; it is kept in the application."""

from dataclasses import dataclass
from typing import ClassVar

from aiohttp import web

from pagewise_gateway.http.clients import Client
from pagewise_gateway.http.conversation import ChatFormats
from pagewise_gateway.http.intake import Answering, AnswerMemory, BodyMemory
from pagewise_gateway.http.loop_turns import LoopTurns
from pagewise_gateway.http.params import Limits
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_gateway.structured.grammars import Grammars
from pagewise_gateway.text.tokenizer import Tokenizer

REQUEST_ID = web.RequestKey("request_id", str)
"""Our own id of a request. It is unique; the log and the id of the response contain it."""

CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
"""The X-Request-Id of the response: the client's own if it sent a valid one, else ours."""

MAX_CLIENT_REQUEST_ID = 128
"""Characters of a valid X-Request-Id. Another one is not returned, and nothing is found by it."""

CLIENT = web.RequestKey("client", Client)
"""The client that sent the request."""

_MESSAGES = "/v1/messages"


def is_messages(request: web.Request) -> bool:
    """Whether a request is for Anthropic's API: its clients send keys and read errors in their own way."""
    return request.path == _MESSAGES or request.path.startswith(f"{_MESSAGES}/")


def client_request_id(request: web.Request) -> str:
    """Return the X-Request-Id that the client sent, or an empty string if it sent no valid one."""
    return "" if request[CLIENT_REQUEST_ID] == request[REQUEST_ID] else request[CLIENT_REQUEST_ID]


@dataclass(slots=True, frozen=True)
class Service:
    """What request handlers use.

    ``write_timeout``: seconds that a client may take to read what was written. ``answering``: counts requests of keys
    with limits until their answers are written. ``turns``: runs work on the event loop. ``formats``: what the options
    say of conversations. ``grammars``: makes and checks grammars.
    """

    KEY: ClassVar[web.AppKey["Service"]] = web.AppKey("service")

    scheduler_client: SchedulerClient
    tokenizer: Tokenizer
    metrics: Metrics
    limits: Limits
    formats: ChatFormats
    write_timeout: float
    body_memory: BodyMemory
    answer_memory: AnswerMemory
    answering: Answering
    turns: LoopTurns
    grammars: Grammars

    @staticmethod
    def headers(request: web.Request) -> dict[str, str]:
        """Headers of every answer."""
        headers = {"X-Request-Id": request[CLIENT_REQUEST_ID]}
        if is_messages(request):
            headers["request-id"] = request[CLIENT_REQUEST_ID]
        return headers
