"""transformers' ``generate`` (a static batch, padded to the longest) or ``generate_batch`` (continuous batching).

    python transformers_engine.py METHOD MODEL DEVICE DTYPE

It speaks JSON lines on standard input and output: "ready", then an answer for each list of requests (``Child`` in
``contenders.py``).
"""

import contextlib
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
import transformers

Works = list[dict[str, Any]]

_CACHE_BYTES = 2 * 2**30


def main() -> None:
    method, path, device, dtype = sys.argv[1:]
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    torch.nn.Module.to(model, device).eval()  # type: ignore[no-untyped-call]
    with contextlib.ExitStack() as stack:
        step: Callable[[Works], None]
        if method == "generate_batch":
            # ``max_new_tokens`` is each request's own; the manager's caches are made once, as a server would.
            options = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, "max_new_tokens": 1}
            config = transformers.GenerationConfig(**options)  # type: ignore[no-untyped-call]
            # By itself it would take most of the memory for its cache, also on a machine with other work.
            share = min(0.8, _CACHE_BYTES / psutil.virtual_memory().available) if device == "cpu" else None
            cache = transformers.ContinuousBatchingConfig(max_memory_percent=share)
            manager = stack.enter_context(
                model.continuous_batching_context_manager(generation_config=config, continuous_batching_config=cache)
            )
            step = functools.partial(generate_batch, manager)
        else:
            step = functools.partial(generate, model, device)
        print('"ready"', flush=True)
        for line in sys.stdin:
            works = json.loads(line)
            began, cpu = time.perf_counter(), time.process_time()
            step(works)
            taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
            print(json.dumps(taken), flush=True)


def generate(model: Any, device: str, works: Works) -> None:
    longest = max(len(work["prompt"]) for work in works)
    ids = torch.tensor([[0] * (longest - len(work["prompt"])) + work["prompt"] for work in works], device=device)
    rows = [[0] * (longest - len(work["prompt"])) + [1] * len(work["prompt"]) for work in works]
    most = max(work["output"] for work in works)
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.tensor(rows, device=device),
            max_new_tokens=most,
            min_new_tokens=most,
            do_sample=False,
            eos_token_id=None,
        )
    assert out.shape[1] == longest + most


def generate_batch(manager: Any, works: Works) -> None:
    wanted = {manager.add_request(work["prompt"], max_new_tokens=work["output"]): work["output"] for work in works}
    done = 0
    while done < len(wanted):
        result = manager.get_result(timeout=60)
        if result is None:
            raise RuntimeError("continuous batching gave no result")
        if result.is_finished():
            assert len(result.generated_tokens) == wanted[result.request_id]
            done += 1


if __name__ == "__main__":
    main()
