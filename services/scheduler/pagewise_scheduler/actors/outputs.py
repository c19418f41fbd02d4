"""What is new for one gateway, collected until a round ends and sent as one frame."""

from array import array

import msgspec
from pagewise_shared.protocol import (
    Outputs,
    PromptFailed,
    RequestRefused,
    Started,
    StreamFinished,
    StreamPromptLogprobs,
    TokenLogprobs,
)


class OutputBuilder:
    """Collects the fields of the next ``Outputs`` frame of one gateway.

    ``streams`` and ``tokens`` are parallel, and sequences that take tokens append to them: it is their ``TokenSink``.
    """

    __slots__ = ("failed", "finished", "logprobs", "prompt_logprobs", "refused", "started", "streams", "tokens")

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.refused: list[RequestRefused] = []
        self.started: list[Started] = []
        self.prompt_logprobs: list[StreamPromptLogprobs] = []
        self.finished: list[StreamFinished] = []
        self.failed: list[PromptFailed] = []

    def tell_logprobs(self, of_streams: dict[int, TokenLogprobs]) -> None:
        """The log-probabilities of the newest token of each of these streams."""
        found = []
        for index in range(len(self.streams) - 1, -1, -1):
            if (entry := of_streams.pop(self.streams[index], None)) is not None:
                found.append(msgspec.structs.replace(entry, index=index))
                if not of_streams:
                    break
        self.logprobs += reversed(found)

    def take(self, epoch: int) -> Outputs | None:
        """The frame with everything that was collected, None if there is nothing; empties the builder."""
        if not (self.streams or self.finished or self.started or self.refused or self.failed or self.prompt_logprobs):
            return None
        outputs = Outputs(
            epoch,
            tuple(self.refused),
            tuple(self.started),
            tuple(self.prompt_logprobs),
            array("i", self.streams).tobytes(),
            array("i", self.tokens).tobytes(),
            tuple(self.logprobs),
            tuple(self.finished),
            tuple(self.failed),
        )
        for collected in (self.streams, self.tokens):
            collected.clear()
        for pieces in (
            self.logprobs, self.refused, self.started, self.prompt_logprobs, self.finished, self.failed,
        ):  # fmt: skip
            pieces.clear()
        return outputs
