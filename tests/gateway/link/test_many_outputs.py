"""A request of very many outputs is cheap until it is admitted."""

import time
import tracemalloc
from array import array

from pagewise_gateway.generation import GenerationRequest, Prompt
from pagewise_gateway.link.live_request import LiveRequest
from pagewise_gateway.link.stream_table import StreamTable
from pagewise_gateway.link.submission import submission
from pagewise_gateway.metrics import Metrics
from pagewise_shared.protocol import encode
from pagewise_shared.sampling import SamplingParams

from tests.gateway.server import TOKENIZER

PROMPTS, N = 32, 128
STOPS = tuple(chr(97 + number) * 1023 + "b" for number in range(16))


def test_outputs_that_wait_to_be_admitted_take_little_time_and_memory() -> None:
    metrics = Metrics("demo")
    table = StreamTable(metrics)
    prompts = tuple(Prompt(array("i", [5] * 64), 16) for _ in range(PROMPTS))
    request = GenerationRequest("r", prompts, SamplingParams(), n=N, stop=STOPS)
    tracemalloc.start()
    began = time.process_time()
    live = LiveRequest(request, TOKENIZER, metrics, table.has_news, lambda live: None)
    table.add(live)
    encode(submission(live, 1, 0.0))
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert live.num_outputs == PROMPTS * N
    assert peak < 200_000, "nothing for each output"
    assert seconds < 0.5, "some 20 ms, and tracing"
    live.abort()
