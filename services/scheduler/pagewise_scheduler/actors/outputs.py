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

    ``streams`` and ``tokens`` are parallel and appended to directly: that is done for every token.
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

    def logprobs_of_last(self, entry: TokenLogprobs) -> None:
        """The log-probabilities of the token that was appended last."""
        self.logprobs.append(msgspec.structs.replace(entry, index=len(self.tokens) - 1))

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
