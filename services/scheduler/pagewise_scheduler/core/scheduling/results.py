"""Whether a result answers its step, and how sequences take the tokens that were sampled for them."""

from collections.abc import Callable, Container, Iterator
from collections.abc import Sequence as ReadOnlyList

from pagewise_shared.protocol import RowFailure, StepResult, unpack_int32s

from pagewise_scheduler.core.requests.request import FinishReason, Sequence
from pagewise_scheduler.core.scheduling.step import StepInFlight, StepMismatchError, StepOutput

Finish = Callable[[Sequence, FinishReason, str | int | None], None]


def check_result(
    step: StepInFlight | None, result: StepResult, tokens: ReadOnlyList[int] | None = None
) -> tuple[StepInFlight, ReadOnlyList[int]]:
    """The oldest step in flight, and the tokens that ``result`` has for it, which the caller may have unpacked already.

    Raises:
        StepMismatchError: it is another step's, or of the wrong shape.
        ProtocolError: its tokens are no whole number of int32 values.
    """
    if step is None or result.step != step.step:
        expected = f"step {step.step}" if step else "none in flight"
        raise StepMismatchError(f"result of step {result.step}, expected {expected}")
    if tokens is None:
        tokens = unpack_int32s(result.tokens)
    if len(tokens) != len(step.sampled):
        raise StepMismatchError(f"step {step.step} returned {len(tokens)} tokens for {len(step.sampled)} sequences")
    given = {entry.index: len(entry.top_ids) // 4 for entry in result.logprobs}
    for index, sequence in enumerate(step.completed, len(step.sampled) - len(step.completed)):
        for feature in sequence.request.features:
            if given.get(index, 0) < feature.num_candidates(sequence):
                raise StepMismatchError(f"step {step.step} returned too few log-probabilities for a sequence")
    return step, tokens


def failed(
    step: StepInFlight | None, result: StepResult, requests: Container[str]
) -> Iterator[tuple[Sequence, RowFailure]]:
    """The sequences that cannot go on, as ``result`` says, and why; nothing if it does not answer ``step``.

    Each request once, and only those among ``requests``, by their ids.
    """
    if step is None or result.step != step.step:
        return
    for failure in result.failures:
        sequence = step.sampled[failure.index] if failure.index < len(step.sampled) else None
        if sequence is not None and not sequence.finished and sequence.request.request_id in requests:
            yield sequence, failure


def take_logprobs(step: StepInFlight, result: StepResult, output: StepOutput) -> set[Sequence]:
    """Hand out log-probabilities. Returns the sequences whose log-probabilities and tokens features have taken."""
    taken: set[Sequence] = set()
    for entry in result.logprobs:
        if 0 <= entry.index < len(step.sampled):
            sequence = step.sampled[entry.index]
            if sequence.finished:
                continue
            if any(feature.take_logprobs(sequence, entry, output) for feature in sequence.request.features):
                taken.add(sequence)
            else:
                output.logprobs[sequence] = entry
    for prompt in result.prompt_logprobs:
        if (owner := step.chunk_rows.get(prompt.row)) is not None:
            output.prompt_logprobs.append((owner.request, prompt.entries))
    return taken


def take_tokens(
    step: StepInFlight, tokens: ReadOnlyList[int], taken: Container[Sequence], output: StepOutput, finish: Finish
) -> None:
    """Append each token to its sequence and to its sink, and ``finish`` sequences that stop or reach their length.

    ``taken``: sequences whose tokens features have taken.
    """
    stopped: list[tuple[Sequence, int]] = []
    num_without_sink = 0
    for sequence, token in zip(step.sampled, tokens, strict=True):  # runs for every token
        sink = sequence.sink
        if sink is not None:
            sequence.output_token_ids.append(token)
            sink.streams.append(sequence.stream)
            sink.tokens.append(token)
        else:
            num_without_sink += 1
            if sequence.finished or sequence in taken or not sequence.request.max_tokens:
                continue
            sequence.output_token_ids.append(token)
        if token in sequence.stop_ids:
            stopped.append((sequence, token))
    output.num_told = len(step.sampled) - num_without_sink
    _finish_stopped(step, stopped, output, finish)


def _finish_stopped(
    step: StepInFlight, stopped: list[tuple[Sequence, int]], output: StepOutput, finish: Finish
) -> None:
    ended: list[Sequence] = []
    # An executor samples an end before ``min_tokens`` only if the grammar allows nothing else.
    for sequence, token in stopped:
        if len(sequence.output_token_ids) > sequence.sampling.min_tokens or sequence.sampling.grammar:
            finish(sequence, "stop", token)
            ended.append(sequence)
    for sequence in step.ending:
        if not sequence.finished and sequence.num_tokens >= sequence.max_num_tokens:
            finish(sequence, "length", None)
            ended.append(sequence)
    output.finished += [sequence for sequence in ended if sequence.request.computes_for is None]
