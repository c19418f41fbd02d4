"""llama.cpp with several sequences in one batch, as its server has them: a decode of each, and prompts as they fit.

    python llama_cpp_engine.py MODEL.gguf SEQUENCES

It runs in an environment of its own (``benchmarks/environments.py``) and imports nothing of Pagewise. It speaks JSON
lines on standard input and output: "ready", then an answer for each list of requests (``Child`` in ``contenders.py``).
All calls are functions of ``llama.h``, which llama-cpp-python exports.
"""

import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

_BATCH = 512
"""Tokens of a batch, llama.cpp's default for physical batches."""
_CONTEXT = 512
"""Tokens of a sequence."""


class Engine:
    """A model and its KV for some sequences."""

    def __init__(self, path: str, sequences: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sequences * _CONTEXT, sequences
        params.n_batch = params.n_ubatch = _BATCH
        params.n_threads = params.n_threads_batch = len(os.sched_getaffinity(0))
        params.kv_unified = False
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp cannot serve {path}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)

    def add(self, token: int, position: int, sequence: int, last: bool) -> None:
        """Put a token into the batch. ``last``: its logits are wanted."""
        batch, at = self.batch, self.batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, last
        batch.n_seq_id[at] = 1
        batch.seq_id[at][0] = sequence
        batch.n_tokens += 1

    def compute(self) -> dict[int, int]:
        """Compute the batch; return the likeliest next token of each sequence that asks for logits."""
        if llama_cpp.llama_decode(self.context, self.batch):
            raise RuntimeError("llama.cpp could not compute a batch")
        chosen = {}
        for at in range(self.batch.n_tokens):
            if self.batch.logits[at]:
                logits = llama_cpp.llama_get_logits_ith(self.context, at)
                chosen[self.batch.seq_id[at][0]] = int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
        self.batch.n_tokens = 0
        return chosen

    def generate(self, works: list[dict[str, Any]]) -> list[list[int]]:
        """Return the greedy tokens of each request."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), False)
        outputs: list[list[int]] = [[] for _ in works]
        waiting = [(i, at) for i, work in enumerate(works) for at in range(len(work["prompt"]))]
        while waiting or any(len(out) < work["output"] for out, work in zip(outputs, works, strict=True)):
            for i, (out, work) in enumerate(zip(outputs, works, strict=True)):
                if out and len(out) < work["output"]:
                    self.add(out[-1], len(work["prompt"]) + len(out) - 1, i, True)
            free = _BATCH - self.batch.n_tokens
            for i, at in waiting[:free]:
                prompt = works[i]["prompt"]
                self.add(prompt[at], at, i, at + 1 == len(prompt))
            del waiting[:free]
            for i, token in self.compute().items():
                outputs[i].append(token)
        return outputs


def main() -> None:
    engine = Engine(sys.argv[1], int(sys.argv[2]))
    print('"ready"', flush=True)
    for line in sys.stdin:
        works = json.loads(line)
        began, cpu = time.perf_counter(), time.process_time()
        outputs = engine.generate(works)
        taken = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        assert [len(out) for out in outputs] == [work["output"] for work in works]
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
