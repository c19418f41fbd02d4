"""A request of very many outputs is cheap until it is admitted."""

import time
import tracemalloc

from pagewise_gateway.generation import AnswerOptions
from pagewise_gateway.metrics import Metrics
from pagewise_gateway.scheduler_client.live_request import LiveRequest
from pagewise_gateway.scheduler_client.stream_table import StreamTable
from pagewise_shared.protocol import Prompt, RequestParams, Submit, encode, pack_int32s
from pagewise_shared.sampling import SamplingParams

from tests.gateway.server import TOKENIZER

PROMPTS, N = 32, 128
STOPS = tuple(chr(97 + number) * 1023 + "b" for number in range(16))


def test_outputs_that_wait_to_be_admitted_take_little_time_and_memory() -> None:
    metrics = Metrics("demo")
    table = StreamTable(metrics)
    prompts = tuple(Prompt(pack_int32s([5] * 64), 16) for _ in range(PROMPTS))
    request = Submit(0, 0, "r", prompts, RequestParams(SamplingParams(), n=N))
    tracemalloc.start()
    began = time.process_time()
    live = LiveRequest(request, AnswerOptions(stop=STOPS), TOKENIZER, metrics, table.has_news, lambda live: None)
    table.add(live)
    encode(live.submission(1, 0.0))
    seconds = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert live.num_outputs == PROMPTS * N
    assert peak < 200_000, "nothing for each output"
    assert seconds < 0.5, "some 20 ms, and tracing"
    live.abort()
