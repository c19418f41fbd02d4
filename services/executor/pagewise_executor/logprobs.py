"""Log-probabilities that somebody asked for: computed for all rows of a step at once, on their way to the host."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from pagewise_shared.protocol import TokenLogprobs

Measure = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Logits [n, vocab] and tokens int64 [n] to log-probabilities float32 [n] and ranks [n], 1 for the likeliest."""


@dataclass(slots=True, frozen=True)
class WantedLogprobs:
    """Of the tokens at ``indices``, with ``counts`` alternatives each. Tensors are on the host once the step is over.

    ``tokens``, ``logprobs``, ``ranks`` [n]; ``values``, ``ids`` [n, most alternatives], the likeliest first.
    """

    indices: list[int]
    counts: list[int]
    tokens: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor
    values: torch.Tensor
    ids: torch.Tensor

    def report(self) -> tuple[TokenLogprobs, ...]:
        """One entry for each token; the step is over."""
        columns = (self.tokens, self.logprobs, self.ranks, self.values, self.ids)
        rows = zip(self.indices, self.counts, *(column.tolist() for column in columns), strict=True)
        return tuple(
            TokenLogprobs(index, token, own, rank, tuple(ids[:count]), tuple(values[:count]))
            for index, count, token, own, rank, values, ids in rows
        )


def want(
    logits: torch.Tensor, tokens: torch.Tensor, indices: list[int], counts: list[int | None], measure: Measure
) -> WantedLogprobs:
    """Those of ``tokens`` int64 [n] in raw ``logits`` [n, vocab], and of the ``counts`` likeliest entries."""
    own, ranks = measure(logits, tokens)
    wanted = [min(count or 0, logits.shape[1]) for count in counts]
    values, ids = logits.float().topk(max(wanted, default=0), dim=-1)
    drawn = logits.gather(1, tokens[:, None]).float()
    values = values - (drawn - own[:, None])
    return WantedLogprobs(indices, wanted, *(to_host(tensor) for tensor in (tokens, own, ranks, values, ids)))


def measure_in_torch(logits: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A ``Measure`` in PyTorch."""
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(1, tokens[:, None])
    return own[:, 0], (logprobs > own).sum(dim=-1) + 1


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host; from a GPU it is there once the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
