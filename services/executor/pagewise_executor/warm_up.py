"""Compiles the Triton kernels when the executor starts, so that no request waits for it."""

import logging
import time

import msgspec
import numpy as np
import torch
from pagewise_shared.progress import logged_progress

from pagewise_executor.kv.kv_pool import KVPool
from pagewise_executor.profile import dummy_prefill, whole_blocks
from pagewise_executor.runner import Runner
from pagewise_executor.sampling.token_sampler import TritonTokenSampler

log = logging.getLogger(__name__)

CHUNKS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Chunk sizes in tokens. Prefill attention has at most one tile for each; larger chunks use the largest tile."""
_MOST_SECONDS = 60
"""After this time the executor joins, and compiles the remaining kernels when they are needed."""


def warm_up(
    runner: Runner, pool: KVPool, dtype: torch.dtype, max_num_batched_tokens: int, least_tokens: int = 1
) -> None:
    """Launch the kernels of short chunks, of drafts and of sampling. Triton caches them on disk.

    ``dtype``: the type of the model's logits. ``least_tokens``: of steps that CUDA graphs do not compute. Chunks are
    launched with as many sequences as such a step needs, if there can be as many.

    The runner must be reset afterwards: its input batch and the first blocks of its pool have been overwritten. Its
    ``fallback`` is set if Triton launches kernels, which is slower than frozen launches.
    """
    from pagewise_kernels.launch import num_unfrozen_launches

    began = time.perf_counter()
    sizes = (*CHUNKS, least_tokens) if least_tokens > CHUNKS[-1] else CHUNKS
    progress = logged_progress(log, "compiling kernels", 1 + len(sizes), "sizes of steps")
    with torch.inference_mode():
        launch_sampling(runner.info.vocab_size, dtype, pool.device)
    progress.update()
    room = whole_blocks(runner.info)
    longest = min(max_num_batched_tokens, runner.info.max_model_len, room * pool.block_size)
    for size in sizes:
        number = -(-least_tokens // size)
        blocks = number * -(-size // pool.block_size)
        fits = number * size <= max_num_batched_tokens and number <= runner.info.max_num_seqs
        if size <= longest and fits and blocks <= room and time.perf_counter() - began < _MOST_SECONDS:
            dummy_prefill(runner, 0, size, number, drafts=True)
        progress.update()
    if num_unfrozen_launches():
        runner.info = msgspec.structs.replace(runner.info, fallback=True)
    log.info("kernels warmed up in %.1f s", time.perf_counter() - began)


def warm_up_copies(pool: KVPool) -> None:
    """Launch the kernels of copies between blocks, on each rank by itself."""
    with torch.inference_mode():
        pool.scatter(np.array([0], np.int32), pool.gather(np.array([0], np.int32)))
        if pool.num_blocks > 1:
            pool.copy_blocks(np.array([[0, 1]], np.int32))


def launch_sampling(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launch the kernels of sampling, penalties and log-probabilities for one row.

    Logits are float32 for sampling, and of the model's type for the log-probabilities of a prompt. The count tables of
    the penalties are not the runner's, which are allocated for the first request with penalties.
    """
    from pagewise_kernels.logprobs import token_logprobs
    from pagewise_kernels.penalties import penalise
    from pagewise_kernels.sampling import sample

    row = torch.zeros(1, dtype=torch.int32, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    logits = torch.zeros(1, vocab_size, dtype=torch.float32, device=device)
    tokens = sample(logits, TritonTokenSampler(1, device).parameters(), row, position)
    for each in {torch.float32, dtype}:
        token_logprobs(logits.to(each), tokens)
    counts, in_prompt = logits.to(torch.int32), logits.bool()
    nothing = torch.zeros(1, dtype=torch.float32, device=device)
    penalise(logits, row, counts, in_prompt, repetition=nothing + 1, presence=nothing, frequency=nothing)
