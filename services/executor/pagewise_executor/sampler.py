"""Samples tokens from logits: penalties, bias and masks, then what ``drawing`` does."""

from dataclasses import dataclass, field

import torch
from pagewise_shared.sampling import SamplingParams

from pagewise_executor.drawing import Drawing
from pagewise_executor.logprobs import Measure, WantedLogprobs, want
from pagewise_executor.penalties import Penalties, penalises
from pagewise_executor.rows import Int32s

_NEGATIVE = float("-inf")


@dataclass(slots=True)
class RowSampling:
    """What the sampler remembers of a row.

    ``history``: all tokens, only for rows with bad words.
    """

    params: SamplingParams
    num_output_tokens: int
    history: list[int] = field(default_factory=list)

    @property
    def shapes_logits(self) -> bool:
        """Whether logits change before the draw (other than by temperature and filters)."""
        p = self.params
        return bool(
            penalises(p)
            or p.logit_bias
            or p.allowed_token_ids
            or p.bad_words
            or (p.stop_token_ids and p.min_tokens > self.num_output_tokens)
        )


class Sampler:
    """Samples for the rows of one executor."""

    def __init__(self, drawing: Drawing, penalties: Penalties, measure: Measure) -> None:
        self._drawing, self._penalties, self._measure = drawing, penalties, measure
        self._rows: dict[int, RowSampling] = {}
        self._plain: set[int] = set()
        self._simple: set[int] = set()

    def join(self, row: int, tokens: Int32s, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A sequence takes ``row``; ``tokens`` are all its known tokens."""
        state = RowSampling(params, len(tokens) - num_prompt_tokens)
        if penalises(params):
            self._penalties.join(row, tokens, num_prompt_tokens, params)
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
    ) -> tuple[torch.Tensor, WantedLogprobs | None]:
        """Tokens int64 [n] for ``rows``, from ``logits`` [n, vocab], and the log-probabilities that are wanted of them.

        ``positions`` int64 [n]: absolute position of the token that is drawn.
        """
        if self._plain.issuperset(rows):
            return logits.argmax(dim=-1), None
        states = [self._rows[row] for row in rows]
        raw = logits.float()
        penalised = [i for i, state in enumerate(states) if penalises(state.params)]
        shaped = raw.clone() if any(state.shapes_logits for state in states) else raw
        if penalised:
            self._penalties.apply(shaped, [rows[i] for i in penalised], penalised)
        for row, state in zip(shaped, states, strict=True):
            if state.shapes_logits:
                _shape_row(row, state)
        tokens = self._drawing.draw(shaped, rows, positions)
        if penalised:
            self._penalties.count([rows[i] for i in penalised], tokens[penalised])
        for i, state in enumerate(states):
            state.num_output_tokens += 1
            if state.params.bad_words:
                state.history.append(int(tokens[i]))
        wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
        if not wanted:
            return tokens, None
        counts = [states[i].params.logprobs for i in wanted]
        return tokens, want(raw[wanted], tokens[wanted], wanted, counts, self._measure)


def _shape_row(row: torch.Tensor, state: RowSampling) -> None:
    """Bias and masks of one row [vocab], in place."""
    p = state.params
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
