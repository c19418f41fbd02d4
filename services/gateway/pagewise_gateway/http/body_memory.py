"""Bounds the memory that the bodies of requests take before the requests run."""

from pagewise_gateway.http.memory_budget import SHARE, MemoryBudget
from pagewise_gateway.metrics import Metrics


class BodyMemory(MemoryBudget):
    """Counts the bytes of all bodies that this gateway is reading, parsing or tokenizing.

    Fields:
        largest: the most bytes of one body.
    """

    def __init__(self, total: int, largest_body: int, metrics: Metrics) -> None:
        super().__init__(
            total,
            max(total // SHARE, largest_body),
            what="the bodies",
            option="--max-body-memory",
            refused=lambda of_key: metrics.requests_refused("key_body_memory" if of_key else "body_memory").inc(),
        )
        self.largest = largest_body
        metrics.http_body_bytes.set_function(lambda: self.used)
