"""What is held for a request from its head on until it runs: its count at its API key, and memory for its body."""

from time import monotonic

from aiohttp import web
from pagewise_shared.sampling import SamplingParams

from pagewise_gateway.generation import GenerationRequest
from pagewise_gateway.http.body_memory import BodyMemory, Reservation
from pagewise_gateway.http.clients import Client
from pagewise_gateway.link import LiveRequest, SchedulerLink


class Intake:
    """One request whose body is being read, parsed and tokenized.

    A request counts against the limits of its API key before its body is read. Otherwise a key could have any number of
    bodies read and parsed at a time, and those that are refused would cost it nothing.

    Fields:
        memory: what is taken for its body. counted: what it is counted as; None: its key has no limits.
    """

    KEY: web.RequestKey["Intake"]

    def __init__(self, client: Client, request_id: str, memory: BodyMemory) -> None:
        self.memory = Reservation(memory, client.name)
        self.counted: LiveRequest | None = None
        self.arrival_time = monotonic()
        self._client, self._request_id = client, request_id

    async def count(self, link: SchedulerLink) -> None:
        """Count it against the limits of its key, if that has any. The scheduler does so, over all gateways.

        Raises:
            GenerationError: the key is over one of its limits.
        """
        client = self._client
        if not client.limited:
            return
        self.counted = link.submit(
            GenerationRequest(
                self._request_id,
                (),
                SamplingParams(),
                arrival_time=self.arrival_time,
                key=client.name,
                limits=client.limits,
            )
        )
        await self.counted.next()

    def close(self) -> None:
        """The request runs or has ended. What it was counted as ends, unless the request has taken its place."""
        self.memory.release()
        if self.counted is not None:
            self.counted.abort()


Intake.KEY = web.RequestKey("intake", Intake)
