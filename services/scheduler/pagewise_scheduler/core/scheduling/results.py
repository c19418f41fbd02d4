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
    tell_sequence, tell_token = output.sequences.append, output.tokens.append
    chosen: list[Request] = []
    for sequence, token in zip(step.sampled, tokens, strict=True):
        if sequence.status is finished:
            continue
        ids = sequence.output_token_ids
        if sequence.plain:
            ids.append(token)
            tell_sequence(sequence)
            tell_token(token)
        elif sequence.request.beam is not None:
            continue
        elif sequence.request.max_tokens:
            ids.append(token)
        if token in sequence.stop_ids and len(ids) > sequence.sampling.min_tokens and ids:
            finish(sequence, "stop", token)
        elif len(ids) >= sequence.request.max_tokens:
            finish(sequence, "length", None)
        else:
            continue
        if not sequence.request.best_of:
            output.finished.append(sequence)
        elif sequence.request.finished:
            chosen.append(sequence.request)
    return chosen
