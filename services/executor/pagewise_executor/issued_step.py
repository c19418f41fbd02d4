"""A step that has been issued, and its result once the device has finished it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat

import numpy as np
import torch
from pagewise_shared.protocol import PromptLogprobs, RowFailure, StepPlan, StepResult

from pagewise_executor.sampling.logprobs import LogprobsTensors
from pagewise_executor.step_work import Int32s, SequenceState


def record_event(device: torch.device) -> "torch.cuda.Event | None":
    """Record a CUDA event; None on the CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


@dataclass(slots=True)
class IssuedStep:
    """A step that may still be running on the device.

    ``tokens``: int64 [n], on the device, of the sequences ``rows`` [n]. On CUDA, ``events`` mark the beginning and the
    end of the step on the device; on the CPU the step is over, and took ``seconds``. ``failures``: sequences that
    cannot go on. ``kept`` [n]: whether the sequence keeps the token; None: the step has no drafts, and all are kept.
    ``proposed``: the drafts behind the step, as ``Proposer.propose`` returns them; ``asked``: how many tokens of each.
    """

    plan: StepPlan
    tokens: torch.Tensor
    rows: list[SequenceState]
    logprobs: LogprobsTensors | None
    prompt_logprobs: list[tuple[int, LogprobsTensors]]
    seconds: float
    events: "tuple[torch.cuda.Event, torch.cuda.Event] | None"
    failures: list[RowFailure] = field(default_factory=list)
    kept: list[bool] | None = None
    proposed: torch.Tensor | None = None
    asked: Sequence[int] = ()

    @property
    def ready(self) -> bool:
        """Whether the device has finished the step."""
        return self.events is None or bool(self.events[1].query())  # type: ignore[no-untyped-call]

    def result(self) -> StepResult:
        """Return the step's result; this waits for the device."""
        seconds = self.seconds
        if self.events is not None:
            began, done = self.events
            done.synchronize()
            seconds = began.elapsed_time(done) * 1e-3
        tokens = self.tokens.numpy().astype(np.int32)
        for row, token in compress(zip(self.rows, tokens.tolist(), strict=True), self.kept or repeat(True)):
            row.sampled.append(token)
        return StepResult(
            epoch=self.plan.epoch,
            step=self.plan.step,
            tokens=tokens.tobytes(),
            logprobs=self.logprobs.report() if self.logprobs is not None else (),
            prompt_logprobs=tuple(PromptLogprobs(row, wanted.report()) for row, wanted in self.prompt_logprobs),
            elapsed_us=int(seconds * 1e6),
            failures=tuple(self.failures),
            proposed=b"" if self.proposed is None else self._drafts(self.proposed).tobytes(),
        )

    def _drafts(self, proposed: torch.Tensor) -> Int32s:
        wanted = np.arange(proposed.shape[1]) < np.array(self.asked)[:, None]
        return proposed.numpy()[wanted].astype(np.int32)
