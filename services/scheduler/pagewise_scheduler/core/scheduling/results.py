"""What sequences make of the tokens that a step has drawn for them."""

from collections.abc import Callable

from pagewise_scheduler.core.scheduling.request import FinishReason, Request, Sequence, SequenceStatus
from pagewise_scheduler.core.scheduling.step import StepInFlight, StepOutput

Finish = Callable[[Sequence, FinishReason, str | int | None], None]


def take_tokens(step: StepInFlight, tokens: list[int], output: StepOutput, finish: Finish) -> list[Request]:
    """Append each token to its sequence, and ``finish`` those that stop or reach their length.

    Returns the requests whose samples have all ended, to choose from: of those nothing is told yet.
    """
    finished = SequenceStatus.FINISHED
    taken, kept = output.sequences, output.tokens
    chosen: list[Request] = []
    for sequence, token in zip(step.sampled, tokens, strict=True):
        request = sequence.request
        if sequence.status is finished or request.beam is not None:
            continue
        output_ids = sequence.output_token_ids
        if request.max_tokens:
            output_ids.append(token)
            if not request.best_of:
                taken.append(sequence)
                kept.append(token)
        if request.max_tokens and token in sequence.stop_ids and len(output_ids) > sequence.sampling.min_tokens:
            finish(sequence, "stop", token)
        elif len(output_ids) >= request.max_tokens:
            finish(sequence, "length", None)
        else:
            continue
        if not request.best_of:
            output.finished.append(sequence)
        elif request.finished:
            chosen.append(request)
    return chosen
