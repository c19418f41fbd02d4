"""Samples tokens from logits: penalties, bias and masks, then what ``drawing`` does."""

from dataclasses import dataclass, field

import numpy as np
import torch
from pagewise_shared.protocol import TokenLogprobs
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.drawing import Drawing
from pagewise_executor.rows import Int32s

_NEGATIVE = float("-inf")


@dataclass(slots=True)
class RowSampling:
    """What the sampler remembers of a row.

    ``counts`` [vocab] int32: how often each token stands in the output; ``in_prompt`` [vocab] bool. Both only for rows
    with penalties. ``history``: all tokens, only for rows with bad words.
    """

    params: SamplingParams
    num_prompt_tokens: int
    num_output_tokens: int
    counts: torch.Tensor | None = None
    in_prompt: torch.Tensor | None = None
    history: list[int] = field(default_factory=list)

    @property
    def shapes_logits(self) -> bool:
        """Whether logits change before the draw (other than by temperature and filters)."""
        p = self.params
        return bool(
            self.counts is not None
            or p.logit_bias
            or p.allowed_token_ids
            or p.bad_words
            or (p.stop_token_ids and p.min_tokens > self.num_output_tokens)
        )


class Sampler:
    """Samples for the rows of one executor."""

    def __init__(self, vocab_size: int, device: torch.device, drawing: Drawing) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._drawing = drawing
        self._rows: dict[int, RowSampling] = {}
        self._plain: set[int] = set()
        self._simple: set[int] = set()

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A sequence takes ``row``; ``tokens`` are all its known tokens."""
        state = RowSampling(params, num_prompt_tokens, len(tokens) - num_prompt_tokens)
        if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0:
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
            state.counts = torch.bincount(ids[num_prompt_tokens:], minlength=self._vocab_size).to(torch.int32)
            state.in_prompt = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
            state.in_prompt[ids[:num_prompt_tokens]] = True
        if params.bad_words:
            state.history = tokens.tolist()
        self._rows[row] = state
        self._drawing.join(row, params)
        simple = params.logprobs is None and not state.shapes_logits
        (self._simple.add if simple else self._simple.discard)(row)
        (self._plain.add if simple and params.temperature == 0 else self._plain.discard)(row)

    def leave(self, row: int) -> None:
        """The row's sequence is gone."""
        self._rows.pop(row, None)
        self._plain.discard(row)
        self._simple.discard(row)

    def are_simple(self, rows: list[int]) -> bool:
        """Whether ``drawing`` is all that sampling is for these rows: nothing shapes their logits or reports them."""
        return self._simple.issuperset(rows)

    def sample(
        self, logits: torch.Tensor, rows: list[int], positions: torch.Tensor
    ) -> tuple[torch.Tensor, list["LogprobsWanted"]]:
        """Tokens int64 [n] for ``rows``, from ``logits`` [n, vocab], and what is needed to report log-probabilities.

        ``positions`` int64 [n]: absolute position of the token that is drawn.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1), []
        states = [self._rows[row] for row in rows]
        raw = logits.float()
        shaped = self._shape(raw, states)
        tokens = self._drawing.draw(shaped, rows, positions)
        for i, state in enumerate(states):
            state.num_output_tokens += 1
            if state.counts is not None:
                state.counts.index_add_(0, tokens[i : i + 1], torch.ones(1, dtype=torch.int32, device=self._device))
            if state.params.bad_words:
                state.history.append(int(tokens[i]))
        wanted = [
            LogprobsWanted(i, raw[i], tokens[i], state.params.logprobs)
            for i, state in enumerate(states)
            if state.params.logprobs is not None
        ]
        return tokens, wanted

    def _shape(self, logits: torch.Tensor, states: list[RowSampling]) -> torch.Tensor:
        if not any(state.shapes_logits for state in states):
            return logits
        shaped = logits.clone()
        for row, state in zip(shaped, states, strict=True):
            if state.shapes_logits:
                _shape_row(row, state)
        return shaped


def _shape_row(row: torch.Tensor, state: RowSampling) -> None:
    """Penalties, bias and masks of one row [vocab], in place."""
    p = state.params
    if state.counts is not None:
        assert state.in_prompt is not None
        if p.repetition_penalty != 1.0:
            seen = state.in_prompt | (state.counts > 0)
            scaled = torch.where(row > 0, row / p.repetition_penalty, row * p.repetition_penalty)
            row.copy_(torch.where(seen, scaled, row))
        row -= p.frequency_penalty * state.counts + p.presence_penalty * (state.counts > 0)
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), device=row.device)
        row.index_add_(0, ids, torch.tensor(list(p.logit_bias.values()), dtype=row.dtype, device=row.device))
    if p.allowed_token_ids:
        ids = torch.tensor(p.allowed_token_ids, device=row.device)
        kept = row[ids]
        row.fill_(_NEGATIVE)
        row[ids] = kept
    if p.stop_token_ids and p.min_tokens > state.num_output_tokens:
        row[torch.tensor(p.stop_token_ids, device=row.device)] = _NEGATIVE
    for word in p.bad_words:
        prefix = len(word) - 1
        if prefix == 0 or state.history[-prefix:] == list(word[:-1]):
            row[word[-1]] = _NEGATIVE


@dataclass(slots=True, frozen=True)
class LogprobsWanted:
    """A token whose log-probability somebody asked for; ``logits`` [vocab] float32 are the raw ones."""

    index: int
    logits: torch.Tensor
    token: torch.Tensor
    num_alternatives: int | None

    def report(self) -> TokenLogprobs:
        """The log-probabilities, brought to the host."""
        logprobs = self.logits.log_softmax(dim=-1)
        token = int(self.token)
        own = logprobs[token]
        rank = int((logprobs > own).sum()) + 1
        count = min(self.num_alternatives or 0, len(logprobs))
        values, ids = logprobs.topk(count) if count else (logprobs[:0], torch.zeros(0, dtype=torch.int64))
        return TokenLogprobs(self.index, token, float(own), rank, tuple(ids.tolist()), tuple(values.tolist()))
