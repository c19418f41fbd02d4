"""The log-probabilities that requests ask for, computed for all rows of a step at once."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from pagewise_shared.protocol import TokenLogprobs

from pagewise_executor.step_work import Chunk, SequenceState
from pagewise_executor.uploads import Uploads, to_host_together

_AT_ONCE = 512
"""The most positions of a prompt whose log-probabilities are computed at once: each takes some float32 vectors
[vocab]."""

ComputeLogprobs = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""From logits [n, vocab] and tokens int64 [n] to log-probabilities float32 [n] and ranks [n], from 1 on."""


@dataclass(slots=True, frozen=True)
class LogprobsTensors:
    """Log-probabilities of the tokens at ``indices`` [n] of a step or prompt, with ``counts`` [n] alternatives each.

    ``tokens``, ``logprobs``, ``ranks`` [n]: of these tokens. ``values``, ``ids`` [n, most alternatives]: of the
    likeliest tokens in their place, in order. The tensors are on the host once the step is over.
    """

    indices: list[int]
    counts: list[int]
    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def report(self) -> tuple[TokenLogprobs, ...]:
        """Return one entry for each token. The step must be over."""
        columns = (self.tokens.tolist(), self.logprobs.tolist(), self.ranks.tolist())
        # int32 and float32, as they are sent
        ids, values = _rows_of_bytes(self.ids.int()), _rows_of_bytes(self.values)
        return tuple(
            TokenLogprobs(index, token, own, rank, ids[row][: 4 * count], values[row][: 4 * count])
            for row, (index, count, token, own, rank) in enumerate(
                zip(self.indices, self.counts, *columns, strict=True)
            )
        )


def _rows_of_bytes(table: torch.Tensor) -> list[bytes]:
    data, size = table.contiguous().numpy().tobytes(), table.shape[1] * table.element_size()
    return [data[begin : begin + size] for begin in range(0, len(table) * size, size)] if size else [b""] * len(table)


def gather_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    indices: list[int],
    counts: list[int | None],
    compute: ComputeLogprobs,
    ranked: torch.Tensor | None = None,
) -> LogprobsTensors:
    """Compute the log-probabilities of ``tokens`` int64 [n] and of the ``counts`` likeliest tokens from raw ``logits``
    [n, vocab], and begin to copy them to the host.

    ``ranked`` [n, vocab]: logits that decide which tokens are the likeliest, minus infinity for tokens that must not be
    among them; None: the raw logits.
    """
    own, ranks = compute(logits, tokens)
    limited = [min(count or 0, logits.shape[1]) for count in counts]
    values, ids = (logits if ranked is None else ranked).float().topk(max(limited, default=0), dim=-1)
    sampled = logits.gather(1, tokens[:, None]).float()
    values = values - (sampled - own[:, None])
    return LogprobsTensors(indices, limited, *to_host_together(tokens, own, ranks, values, ids))


def compute_logprobs(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute log-probabilities float32 [n] and ranks [n] of tokens int64 [n] from logits [n, vocab] in PyTorch."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    return own[:, 0], (logprobs > own).sum(dim=-1) + 1


def prompt_logprobs(
    logits: torch.Tensor,
    reported: Iterable[tuple[Chunk, int]],
    sequences: Mapping[int, SequenceState],
    upload: Uploads,
    compute: ComputeLogprobs,
) -> list[tuple[int, LogprobsTensors]]:
    """Compute the log-probabilities of prompt tokens, which the first ``count`` positions of each chunk predict.

    ``logits``: [sum of counts, vocab]. ``sequences``: by row. Returns them in parts, each with its row.
    """
    prompts, offset = [], 0
    for chunk, count in reported:
        held = sequences[chunk.row]
        first = chunk.start + 1
        tokens = upload(held.tokens[first : first + count].astype(np.int64))
        indices, counts = list(range(first, first + count)), [held.sampling.prompt_logprobs] * count
        for start in range(0, count, _AT_ONCE):
            part = slice(start, min(count, start + _AT_ONCE))
            own = logits[offset : offset + count][part]
            prompts.append((chunk.row, gather_logprobs(own, tokens[part], indices[part], counts[part], compute)))
        offset += count
    return prompts
