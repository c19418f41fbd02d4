"""OpenVINO GenAI's continuous batching with or without its prefix cache: all in float32, or as it computes by default.

    python openvino_genai_engine.py MODEL prefix-cache|no-prefix-cache float32|default

It runs in an environment of its own (``benchmarks/environments.py``) and imports nothing of Pagewise. It speaks JSON
lines on standard input and output: "ready", then an answer for each list of requests (``Child`` in ``contenders.py``).
"""

import json
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

_CACHE_GB = 2
_FLOAT32 = {"KV_CACHE_PRECISION": "f32", "INFERENCE_PRECISION_HINT": "f32"}


def main() -> None:
    path, cache, precision = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = _CACHE_GB
    scheduler.enable_prefix_caching = cache == "prefix-cache"
    properties = _FLOAT32 if precision == "float32" else {}
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties)
    print('"ready"', flush=True)
    for line in sys.stdin:
        works = json.loads(line)
        prompts = [openvino.Tensor(np.array([work["prompt"]], dtype=np.int64)) for work in works]
        configs = [generation(work["output"]) for work in works]
        began, cpu = time.perf_counter(), time.process_time()
        results = pipeline.generate(prompts, configs)
        taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        assert [len(result.m_generation_ids[0]) for result in results] == [work["output"] for work in works]
        print(json.dumps(taken), flush=True)


def generation(tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample, config.eos_token_id = tokens, True, False, 1
    return config


if __name__ == "__main__":
    main()
