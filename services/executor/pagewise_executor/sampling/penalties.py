"""Presence, frequency and repetition penalties: tokens that a sequence contains already become less likely."""

import numpy as np
import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.step_work import Int32s, Int64s
from pagewise_executor.uploads import Uploads


class TorchPenalties:
    """Counts the tokens of the rows that have penalties, and applies the penalties in PyTorch, row by row."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._rows: dict[int, tuple[SamplingParams, torch.Tensor, torch.Tensor]] = {}

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Add a sequence with penalties, which joins in ``row``; ``tokens`` are all its known tokens."""
        self._rows[row] = params, *_counted(tokens, num_prompt_tokens, self._vocab_size, self._device)

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``, which may have had no penalties."""
        self._rows.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: list[int], which: list[int]) -> None:
        """Penalise ``logits`` float32 [n, vocab] in place; their indices ``which`` belong to ``rows``."""
        for number, index in zip(rows, which, strict=True):
            params, counts, in_prompt = self._rows[number]
            row = logits[index]
            if params.repetition_penalty != 1.0:
                seen = in_prompt | (counts > 0)
                scaled = torch.where(row > 0, row / params.repetition_penalty, row * params.repetition_penalty)
                row.copy_(torch.where(seen, scaled, row))
            row -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Count ``tokens`` int64, which were sampled for ``rows``."""
        for number, token in zip(rows, tokens, strict=True):
            self._rows[number][1].index_add_(0, token[None], torch.ones(1, dtype=torch.int32, device=self._device))


class TritonPenalties:
    """Penalties by the Triton kernel, for all rows of a step at once, without waiting for the device.

    The counts of ``num_rows`` rows are allocated when the first has a penalty: five bytes per entry of the vocabulary.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._upload = Uploads(device)
        self._params: dict[int, SamplingParams] = {}
        self._joined: dict[int, tuple[Int64s, int]] = {}
        self._counts: torch.Tensor | None = None
        self._in_prompt: torch.Tensor | None = None

    def _tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how often each token was sampled, int32, and whether it is in the prompt, bool: [rows, vocab] each.

        The rows that have joined since the last call are counted first.
        """
        if self._counts is None or self._in_prompt is None:
            shape = self._num_rows, self._vocab_size
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self._device)
        if self._joined:
            rows = np.array(list(self._joined), np.int64)
            entries = [(row * self._vocab_size + tokens, first) for row, (tokens, first) in self._joined.items()]
            prompts = np.concatenate([tokens[:first] for tokens, first in entries])
            outputs = np.concatenate([tokens[first:] for tokens, first in entries])
            packed = self._upload(np.concatenate([rows, prompts, outputs]))
            joined, in_prompts, in_outputs = torch.split(packed, [len(rows), len(prompts), len(outputs)])
            self._counts.index_fill_(0, joined, 0)
            self._in_prompt.index_fill_(0, joined, 0)
            self._in_prompt.view(-1).index_fill_(0, in_prompts, 1)
            self._counts.view(-1).scatter_add_(0, in_outputs, torch.ones_like(in_outputs, dtype=torch.int32))
            self._joined.clear()
        return self._counts, self._in_prompt

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """Add a sequence with penalties, which joins in ``row``; ``tokens`` are all its known tokens."""
        self._params[row] = params
        self._joined[row] = tokens.astype(np.int64), num_prompt_tokens

    def leave(self, row: int) -> None:
        """Forget the sequence in ``row``, which may have had no penalties."""
        self._params.pop(row, None)
        self._joined.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: list[int], which: list[int]) -> None:
        """Penalise ``logits`` float32 [n, vocab] in place; their indices ``which`` belong to ``rows``."""
        from pagewise_kernels.penalties import penalise

        index, held = self._upload(np.array([which, rows], np.int64))
        columns = [
            (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in map(self._params.__getitem__, rows)
        ]
        repetition, presence, frequency = self._upload(np.array(columns, np.float32).T)
        penalised = penalise(
            logits.index_select(0, index), held.to(torch.int32), *self._tables(),
            repetition=repetition, presence=presence, frequency=frequency,
        )  # fmt: skip
        logits.index_copy_(0, index, penalised)

    def count(self, rows: list[int], tokens: torch.Tensor) -> None:
        """Count ``tokens`` int64, which were sampled for ``rows``."""
        at = self._upload(np.array(rows, np.int64) * self._vocab_size) + tokens
        self._tables()[0].view(-1).scatter_add_(0, at, torch.ones_like(at, dtype=torch.int32))


Penalties = TorchPenalties | TritonPenalties


def _counted(
    tokens: Int32s, num_prompt_tokens: int, vocab_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how often each token occurs in the output [vocab] int32, and whether it is in the prompt [vocab] bool."""
    ids = torch.from_numpy(tokens.astype(np.int64)).to(device)
    counts = torch.bincount(ids[num_prompt_tokens:], minlength=vocab_size).to(torch.int32)
    in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
    in_prompt[ids[:num_prompt_tokens]] = True
    return counts, in_prompt
