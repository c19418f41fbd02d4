"""The log-probabilities of prompt tokens."""

import numpy as np
import torch

from pagewise_executor.input_batch import Chunk, InputBatch
from pagewise_executor.sampling.logprobs import ComputeLogprobs, LogprobsTensors, gather_logprobs
from pagewise_executor.uploads import Uploads

_LOGPROBS_AT_ONCE = 512
"""The most positions of a prompt whose log-probabilities are computed at once: each takes some float32 vectors of the
vocabulary's size."""


def prompt_logprobs(
    logits: torch.Tensor,
    reported: list[tuple[Chunk, int]],
    batch: InputBatch,
    compute_logprobs: ComputeLogprobs,
    upload: Uploads,
) -> list[tuple[int, LogprobsTensors]]:
    """Compute the log-probabilities of prompt tokens, by row.

    ``logits``: [sum of counts, vocab]. ``reported``: chunks, and ``count`` of each: its first ``count`` positions
    predict the tokens.
    """
    prompts, offset = [], 0
    for chunk, count in reported:
        held = batch.sequences[chunk.row]
        first = chunk.start + 1
        tokens = upload(held.tokens[first : first + count].astype(np.int64))
        indices, counts = list(range(first, first + count)), [held.sampling.prompt_logprobs] * count
        for start in range(0, count, _LOGPROBS_AT_ONCE):
            part = slice(start, min(count, start + _LOGPROBS_AT_ONCE))
            own = logits[offset : offset + count][part]
            wanted = gather_logprobs(own, tokens[part], indices[part], counts[part], compute_logprobs)
            prompts.append((chunk.row, wanted))
        offset += count
    return prompts
