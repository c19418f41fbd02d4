"""Why a request or a message is not taken."""

from typing import Literal

from pagewise_shared.errors import ProtocolError


class AdmissionError(Exception):
    """A request cannot be taken; ``kind`` says what kind of answer it deserves.

    Kinds: "never_fits" (it is longer than any executor could hold: 400), "invalid" (it can never run, for another
    reason: 400), "overloaded" (a queue or a limit is full: 429), "unavailable" (there is no executor: 503).
    ``reason``: a word for metrics. ``retry_after``: seconds after which there should be room; 0: nothing is known.
    """

    def __init__(
        self,
        kind: Literal["never_fits", "invalid", "overloaded", "unavailable"],
        message: str,
        reason: str = "",
        retry_after: int = 0,
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.reason = reason
        self.retry_after = retry_after


class ImpossibleError(ProtocolError):
    """A message says what cannot be; the text says what."""
