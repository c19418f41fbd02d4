"""Draws tokens from logits: penalties and masks first, then filters, then one Gumbel-max draw per row."""

from dataclasses import dataclass, field

import numpy as np
import torch
from pagewise_shared.protocol import TokenLogprobs
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.philox import gumbel_noise
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

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, RowSampling] = {}
        self._seeds: dict[int, int] = {}
        self._plain: set[int] = set()

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
        seed = params.seed % 2**64
        self._seeds[row] = seed - 2**64 if seed >= 2**63 else seed
        plain = params.temperature == 0 and params.logprobs is None and not state.shapes_logits
        (self._plain.add if plain else self._plain.discard)(row)

    def leave(self, row: int) -> None:
        """The row's sequence is gone."""
        self._rows.pop(row, None)
        self._plain.discard(row)

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
        tokens = shaped.argmax(dim=-1)
        drawn = [i for i, state in enumerate(states) if state.params.temperature > 0]
        if drawn:
            index = torch.tensor(drawn, device=self._device)
            seeds = torch.tensor([self._seeds[rows[i]] for i in drawn], device=self._device)
            params = [states[i].params for i in drawn]
            tokens[index] = _draw(shaped[index], params, seeds, positions[index])
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


def _draw(
    logits: torch.Tensor, params: list[SamplingParams], seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token per row [n], from softmax(logits / temperature) after the filters, without computing a softmax."""
    vocab_size, device = logits.shape[-1], logits.device
    temperature = torch.tensor([p.temperature for p in params], device=device)
    logits = logits / temperature[:, None]
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device).log()  # log 0 = -inf switches it off
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + floor[:, None], _NEGATIVE)
    if any(0 < p.top_k < vocab_size or p.top_p < 1 for p in params):
        logits = _filter_top(logits, params)
    return (logits + gumbel_noise(seeds, positions, vocab_size)).argmax(dim=-1)


def _filter_top(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Keep the top_k most likely entries, and of these the fewest whose probabilities reach top_p."""
    vocab_size, device = logits.shape[-1], logits.device
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=device)
    ordered = ordered.masked_fill(torch.arange(vocab_size, device=device) >= top_k[:, None], _NEGATIVE)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([p.top_p for p in params], device=device)
    # The most likely entry always stays; a top_p of 1 must not lose the tail to rounding.
    dropped = (before >= top_p[:, None]) & (top_p < 1)[:, None]
    dropped[:, 0] = False
    ordered = ordered.masked_fill(dropped, _NEGATIVE)
    return torch.empty_like(logits).scatter_(-1, order, ordered)


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
