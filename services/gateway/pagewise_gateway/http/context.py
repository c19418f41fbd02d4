"""What every handler needs, kept in the application."""

from array import array
from dataclasses import dataclass
from typing import ClassVar

from aiohttp import web

from pagewise_gateway.generation import Capacity
from pagewise_gateway.http.clients import Client
from pagewise_gateway.http.errors import UnavailableError
from pagewise_gateway.http.params import Limits
from pagewise_gateway.link import SchedulerLink
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.text.tokenizer import Tokenizer

REQUEST_ID = web.RequestKey("request_id", str)
"""Our own id of a request: unique, and what the log and the answer's id say."""

CLIENT_REQUEST_ID = web.RequestKey("client_request_id", str)
"""The X-Request-Id that comes back: the client's own, if it sent one that can be sent back."""

CLIENT = web.RequestKey("client", Client)
"""Who sends the request."""

_SHORT_CHARACTERS = 2_000
"""Texts up to here are tokenized on the event loop: a round trip to a thread would take longer."""


@dataclass(slots=True, frozen=True)
class Service:
    """The HTTP surface's surroundings. ``write_timeout``: seconds a client may take to read what was written."""

    KEY: ClassVar[web.AppKey["Service"]] = web.AppKey("service")

    link: SchedulerLink
    tokenizer: Tokenizer
    metrics: Metrics
    limits: Limits
    write_timeout: float

    def require_capacity(self) -> Capacity:
        """The limits that requests are checked against.

        Raises:
            UnavailableError: no executor has joined yet.
        """
        capacity = self.link.capacity()
        if capacity is None:
            raise UnavailableError("no executor is ready yet")
        return capacity

    async def encode(self, text: str, add_special_tokens: bool) -> "array[int]":
        """Token ids (int32) of a text, off the event loop if it is long."""
        if len(text) <= _SHORT_CHARACTERS:
            return array("i", self.tokenizer.encode(text, add_special_tokens))
        ids = await self.tokenizer.off_loop(lambda: self.tokenizer.encode(text, add_special_tokens))
        return array("i", ids)

    @staticmethod
    def headers(request: web.Request) -> dict[str, str]:
        """Headers of every answer."""
        return {"X-Request-Id": request[CLIENT_REQUEST_ID]}
