"""What a request's output is told as: text, reasons, and what it is charged for."""

import asyncio
from array import array
from pathlib import Path

import pytest
from pagewise_scheduler.actors.live_request import LiveRequest
from pagewise_scheduler.core.memory.kv_cache_manager import KVCacheManager
from pagewise_scheduler.core.requests.request import FinishReason, Sequence, SequenceStatus
from pagewise_scheduler.generation import GenerationRequest
from pagewise_scheduler.metrics import Metrics
from pagewise_shared.sampling import BeamParams, SamplingParams

from tests.scheduler.actors.test_fleet import TOKENIZER, executor, running

TOKENS = list(TOKENIZER.encode("hello world end", add_special_tokens=False))
END = min(TOKENIZER.eos_token_ids)


async def told(
    tokens: list[int],
    reason: FinishReason,
    stop_reason: int | None = None,
    *,
    stop: tuple[str, ...] = (),
    best: int = 0,
) -> tuple[str, str | None, str | int | None]:
    """Text, finish and stop reason of an output of which all tokens come when it has finished."""
    sampling = SamplingParams(stop_token_ids=(END,))
    generation = GenerationRequest("r", array("i", [1, 2, 3]), 30, sampling, stop=stop, best_of=best)
    live = LiveRequest(generation, TOKENIZER, Metrics("m"), lambda live: None)
    sequence = Sequence(live.request, 0, sampling, KVCacheManager(8, 4).new_table(), tokens)
    sequence.status, sequence.finish_reason = SequenceStatus.FINISHED, reason
    sequence.stop_reason = stop_reason
    for token in tokens:
        live.take_token(sequence, token, None, 0.0)
    live.take_finish(sequence, 0.0)
    deltas = [delta async for deltas in live for delta in deltas]
    return "".join(delta.text for delta in deltas), deltas[-1].finish_reason, deltas[-1].stop_reason


@pytest.mark.parametrize("best", [0, 2])
async def test_only_the_stop_token_itself_is_hidden(best: int) -> None:
    assert await told([*TOKENS, END], "stop", END, best=best) == ("hello world end", "stop", None)
    assert await told(TOKENS, "length", best=best) == ("hello world end", "length", None)


async def test_a_stop_string_that_the_last_permitted_token_completes_is_why_it_ended() -> None:
    assert await told(TOKENS, "length", stop=("end",)) == ("hello world ", "stop", "end")
    assert await told(TOKENS, "length", stop=("ends",)) == ("hello world end", "length", None)


@pytest.mark.parametrize(("best_of", "beam"), [(3, None), (0, BeamParams(3))])
async def test_what_was_tried_is_charged_for_too(tmp_path: Path, best_of: int, beam: BeamParams | None) -> None:
    async with running(tmp_path) as stack, executor(tmp_path):
        await stack.ready(1)
        sampling = SamplingParams(temperature=0 if beam else 1.0)
        stream = stack.router.submit(
            GenerationRequest("r", array("i", [1, 2, 3]), 8, sampling, best_of=best_of, beam=beam)
        )
        async with asyncio.timeout(10):
            async for _ in stream:
                pass
        assert stream.stats.output_tokens == 8
        assert 20 < stream.num_drawn_tokens <= 24
