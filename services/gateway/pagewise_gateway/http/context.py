"""The objects that every request handler uses, and the keys of a request."""

from dataclasses import dataclass
from typing import ClassVar

from aiohttp import web
from pagewise_shared.generation_config import GenerationConfig

from pagewise_gateway.http.conversation import ChatFormats
from pagewise_gateway.http.credentials import Client
from pagewise_gateway.http.intake import AnswerMemory, BodyMemory
from pagewise_gateway.http.loop_turns import LoopTurns
from pagewise_gateway.http.params import Limits
from pagewise_gateway.http.places import PlaceFinder
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client import SchedulerClient
from pagewise_gateway.structured.grammars import Grammars
from pagewise_gateway.text.tokenizer import Tokenizer

REQUEST_ID = web.RequestKey("request_id", str)
"""Our own id of a request. It is unique; the log and the id of the response contain it."""

CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
"""The X-Request-Id of the response: the client's own if it sent a valid one, else ours."""

MAX_CLIENT_REQUEST_ID = 128
"""The maximum number of characters of a valid X-Request-Id. An invalid id is not returned, and cannot be looked up."""

CLIENT = web.RequestKey("client", Client)
"""The client that sent the request."""

_MESSAGES = "/v1/messages"


def is_messages(request: web.Request) -> bool:
    """Return whether a request is for Anthropic's API, whose clients send keys and read errors in their own way."""
    return request.path == _MESSAGES or request.path.startswith(f"{_MESSAGES}/")


def client_request_id(request: web.Request) -> str:
    """Return the X-Request-Id that the client sent, or an empty string if it sent no valid one."""
    return "" if request[CLIENT_REQUEST_ID] == request[REQUEST_ID] else request[CLIENT_REQUEST_ID]


@dataclass(slots=True, frozen=True)
class Service:
    """The objects that request handlers use.

    Fields:
        limits: of this service, and the names of its models. formats: the options of conversations.
        write_timeout: seconds that a client may take to read data that was written.
        turns: runs work on the event loop. grammars: makes and checks grammars.
        places: finds where prompts declare that others go on differently.
        generation: values for parameters that requests do not give.
        keep_alive: seconds without an event after which a stream gets a comment; 0: no comments.
        always_usage: whether all chunks of completions and chats have token counts.
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
    turns: LoopTurns
    grammars: Grammars
    places: PlaceFinder
    generation: GenerationConfig
    keep_alive: float
    always_usage: bool

    @property
    def max_model_len(self) -> int | None:
        """The longest context of the model; None: no executor has joined yet."""
        capacity = self.scheduler_client.capacity()
        return capacity.max_model_len if capacity else None

    @staticmethod
    def headers(request: web.Request) -> dict[str, str]:
        """Return the headers of every answer."""
        headers = {"X-Request-Id": request[CLIENT_REQUEST_ID]}
        if is_messages(request):
            headers["request-id"] = request[CLIENT_REQUEST_ID]
        return headers
