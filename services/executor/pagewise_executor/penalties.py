"""Penalties: what a sequence has said already becomes less likely, by how often it was said."""

from typing import Protocol

import numpy as np
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.rows import Int32s


def penalises(params: SamplingParams) -> bool:
    """Whether anything is penalised."""
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


class Penalties(Protocol):
    """Counts the tokens of rows that have penalties, and applies them."""

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A sequence with penalties takes ``row``; ``tokens`` are all its known tokens."""
        ...

    def apply(self, logits: torch.Tensor, rows: list[int], which: list[int]) -> None:
        """Change ``logits`` [n, vocab] float32 in place where they belong to ``rows``: at ``which``."""
        ...

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """``rows`` have drawn ``tokens`` int64."""
        ...


class TorchPenalties:
    """In PyTorch, row by row."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows: dict[int, tuple[SamplingParams, torch.Tensor, torch.Tensor]] = {}

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """See ``Penalties``."""
        self._rows[row] = params, *_counted(tokens, num_prompt_tokens, self._vocab_size, self._device)

    def apply(self, logits: torch.Tensor, rows: list[int], which: list[int]) -> None:
        """See ``Penalties``."""
        for number, index in zip(rows, which, strict=True):
            params, counts, in_prompt = self._rows[number]
            row = logits[index]
            if params.repetition_penalty != 1.0:
                seen = in_prompt | (counts > 0)
                scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
                row.copy_(torch.where(seen, scaled, row))
            row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """See ``Penalties``."""
        for number, token in zip(rows, tokens, strict=True):
            self._rows[number][1].index_add_(0, token[None], torch.ones(1, dtype=torch.int32, device=self._device))


class TritonPenalties:
    """By the Triton kernel, for all rows of a step at once.

    The counts of ``num_rows`` rows are allocated when the first has a penalty: five bytes per entry of the vocabulary.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._params: dict[int, SamplingParams] = {}
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self._counts is None or self._in_prompt is None:
            shape = self._num_rows, self._vocab_size
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        return self._counts, self._in_prompt

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """See ``Penalties``."""
        self._params[row] = params
        counts, in_prompt = self._tables()
        counts[row], in_prompt[row] = _counted(tokens, num_prompt_tokens, self._vocab_size, self._device)

    def apply(self, logits: torch.Tensor, rows: list[int], which: list[int]) -> None:
        """See ``Penalties``."""
        from pagewise_kernels.penalties import penalise

        params = [self._params[row] for row in rows]

        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32).to(self._device, non_blocking=True)

        index = torch.tensor(which).to(self._device, non_blocking=True)
        held = torch.tensor(rows, dtype=torch.int32).to(self._device, non_blocking=True)
        logits[index] = penalise(
            logits[index],
            held,
            *self._tables(),
            repetition=column([p.repetition_penalty for p in params]),
            presence=column([p.presence_penalty for p in params]),
            frequency=column([p.frequency_penalty for p in params]),
        )

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """See ``Penalties``."""
        held = torch.tensor(rows).to(self._device, non_blocking=True)
        ones = torch.ones(len(rows), dtype=torch.int32, device=self._device)
        self._tables()[0].index_put_((held, tokens), ones, accumulate=True)


def _counted(
    tokens: Int32s, num_prompt_tokens: int, vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token stands in the output [vocab] int32, and whether it stands in the prompt [vocab] bool."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    counts = torch.bincount(ids[num_prompt_tokens:], minlength=vocab_size).to(torch.int32)
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    in_prompt[ids[:num_prompt_tokens]] = True
    return counts, in_prompt
